"""Task vectors of one base, opened together: to be composed, or to be trimmed as TIES does."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from atlas_cli.core import storage
from atlas_cli.core.compose import Composition, map_blocks, stack_blocks
from atlas_cli.core.granularity import Layout
from atlas_cli.core.stacks import Stack
from atlas_cli.core.storage import (
    Block,
    BlockPart,
    Dense,
    Factors,
    Form,
    Quantised,
    encode,
    storage_of,
)
from atlas_cli.errors import MismatchError, UsageError
from atlas_cli.io.checkpoint import write_tensors
from atlas_cli.io.files import sha256_of
from atlas_cli.io.tensors import LazyTensors
from atlas_cli.merge_methods.election import Rules, elected_signs, silence_
from atlas_cli.sources.locate import vector_file
from atlas_cli.vectors.format import (
    BlockInfo,
    StoredVector,
    base_fingerprint,
    check_same_base,
    open_checked,
    to_metadata,
)
from atlas_cli.vectors.gather import GatheredVector

_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}
_LOWER = ("bf16", "int8")


@dataclass(frozen=True)
class Member:
    """A vector of a pool, and where it comes from.

    `path` names it in recipes, `file` is where it is; `storage` is told for one that was extracted
    from what `path` names.
    """

    name: str
    path: str
    sha256: str
    vector: StoredVector = dataclasses.field(repr=False)
    file: Path | None = None
    storage: str | None = None


@dataclass(frozen=True)
class Pool:
    """Vectors of one base. `storage` is how they are kept: as stored, bf16, int8 or mapped."""

    members: tuple[Member, ...]
    names: tuple[str, ...]
    left: tuple[str, ...]
    storage: str
    bytes: int

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the blocks that any of the vectors has, in the order of `names`."""
        found = {b.name: b.shape for m in self.members for b in m.vector.header.blocks}
        return {name: found[name] for name in self.names}


def open_pool(
    paths: Sequence[str | GatheredVector],
    base: LazyTensors,
    parameters: Sequence[str],
    *,
    budget: int | None = None,
    scope: str = "visual",
) -> Pool:
    """Open vectors of a scope and refuse what cannot be added to this base.

    `parameters` are the tensors that can be composed; the vectors' other blocks, such as the
    statistics of batch normalisation, are left to the base.
    """
    members = [open_member(path) for path in paths]
    names, left = check_members(members, base, parameters, scope)
    storage, size = _choose_storage(members, set(names), budget)
    return Pool(tuple(members), names, left, storage, size)


def check_members(
    members: Sequence[Member], base: LazyTensors, parameters: Sequence[str], scope: str = "visual"
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The blocks to compose, and those left to the base, of vectors that fit it.

    Raises UsageError or MismatchError for vectors that cannot be added to this base.
    """
    _check_names(members)
    headers = {member.path: member.vector.header for member in members}
    for member in members:
        if member.vector.header.scope != scope:
            raise MismatchError(
                f"{member.path}: has scope {member.vector.header.scope}, but these coefficients "
                f"are for scope {scope}; extract it with --scope {scope}"
            )
    check_same_base(headers)
    _check_base(members[0], base, scope)
    for member in members:
        _check_shapes(member, base)
    blocks = {name for member in members for name in member.vector.names}
    names = tuple(name for name in parameters if name in blocks)
    return names, tuple(sorted(blocks - set(names)))


def open_member(path: str | GatheredVector) -> Member:
    if isinstance(path, str):
        file = vector_file(path)
        vector = open_checked(file)
        return Member(vector.header.name, path, sha256_of(file), vector, file)
    vector = open_checked(path.file)
    called = path.name or vector.header.name
    vector = dataclasses.replace(vector, header=dataclasses.replace(vector.header, name=called))
    return Member(called, path.text, path.sha256, vector, path.file, path.storage)


def _check_names(members: Sequence[Member]) -> None:
    seen: dict[str, str] = {}
    for member in members:
        if member.name in seen:
            raise UsageError(
                f"{member.path} and {seen[member.name]} are both called {member.name}; "
                "give one another name with: atlas extract --name"
            )
        seen[member.name] = member.path


def _check_base(member: Member, base: LazyTensors, scope: str) -> None:
    found, header = base_fingerprint(base, scope), member.vector.header
    if found != header.fingerprint:
        raise MismatchError(
            f"{member.path}: was taken from another base ({header.base.get('reference')}, "
            f"fingerprint {header.fingerprint[:12]}) than the model (fingerprint {found[:12]})"
        )


def _check_shapes(member: Member, base: LazyTensors) -> None:
    for block in member.vector.header.blocks:
        found = base[block.name].shape if block.name in base else None
        if found != block.shape:
            raise MismatchError(
                f"{member.path}: block {block.name} has shape {block.shape}, but the model has "
                + (f"{found}" if found is not None else "no such tensor")
            )


# Memory ---------------------------------------------------------------------------------------


def _choose_storage(
    members: Sequence[Member], names: set[str], budget: int | None
) -> tuple[str, int]:
    """The best way to keep the vectors within the budget, and the bytes it takes."""
    for kind in ("as stored", *_LOWER):
        size = sum(_bytes(member, names, kind) for member in members)
        if budget is None or size <= budget:
            return kind, size
    return "mapped", 0


def _bytes(member: Member, names: set[str], kind: str) -> int:
    """What a vector takes in memory if its dense blocks are kept in that way."""
    blocks = member.vector.header.blocks
    plain = [block for block in blocks if block.storage != "factors"]
    factors = 0
    if len(plain) < len(blocks):  # the header does not tell their rank, but the file is no larger
        stored = sum(_size(block.shape, block.storage) for block in plain)
        file = member.file or vector_file(member.path)
        factors = max(0, file.stat().st_size - stored)
    kept = (block for block in plain if block.name in names)
    return factors + sum(_size(block.shape, _lower(block.storage, kind)) for block in kept)


def _lower(storage: str, kind: str) -> str:
    """How a dense block is kept in a pool: in fewer bits than it has, or as it is."""
    return kind if kind in _LOWER and _BYTES[storage] > _BYTES[kind] else storage


def _size(shape: tuple[int, ...], storage: str) -> int:
    """The bytes of a dense block; 8-bit integers have a scale per row."""
    rows = shape[0] if len(shape) > 1 else 1
    return math.prod(shape) * _BYTES[storage] + (4 * rows if storage == "int8" else 0)


def compose_pool(
    pool: Pool, base: Mapping[str, torch.Tensor], layout: Layout, device: torch.device
) -> Composition:
    """The composition of the base and the vectors of a pool, read block by block."""
    stacks: dict[str, tuple[Stack, ...]] = {}
    for name in pool.names:
        blocks: dict[int, Block] = {}
        for number, member in enumerate(pool.members):
            if name in member.vector.names:
                block = _kept(member.vector.read(name), pool.storage)
                blocks[number] = block if pool.storage == "mapped" else moved(block, device)
        stacks[name] = (map_blocks if pool.storage == "mapped" else stack_blocks)(blocks)
    kept = {name: base[name].detach() for name in pool.names}
    return Composition(kept, stacks, layout, len(pool.members))


def _kept(block: Block, storage: str) -> Block:
    """A dense block in fewer bits, if that is how the pool is kept."""
    if isinstance(block, Factors | Quantised):
        return block
    lower = _lower(storage_of(block), storage)
    return block if lower == storage_of(block) else encode(block, Form(lower))


def moved(block: Block, device: torch.device) -> Block:
    """The same block on a device."""
    match block:
        case Dense(values):
            return Dense(values.to(device))
        case Quantised(values, scales):
            return Quantised(values.to(device), scales.to(device))
        case Factors(shape, parts):
            there = (BlockPart(p.start, p.up.to(device), p.down.to(device)) for p in parts)
            return Factors(shape, tuple(there))


def trim(paths: Sequence[str | GatheredVector], share: float, folder: Path) -> list[str]:
    """Write every vector with its largest values only, and of those the ones of the elected sign.

    `share` of the values of each vector, the largest by magnitude over all its blocks, are kept;
    then an element keeps its value only where it has the sign of the sum over the vectors. The
    files have the names of the vectors; those that are there are replaced.
    """
    members = [open_member(path) for path in paths]
    vectors = [member.vector for member in members]
    check_same_base({member.path: member.vector.header for member in members})
    names = [vector.header.name for vector in vectors]
    if len(set(names)) < len(names):
        raise UsageError(f"vectors of one name cannot be trimmed together: {', '.join(names)}")
    floors = [_floor(vector, share) for vector in vectors]
    kept: list[dict[str, torch.Tensor]] = [{} for _ in vectors]
    for name in dict.fromkeys(name for vector in vectors for name in vector.names):
        present = [n for n, vector in enumerate(vectors) if name in vector.names]
        blocks = [_largest(_values(vectors[n], name), floors[n]) for n in present]
        signs = elected_signs(blocks, Rules())
        for number, block in zip(present, blocks, strict=True):
            silence_(block, signs)
            if block.any():
                kept[number][name] = block
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for vector, tensors in zip(vectors, kept, strict=True):
        path = folder / f"{vector.header.name}.safetensors"
        blocks_kept = tuple(
            _info(info, tensors[info.name]) for info in vector.header.blocks if info.name in tensors
        )
        header = dataclasses.replace(vector.header, blocks=blocks_kept)
        write_tensors(path, tensors, to_metadata(header))
        found.append(str(path))
    return found


def _values(vector: StoredVector, name: str) -> torch.Tensor:
    return storage.decode(vector.read(name)).float().clone()


def _floor(vector: StoredVector, share: float) -> float:
    """The magnitude from which on values are among the largest `share` of a vector."""
    magnitudes = torch.cat([_values(vector, name).abs().flatten() for name in vector.names])
    count = max(1, round(share * len(magnitudes)))
    return magnitudes.kthvalue(len(magnitudes) - count + 1).values.item()


def _largest(values: torch.Tensor, floor: float) -> torch.Tensor:
    return values.masked_fill_(values.abs() < floor, 0.0)


def _info(info: BlockInfo, values: torch.Tensor) -> BlockInfo:
    norm = storage.norm(values)
    return dataclasses.replace(info, storage="fp32", norm=norm, error=0.0, starts=())
