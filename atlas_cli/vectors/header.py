"""The header of a task-vector file: where the vector came from, and what is known of its blocks."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atlas_cli.errors import CheckpointError, MismatchError
from atlas_cli.io.checkpoint import header_text, read_metadata

STORAGES = ("fp32", "fp16", "bf16", "int8", "factors")
_TEXTS = ("name", "activation", "scope", "fingerprint", "atlas")
_OBJECTS = ("base", "finetuned", "architecture")
FORMAT = "atlas.task_vector"
VERSION = 1


@dataclass(frozen=True)
class BlockInfo:
    """What is known of a block without reading it.

    `storage` is fp32, fp16, bf16, int8 or factors; `starts` are the first rows of the parts of a
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
    were written before it was kept have None.
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


# Room for a header that is written last ---------------------------------------------------------

LONGEST_NUMBER = -1.234567e-100
_LONGEST_OFFSET = 10**12


def room_for(header: Header, parts: int) -> int:
    """The most bytes that a promised header can take, if blocks have up to `parts` parts."""
    longest = dict.fromkeys(("norm", "base_norm", "error"), LONGEST_NUMBER)
    blocks = tuple(
        BlockInfo(block.name, block.shape, "factors", **longest, starts=block.shape[:1] * parts)
        for block in header.blocks
    )
    dropped = (*header.dropped, *(block.name for block in blocks))
    worst = dataclasses.replace(header, blocks=blocks, dropped=dropped)
    kinds = [f"#{kind}{number}" for number in range(parts) for kind in ("up", "down")]
    place = [_LONGEST_OFFSET, _LONGEST_OFFSET]
    entries = {
        block.name + kind: {"dtype": "BF16", "shape": block.shape, "data_offsets": place}
        for block in blocks
        for kind in ("", "#scale", *kinds)
    }
    return len(header_text(entries, to_metadata(worst)))


def shortened(info: BlockInfo) -> BlockInfo:
    """A block with numbers of seven digits."""
    norm, base_norm, error = map(rounded, (info.norm, info.base_norm, info.error))
    return dataclasses.replace(info, norm=norm, base_norm=base_norm, error=error)


def rounded(number: float) -> float:
    """Seven digits: more are noise, and would take more room than was left."""
    return float(f"{number:.6e}")


def natural(name: str) -> list[Any]:
    """A key that sorts layer 10 after layer 9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
