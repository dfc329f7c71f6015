"""The task-vector file: blocks of a fine-tuned minus a base model, with where they came from.

A safetensors file. A dense block is one tensor under its own name; an 8-bit block adds
`NAME#scale`; the parts of a low-rank block are `NAME#up0`, `NAME#down0`, `NAME#up1`, ...
The metadata key `atlas` holds one JSON object: see `Header`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from atlas_cli.checkpoint import open_safetensors, read_metadata
from atlas_cli.core.fingerprint import digest, fingerprint
from atlas_cli.core.storage import Block, Dense, Factors, Part, Quantised
from atlas_cli.errors import CheckpointError, MismatchError
from atlas_cli.tensors import LazyTensor, LazyTensors

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
    """The provenance of a task vector, and the list of its blocks."""

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
    format: str = FORMAT
    version: int = VERSION


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


def to_metadata(header: Header) -> dict[str, str]:
    """A header as safetensors metadata."""
    text = json.dumps(dataclasses.asdict(header), sort_keys=True, ensure_ascii=False)
    return {"format": "pt", "atlas": text}


def open_vector(path: Path) -> TaskVector:
    """Open a task-vector file; blocks stay on disk until they are read."""
    header = read_header(path)
    tensors = open_safetensors(path)
    blocks = {block.name: block for block in header.blocks}
    for block in header.blocks:
        _check_block(path, tensors, block)
    return TaskVector(header, lambda name: _read_block(tensors, blocks[name]))


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
        return Header(**found)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        raise CheckpointError(
            f"{path}: its task-vector header is damaged: {problem!r}"
        ) from problem


def _block_info(found: dict[str, Any]) -> BlockInfo:
    found = {**found, "shape": tuple(found["shape"]), "starts": tuple(found["starts"])}
    return BlockInfo(**found)


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


def _read_block(tensors: LazyTensors, block: BlockInfo) -> Block:
    if block.storage == "factors":
        parts = tuple(
            Part(start, *(tensors[f"{block.name}#{kind}{n}"].read() for kind in ("up", "down")))
            for n, start in enumerate(block.starts)
        )
        return Factors(block.shape, parts)
    values = tensors[block.name].read()
    if block.storage == "int8":
        return Quantised(values, tensors[f"{block.name}#scale"].read())
    return Dense(values)


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
