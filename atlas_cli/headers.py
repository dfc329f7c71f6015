"""Task vectors whose header has been checked against itself and against the stored values."""

from __future__ import annotations

import json
import math
from pathlib import Path

from atlas_cli.core import geometry
from atlas_cli.core.storage import Block, Factors
from atlas_cli.errors import CheckpointError
from atlas_cli.vectors import BlockInfo, Header, TaskVector, open_vector, read_header

STORAGES = ("fp32", "fp16", "bf16", "int8", "factors")
_TEXTS = ("name", "activation", "scope", "fingerprint", "atlas")
_OBJECTS = ("base", "finetuned", "architecture")


def open_checked(path: Path) -> TaskVector:
    """A task vector whose header is sound; blocks are checked when they are read."""
    check_header(path, read_header(path))
    vector = open_vector(path)
    infos = {info.name: info for info in vector.header.blocks}

    def read(name: str) -> Block:
        block = vector.read(name)
        check_factors(path, name, block)
        _check_norm(path, infos[name], geometry.norm(block))
        return block

    return TaskVector(vector.header, read)


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
    for field in ("norm", "base_norm", "error"):
        value = getattr(block, field)
        if not _is_number(value) or value < 0:
            raise _damaged(path, f"block {block.name}: {field} is not a number from 0 up")


def check_factors(path: Path, name: str, block: Block) -> None:
    """Raise CheckpointError for factors whose product is not of the shape of their block."""
    if not isinstance(block, Factors):
        return
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


def _is_number(value: object) -> bool:
    return _is_integer(value) or (isinstance(value, float) and math.isfinite(value))


def _is_count(value: object) -> bool:
    return _is_integer(value) and value >= 0  # type: ignore[operator]


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path}: its task-vector header is damaged: {what}")
