"""The task-vector file: blocks of a fine-tuned minus a base model, with where they came from.

A safetensors file. A dense block is one tensor under its own name; an 8-bit block adds
`NAME#scale`; the parts of a low-rank block are `NAME#up0`, `NAME#down0`, `NAME#up1`, ...
The metadata key `atlas` holds one JSON object: see headers.Header.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from atlas_cli.checkpoint import open_safetensors
from atlas_cli.core import geometry
from atlas_cli.core.fingerprint import digest, fingerprint
from atlas_cli.core.storage import Block, Dense, Factors, Part, Quantised
from atlas_cli.errors import CheckpointError, MismatchError
from atlas_cli.headers import BlockInfo, Header, read_header
from atlas_cli.tensors import LazyTensor, LazyTensors


@dataclass(frozen=True)
class TaskVector:
    """An opened task-vector file. `read` gives the stored form of one block."""

    header: Header
    read: Callable[[str], Block] = field(repr=False)

    @property
    def names(self) -> list[str]:
        """The names of the blocks, in the order of the file."""
        return [block.name for block in self.header.blocks]


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
        _check_norm(path, infos[name], geometry.norm(block))
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
            Part(start, *(tensors[f"{block.name}#{kind}{n}"].read() for kind in ("up", "down")))
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
