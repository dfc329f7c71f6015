"""The task-vector file: blocks of a fine-tuned minus a base model, with where they came from.

A safetensors file. A dense block is one tensor under its own name; an 8-bit block adds
`NAME#scale`; the parts of a low-rank block are `NAME#up0`, `NAME#down0`, `NAME#up1`, ...
The metadata key `atlas` holds one JSON object: see header.Header.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash

from atlas_cli import __version__
from atlas_cli.core import storage
from atlas_cli.core.storage import Block, BlockPart, Dense, Factors, Form, Quantised
from atlas_cli.errors import AtlasError, CheckpointError, MismatchError, UsageError
from atlas_cli.io.checkpoint import TensorStream, open_safetensors
from atlas_cli.io.files import whole_file
from atlas_cli.io.tensors import LazyTensor, LazyTensors
from atlas_cli.sources.references import vector_file
from atlas_cli.vectors.header import (
    LONGEST_NUMBER,
    BlockInfo,
    Header,
    check_same_base,
    natural,
    read_header,
    room_for,
    shortened,
    to_metadata,
)
from atlas_cli.vectors.targets import VectorTarget, check_dtype, check_targets


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


@dataclass(frozen=True, repr=False)
class TaskVector:
    """A task vector: its header, and a function that reads one block in its stored form.

    Vectors of the same base are added and scaled: `a - b`, `0.3 * a`, `-a`, `(a + b) / 2`. Nothing
    is read until a block of the result is; its header then has no norms, which are nan.
    """

    header: Header
    read: Callable[[str], Block]

    @classmethod
    def open(cls, reference: str | Path) -> TaskVector:
        """The vector in a file, or of a built-in task such as builtin:digits."""
        return open_checked(vector_file(str(reference)))

    @property
    def name(self) -> str:
        """What the vector is called in coefficients."""
        return self.header.name

    @property
    def names(self) -> list[str]:
        """The names of the blocks, in the order of the file."""
        return [block.name for block in self.header.blocks]

    @property
    def norm(self) -> float:
        """|tau|; for a sum, of values that are read for it."""
        if math.isfinite(self.header.norm):
            return self.header.norm
        return math.hypot(*(storage.norm(self.values(name)) for name in self.names))

    def values(self, name: str) -> torch.Tensor:
        """The values of a block in float32."""
        return storage.decode(self.read(name))

    def __repr__(self) -> str:
        base, blocks = self.header.base.get("reference"), len(self.header.blocks)
        return f"<TaskVector {self.name}: {blocks} blocks of {base}, {self.header.scope}>"

    def __add__(self, other: object) -> TaskVector:
        return _sum(self, other) if isinstance(other, TaskVector) else NotImplemented

    def __sub__(self, other: object) -> TaskVector:
        return _sum(self, -other) if isinstance(other, TaskVector) else NotImplemented

    def __mul__(self, scale: object) -> TaskVector:
        return _scaled(self, float(scale)) if isinstance(scale, Real) else NotImplemented

    def __truediv__(self, divisor: object) -> TaskVector:
        return _scaled(self, 1 / float(divisor)) if isinstance(divisor, Real) else NotImplemented

    def __neg__(self) -> TaskVector:
        return _scaled(self, -1.0)

    __rmul__ = __mul__

    def save(
        self, path: str | Path, *, name: str | None = None, dtype: str = "fp32", force: bool = False
    ) -> TaskVector:
        """Write the vector to a file, block by block, and open it. Blocks of zeros are left out."""
        path = Path(path)
        check_dtype(dtype)
        check_targets([VectorTarget(name or path.stem, path)], force=force)
        try:
            with whole_file(path) as temporary, temporary.open("r+b") as file:
                _write(self, file, name or path.stem, Form(dtype))
        except OSError as problem:
            raise AtlasError(f"{path}: cannot be written: {problem.strerror}") from problem
        return open_checked(path)


# Arithmetic -----------------------------------------------------------------------------------


def _scaled(vector: TaskVector, scale: float) -> TaskVector:
    """scale * vector, block by block."""
    if not math.isfinite(scale):
        raise UsageError(f"{scale} * {vector.name}: expected a finite number")
    header, size = vector.header, abs(scale)
    blocks = (
        replace(
            info,
            norm=size * info.norm,
            storage="factors" if info.storage == "factors" else "fp32",
        )
        for info in header.blocks
    )
    terms = [{**term, "scale": scale * term["scale"]} for term in _terms(vector)]
    made = replace(_of_terms(header, terms), blocks=tuple(blocks), scale=scale * header.scale)
    return TaskVector(made, lambda name: storage.scaled(vector.read(name), scale))


def _sum(left: TaskVector, right: TaskVector) -> TaskVector:
    """left + right in float32; a block that one of them lacks is zero there.

    Raises MismatchError unless both were taken from the same base.
    """
    other = right.name if right.name != left.name else f"the other {right.name}"
    check_same_base({left.name: left.header, other: right.header})
    infos = {info.name: info for info in right.header.blocks}
    for info in left.header.blocks:
        shape = infos.get(info.name, info).shape
        if shape != info.shape:
            raise MismatchError(f"{info.name}: shape {info.shape} against {shape}")
    infos |= {info.name: info for info in left.header.blocks}
    first, both = set(left.names), set(left.names) & set(right.names)

    def read(name: str) -> Block:
        if name in both:
            return Dense(left.values(name) + right.values(name))
        return (left if name in first else right).read(name)

    blocks = (
        replace(
            infos[name],
            norm=math.nan,
            error=0.0,
            storage="fp32" if name in both or not infos[name].starts else "factors",
            starts=() if name in both else infos[name].starts,
        )
        for name in sorted(infos, key=natural)
    )
    made = replace(
        _of_terms(left.header, [*_terms(left), *_terms(right)]),
        blocks=tuple(blocks),
        scale=1.0,
        dropped=tuple(name for name in left.header.dropped if name not in infos),
        linearised=left.header.linearised or right.header.linearised,
    )
    return TaskVector(made, read)


def _terms(vector: TaskVector) -> list[dict[str, Any]]:
    """What a vector is the sum of: itself, unless it was computed."""
    header = vector.header
    alone = {"scale": 1.0, "name": header.name, "finetuned": header.finetuned}
    terms: list[dict[str, Any]] = header.finetuned.get("sum_of", [alone])
    return terms


def _of_terms(header: Header, terms: list[dict[str, Any]]) -> Header:
    """The header of a sum: called by its terms, which are also its provenance."""
    signed = [f"{'-+'[term['scale'] >= 0]} {_in_words(term)}" for term in terms]
    text = " ".join(signed).removeprefix("+ ")
    finetuned: dict[str, Any] = {"reference": text, "commit": None, "sha256": {}, "sum_of": terms}
    return replace(header, name=text, finetuned=finetuned)


def _in_words(term: Mapping[str, Any]) -> str:
    size = abs(term["scale"])
    return str(term["name"]) if size == 1 else f"{size:g} * {term['name']}"


def _write(vector: TaskVector, file: BinaryIO, name: str, form: Form) -> None:
    """Write a vector to an open file, with one block in memory at a time."""
    header = replace(vector.header, name=name, atlas=__version__, base_norm=LONGEST_NUMBER)
    parts = max(len(info.starts) for info in header.blocks)
    stream = TensorStream(file, room_for(header, parts))
    kept: list[BlockInfo] = []
    # Blocks that would upset the alignment of others come last.
    for info in sorted(header.blocks, key=lambda info: math.prod(info.shape) % 8 != 0):
        exact = vector.read(info.name)
        values = storage.decode(exact)
        norm = storage.norm(values)
        if not math.isfinite(norm):
            raise CheckpointError(f"{info.name}: holds values that are not finite numbers")
        if not norm:
            continue
        whole = form.dtype == "int8" and isinstance(exact, Factors)  # factors have no 8-bit form
        block = storage.encode(Dense(values) if whole else exact, form)
        for key, tensor in stored_tensors(info.name, block).items():
            stream.add(key, tensor)
        starts = tuple(part.start for part in block.parts) if isinstance(block, Factors) else ()
        error = storage.relative_error(values, block)
        word = storage.storage_of(block)
        kept.append(replace(info, storage=word, norm=norm, error=error, starts=starts))
    if not kept:
        raise MismatchError(f"{vector.name}: is zero; there is nothing to save")
    blocks = tuple(shortened(info) for info in sorted(kept, key=lambda info: natural(info.name)))
    zero = set(vector.names) - {info.name for info in blocks}
    dropped = tuple(sorted({*header.dropped, *zero}, key=natural))
    base_norm = vector.header.base_norm
    stream.finish(to_metadata(replace(header, blocks=blocks, dropped=dropped, base_norm=base_norm)))


# Files ----------------------------------------------------------------------------------------


def stored_tensors(name: str, block: Block) -> dict[str, torch.Tensor]:
    """The tensors of a block under the names they have in the file."""
    match block:
        case Dense(values):
            return {name: values}
        case Quantised(values, scales):
            return {name: values, f"{name}#scale": scales}
        case Factors(_, parts):
            return {
                f"{name}#{kind}{number}": tensor
                for number, part in enumerate(parts)
                for kind, tensor in (("up", part.up), ("down", part.down))
            }


def open_vector(path: Path) -> TaskVector:
    """Open a task-vector file; blocks stay on disk until they are read."""
    header = read_header(path)
    tensors = open_safetensors(path)
    blocks = {block.name: block for block in header.blocks}
    for block in header.blocks:
        _check_block(path, tensors, block)
    return TaskVector(header, lambda name: _read_block(path, tensors, blocks[name]))


def open_checked(path: Path) -> TaskVector:
    """As open_vector, with every block that is read held against what the header says of it."""
    vector = open_vector(path)
    infos = {info.name: info for info in vector.header.blocks}

    def read(name: str) -> Block:
        block = vector.read(name)
        _check_norm(path, infos[name], storage.block_norm(block))
        return block

    return TaskVector(vector.header, read)


def _check_block(path: Path, tensors: LazyTensors, block: BlockInfo) -> None:
    """Refuse a header that promises a block the file does not hold."""
    wanted: dict[str, tuple[int, ...] | None] = {block.name: block.shape}
    if block.storage == "factors":
        parts = range(len(block.starts))
        wanted = {f"{block.name}#{kind}{n}": None for n in parts for kind in ("up", "down")}
    if block.storage == "int8":
        wanted[f"{block.name}#scale"] = (block.shape[0] if len(block.shape) > 1 else 1,)
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
    values = tensors[block.name].read()
    if block.storage == "int8":
        return Quantised(values, tensors[f"{block.name}#scale"].read())
    return Dense(values)


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
