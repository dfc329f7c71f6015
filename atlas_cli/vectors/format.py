"""The task-vector file: blocks of a fine-tuned minus a base model, with where they came from.

A safetensors file. A dense block is one tensor under its own name; an 8-bit block adds
`NAME#scale`, one of fewer bits `NAME#low` and `NAME#step`; the parts of a low-rank block are
`NAME#up0`, `NAME#down0`, `NAME#up1`, ...
The metadata key `atlas` holds one JSON object: see Header.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from atlas_cli.core import storage
from atlas_cli.core.packed import Packed, Residual, groups_of
from atlas_cli.core.storage import BITS, Block, BlockPart, Dense, Factors, Quantised
from atlas_cli.errors import CheckpointError, MismatchError
from atlas_cli.io.checkpoint import open_safetensors, read_metadata
from atlas_cli.io.files import sha256_of
from atlas_cli.io.tensors import LazyTensor, LazyTensors

STORAGES = ("fp32", "fp16", "bf16", "int8", "int4", "int3", "int2", "rtvq", "factors")
_TEXTS = ("name", "activation", "scope", "fingerprint", "atlas")
_OBJECTS = ("base", "finetuned", "architecture")
FORMAT = "atlas.task_vector"
VERSION = 1


# The header -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class BlockInfo:
    """What is known of a block without reading it.

    `storage` is one of STORAGES; `starts` are the first rows of the parts of a
    factorised block. `norm` is |tau|, `base_norm` |theta0|, `error` the relative error of storage.
    """

    name: str
    shape: tuple[int, ...]
    storage: str
    norm: float
    base_norm: float
    error: float
    starts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Header:
    """The provenance of a task vector, and the list of its blocks.

    `base_norm` is |theta0| over the whole scope, also over blocks that did not change; files that
    were written before it was kept have None. `shared` has the name and the sha256 of a file beside
    this one, whose values are added to blocks of storage rtvq.
    """

    name: str
    base: dict[str, Any]
    finetuned: dict[str, Any]
    architecture: dict[str, Any]
    activation: str
    scope: str
    scale: float
    fingerprint: str
    blocks: tuple[BlockInfo, ...]
    dropped: tuple[str, ...] = ()
    linearised: bool = False
    atlas: str = ""
    base_norm: float | None = None
    shared: dict[str, str] | None = None
    format: str = FORMAT
    version: int = VERSION

    @property
    def norm(self) -> float:
        """|tau| before storage."""
        return math.hypot(*(block.norm for block in self.blocks))

    @property
    def relative_norm(self) -> float | None:
        """|tau| / |theta0| over the scope, or else over the blocks; None if the base is zero."""
        base = self.base_norm
        if base is None:
            base = math.hypot(*(block.base_norm for block in self.blocks))
        return self.norm / base if base else None


def to_metadata(header: Header) -> dict[str, str]:
    """A header as safetensors metadata."""
    found = {**vars(header), "blocks": [vars(block) for block in header.blocks]}
    if header.shared is None:  # most vectors share nothing, and their files are as they always were
        del found["shared"]
    text = json.dumps(found, sort_keys=True, ensure_ascii=False)
    return {"format": "pt", "atlas": text}


def read_header(path: Path) -> Header:
    """The header of a task-vector file. Raises CheckpointError for any other file."""
    text = read_metadata(path).get("atlas")
    if text is None:
        raise CheckpointError(
            f"{path}: is not a task vector; make one with: atlas extract BASE {path} -o VECTOR"
        )
    try:
        found = json.loads(text)
        if (found["format"], found["version"]) != (FORMAT, VERSION):
            kind = f"{found['format']} version {found['version']}"
            raise CheckpointError(f"{path}: is {kind}; this atlas reads {FORMAT} {VERSION}")
        found["blocks"] = tuple(_block_info(block) for block in found["blocks"])
        found["dropped"] = tuple(found["dropped"])
        header = Header(**found)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        raise CheckpointError(
            f"{path}: its task-vector header is damaged: {problem!r}"
        ) from problem
    check_header(path, header)
    return header


def _block_info(found: dict[str, Any]) -> BlockInfo:
    found = {**found, "shape": tuple(found["shape"]), "starts": tuple(found["starts"])}
    return BlockInfo(**found)


def check_header(path: Path, header: Header) -> None:
    """Raise CheckpointError for a field of the wrong type, or a number that cannot be."""
    for names, kind, called in ((_TEXTS, str, "text"), (_OBJECTS, dict, "an object")):
        for name in names:
            if not isinstance(getattr(header, name), kind):
                raise _damaged(path, f"{name} is not {called}")
    try:
        json.dumps([getattr(header, name) for name in _OBJECTS], allow_nan=False)
    except ValueError as problem:
        raise _damaged(path, "a number in it is not finite") from problem
    if not _is_number(header.scale):
        raise _damaged(path, "scale is not a number")
    if header.base_norm is not None and not _is_size(header.base_norm):
        raise _damaged(path, "base_norm is not a number from 0 up")
    if not isinstance(header.linearised, bool):
        raise _damaged(path, "linearised is neither true nor false")
    if header.shared is not None:
        check_shared(path, header.shared)
    elif any(block.storage == "rtvq" for block in header.blocks):
        raise _damaged(path, "it does not say what its blocks share")
    if not all(isinstance(name, str) for name in header.dropped):
        raise _damaged(path, "dropped holds what is no name")
    if not header.blocks:
        raise _damaged(path, "it lists no blocks")
    for block in header.blocks:
        _check_info(path, block)
    if len({block.name for block in header.blocks}) < len(header.blocks):
        raise _damaged(path, "it lists a block twice")


def _check_info(path: Path, block: BlockInfo) -> None:
    if not isinstance(block.name, str):
        raise _damaged(path, "a block has no name")
    if block.storage not in STORAGES:
        raise _damaged(path, f"block {block.name}: unknown storage {block.storage!r}")
    if not (all(map(_is_count, block.shape + block.starts)) and all(block.shape)):
        raise _damaged(path, f"block {block.name}: its shape is not made of whole numbers")
    if (block.storage == "factors") != bool(block.starts and block.shape):
        raise _damaged(path, f"block {block.name}: its parts are not those of its storage")
    for key in ("norm", "base_norm", "error"):
        if not _is_size(getattr(block, key)):
            raise _damaged(path, f"block {block.name}: {key} is not a number from 0 up")


def check_shared(path: Path, found: Mapping[str, object]) -> None:
    """Raise CheckpointError unless what is shared is a file of the same folder."""
    name, digest = found.get("file"), found.get("sha256")
    if not (isinstance(name, str) and isinstance(digest, str) and name == Path(name).name):
        raise _damaged(path, "shared is no file beside it")


def _is_number(value: object) -> bool:
    return _is_integer(value) or (isinstance(value, float) and math.isfinite(value))


def _is_size(value: object) -> bool:
    return _is_number(value) and value >= 0  # type: ignore[operator]


def _is_count(value: object) -> bool:
    return _is_integer(value) and value >= 0  # type: ignore[operator]


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path}: its task-vector header is damaged: {what}")


def check_same_base(headers: Mapping[str, Header]) -> None:
    """Raise MismatchError unless all vectors were taken from the same base weights."""
    first, *others = headers.items()
    for name, header in others:
        if header.fingerprint != first[1].fingerprint:
            raise MismatchError(
                f"{name} and {first[0]} were taken from different base models "
                f"({header.base.get('reference')} and {first[1].base.get('reference')}): "
                f"fingerprints {header.fingerprint[:12]} and {first[1].fingerprint[:12]}"
            )


def natural(name: str) -> list[Any]:
    """A key that sorts layer 10 after layer 9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


# Blocks ---------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class StoredVector:
    """A task vector: its header, and a function that reads one block in its stored form."""

    header: Header
    read: Callable[[str], Block]

    @property
    def name(self) -> str:
        """What the vector is called in coefficients."""
        return self.header.name

    @property
    def names(self) -> list[str]:
        """The names of the blocks, in the order of the file."""
        return [block.name for block in self.header.blocks]

    def values(self, name: str) -> torch.Tensor:
        """The values of a block in float32."""
        return storage.decode(self.read(name))


def open_vector(path: Path) -> StoredVector:
    """Open a task-vector file; blocks stay on disk until they are read."""
    header = read_header(path)
    tensors = open_safetensors(path)
    blocks = {block.name: block for block in header.blocks}
    for block in header.blocks:
        _check_block(path, tensors, block)
    shared = _open_shared(path, header.shared) if header.shared else {}
    key = header.shared["sha256"] if header.shared else ""

    def read(name: str) -> Block:
        block = _read_block(path, tensors, blocks[name])
        if blocks[name].storage != "rtvq" or not isinstance(block, Packed):
            return block
        return Residual(read_packed(shared, name, block.shape), block, key)

    return StoredVector(header, read)


def open_checked(path: Path) -> StoredVector:
    """As open_vector, with every block that is read held against what the header says of it."""
    vector = open_vector(path)
    infos = {info.name: info for info in vector.header.blocks}

    def read(name: str) -> Block:
        block = vector.read(name)
        _check_norm(path, infos[name], storage.block_norm(block))
        return block

    return StoredVector(vector.header, read)


def _check_block(path: Path, tensors: LazyTensors, block: BlockInfo) -> None:
    """Refuse a header that promises a block the file does not hold."""
    wanted: dict[str, tuple[int, ...] | None] = {block.name: block.shape}
    if block.storage == "factors":
        parts = range(len(block.starts))
        wanted = {f"{block.name}#{kind}{n}": None for n in parts for kind in ("up", "down")}
    if block.storage == "int8":
        wanted[f"{block.name}#scale"] = (block.shape[0] if len(block.shape) > 1 else 1,)
    if (bits := BITS.get(block.storage)) is not None:
        groups = groups_of(block.shape)
        wanted = {f"{block.name}#{kind}": (groups,) for kind in ("low", "step")}
        wanted[block.name] = (groups, 8 * bits)
    for name, shape in wanted.items():
        if name not in tensors or (shape is not None and tensors[name].shape != shape):
            raise CheckpointError(f"{path}: block {block.name} is not stored as its header says")


def _read_block(path: Path, tensors: LazyTensors, block: BlockInfo) -> Block:
    if block.storage == "factors":
        parts = tuple(
            BlockPart(
                start, *(tensors[f"{block.name}#{kind}{n}"].read() for kind in ("up", "down"))
            )
            for n, start in enumerate(block.starts)
        )
        factors = Factors(block.shape, parts)
        _check_factors(path, block.name, factors)
        return factors
    if block.storage in BITS:
        return read_packed(tensors, block.name, block.shape)
    values = tensors[block.name].read()
    if block.storage == "int8":
        return Quantised(values, tensors[f"{block.name}#scale"].read())
    return Dense(values)


def read_packed(tensors: LazyTensors, name: str, shape: tuple[int, ...]) -> Packed:
    """A block of few bits, by its name."""
    codes, lows, steps = (tensors[f"{name}{kind}"].read() for kind in ("", "#low", "#step"))
    return Packed(shape, codes, lows, steps)


def _open_shared(path: Path, told: Mapping[str, str]) -> LazyTensors:
    """What a vector shares with others of its folder."""
    beside = path.parent / told["file"]
    if not beside.is_file():
        raise CheckpointError(f"{path}: goes with {beside.name} beside it, which is not there")
    if sha256_of(beside) != told["sha256"]:
        raise MismatchError(f"{path}: goes with another {beside.name} than the one beside it")
    return open_safetensors(beside)


def _check_norm(path: Path, info: BlockInfo, found: float) -> None:
    """Refuse values that are not those the header speaks of.

    The norm of what is stored differs from |tau| by no more than the error of storage.
    """
    if not math.isfinite(found):
        raise CheckpointError(f"{path}: block {info.name} holds values that are not finite")
    if abs(found - info.norm) > (info.error + 1e-3) * info.norm + 1e-30:
        raise CheckpointError(
            f"{path}: block {info.name} has norm {found:.4g}, but its header says {info.norm:.4g}"
        )


def _check_factors(path: Path, name: str, block: Factors) -> None:
    """Raise CheckpointError for factors whose product is not of the shape of their block."""
    rows, columns = block.shape[0], math.prod(block.shape[1:])
    for part in block.parts:
        matrices = part.up.dim() == part.down.dim() == 2
        if not (
            matrices
            and part.up.shape[1] == part.down.shape[0]
            and part.down.shape[1] == columns
            and part.start + part.up.shape[0] <= rows
        ):
            raise CheckpointError(f"{path}: block {name} is not stored as its header says")


# Fingerprints ---------------------------------------------------------------------------------


def digest(name: str, values: torch.Tensor) -> bytes:
    """The XXH3-128 of a block's name, shape and values in float32.

    It tells models apart, as fast as memory is read; against forgery there is the sha256 of files.
    """
    found = xxhash.xxh3_128(f"{name} {tuple(values.shape)}\n".encode())
    content: Any = values.float().contiguous().flatten().numpy()
    found.update(content)
    return found.digest()


def fingerprint(scope: str, digests: Mapping[str, bytes]) -> str:
    """The sha256 over the digests of blocks, in the order of their names, as 64 hex digits."""
    found = hashlib.sha256(f"{scope}\n".encode())
    for name in sorted(digests):
        found.update(digests[name])
    return found.hexdigest()


def belongs(name: str, scope: str) -> bool:
    """Whether a tensor is of the scope: the image tower, all that is not it, or both."""
    return scope == "all" or name.startswith("visual.") == (scope == "visual")


def in_scope(tensors: LazyTensors, scope: str) -> dict[str, LazyTensor]:
    """The floating-point tensors of a scope."""
    return {
        name: tensor
        for name, tensor in tensors.items()
        if belongs(name, scope) and tensor.dtype.is_floating_point
    }


def base_fingerprint(tensors: LazyTensors, scope: str) -> str:
    """The fingerprint that vectors of this scope have if `tensors` are their base."""
    chosen = in_scope(tensors, scope)
    return fingerprint(scope, {name: digest(name, chosen[name].read()) for name in chosen})
