"""The task vectors of a run: chosen by their names, and opened together to be composed.

What is a task vector on this machine is taken as it is; `vectors.gather` fetches and extracts
everything else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from atlas_cli.core.compose import Composition, Layout, map_blocks, stack_blocks
from atlas_cli.core.packed import Packed, Residual, packed_bytes
from atlas_cli.core.stacks import Stack
from atlas_cli.core.storage import (
    BITS,
    Block,
    BlockPart,
    Dense,
    Factors,
    Form,
    Quantised,
    encode,
    storage_of,
)
from atlas_cli.errors import MismatchError, UsageError, nearest
from atlas_cli.io.checkpoint import read_metadata
from atlas_cli.io.files import sha256_of
from atlas_cli.io.tensors import LazyTensors
from atlas_cli.sources.locate import VectorName, vector_file
from atlas_cli.vectors.format import (
    StoredVector,
    base_fingerprint,
    check_same_base,
    open_checked,
    read_header,
)

_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}
_LOWER = ("bf16", "int8")
Tell = Callable[[str], None]


# Choosing -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gathering:
    """How vectors are gathered. `is_own` says which belong to the target's own data by name."""

    scope: str = "visual"
    storage: str = "int8"
    exclude: tuple[str, ...] = ()
    keep_downloads: bool = False
    architecture: str | None = None
    is_own: Callable[[str], bool] = lambda name: False
    tell: Tell = lambda text: None
    warn: Tell = lambda text: None


@dataclass(frozen=True)
class GatheredVector:
    """A task vector in a local file.

    `text` names it in recipes, with its commit if it has one. `sha256` is that of the file that
    the text names: of the vector, or of the weights it was extracted from, and then `storage` is
    how it is kept.
    """

    text: str
    name: str | None
    file: Path
    sha256: str
    storage: str | None = None
    commit: str | None = None
    group: str | None = field(default=None, compare=False)


def stored_vectors(names: Sequence[VectorName], how: Gathering) -> list[GatheredVector] | None:
    """The vectors that are wanted, if all that are named are task vectors in files; else None."""
    called = []
    for name in names:
        if not is_stored(name):
            return None
        called.append(called_by_header(name))
    return [stored_vector(name) for name in wanted(called, how)]


def is_stored(name: VectorName) -> bool:
    """Whether a name stands for a task vector in a file, rather than for a model or an adapter."""
    path = Path(name.reference.name)
    return name.reference.kind == "path" and path.is_file() and is_vector(path)


def is_vector(path: Path) -> bool:
    """Whether a file of weights is a task vector."""
    return path.suffix == ".safetensors" and "atlas" in read_metadata(path)


def called_by_header(name: VectorName) -> VectorName:
    """A vector in a file under the name that the file gives it."""
    return replace(name, name=read_header(Path(name.reference.name)).name)


def stored_vector(name: VectorName) -> GatheredVector:
    """A vector that is in a file already."""
    path = Path(name.reference.name)
    return GatheredVector(name.text, None, path, sha256_of(path), group=name.group)


def wanted(names: Sequence[VectorName], how: Gathering) -> list[VectorName]:
    """The vectors without those that are excluded and, of groups, those of the target itself."""
    known = [name.name for name in names]
    for word in how.exclude:
        if word not in known:
            raise UsageError(f"--exclude {word}: no such vector{nearest(word, known)}")
    kept = []
    for name in names:
        if name.name in how.exclude:
            how.tell(f"{name.name}: left out (--exclude)")
        elif name.group and how.is_own(name.name):
            how.warn(f"{name.name}: left out, since it was learned on the target itself")
        else:
            kept.append(name)
    if names and not kept:
        raise UsageError("every task vector was left out")
    return kept


# Other names of well-known tasks, so that no vector of the target's own data is taken by mistake.
_ALIASES = {
    "cars": "stanfordcars",
    **dict.fromkeys(("pets", "oxfordpets"), "oxfordiiitpet"),
    **dict.fromkeys(("flowers", "flowers102", "oxfordflowers"), "oxfordflowers102"),
    "patchcamelyon": "pcam",
    "sst2": "renderedsst2",
    "emnist": "emnistletters",
    "fmnist": "fashionmnist",
}


def same_task(first: str, second: str) -> bool:
    """Whether two names, in small letters and digits, are of one task."""
    return _ALIASES.get(first, first) == _ALIASES.get(second, second)


# Opening --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Member:
    """A vector of a pool, and where it comes from.

    `path` names it in recipes, `file` is where it is; `storage` is told for one that was extracted
    from what `path` names.
    """

    name: str
    path: str
    sha256: str
    vector: StoredVector = field(repr=False)
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
    vector = replace(vector, header=replace(vector.header, name=called))
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
    shared = sum(path.stat().st_size for path in _shared_files(members))
    for kind in ("as stored", *_LOWER):
        size = shared + sum(_bytes(member, names, kind) for member in members)
        if budget is None or size <= budget:
            return kind, size
    return "mapped", 0


def _shared_files(members: Sequence[Member]) -> set[Path]:
    """What some vectors have in common, in files beside theirs."""
    return {
        (member.file or vector_file(member.path)).parent / member.vector.header.shared["file"]
        for member in members
        if member.vector.header.shared
    }


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
    return kind if kind in _LOWER and _BYTES.get(storage, 0) > _BYTES[kind] else storage


def _size(shape: tuple[int, ...], storage: str) -> int:
    """The bytes of a dense block; 8-bit integers have a scale per row, fewer bits one per group."""
    if storage in BITS:
        return packed_bytes(shape, BITS[storage])
    rows = shape[0] if len(shape) > 1 else 1
    return math.prod(shape) * _BYTES[storage] + (4 * rows if storage == "int8" else 0)


def compose_pool(
    pool: Pool,
    base: Mapping[str, torch.Tensor],
    layout: Layout,
    device: torch.device,
    rows: Collection[int] | None = None,
) -> Composition:
    """The composition of the base and the vectors of a pool, or of those in `rows` alone.

    They are read block by block.
    """
    stacks: dict[str, tuple[Stack, ...]] = {}
    for name in pool.names:
        blocks: dict[int, Block] = {}
        for number, member in enumerate(pool.members):
            if name in member.vector.names and (rows is None or number in rows):
                block = _kept(member.vector.read(name), pool.storage)
                blocks[number] = block if pool.storage == "mapped" else moved(block, device)
        stacks[name] = (map_blocks if pool.storage == "mapped" else stack_blocks)(blocks)
    kept = {name: base[name].detach() for name in pool.names}
    return Composition(kept, stacks, layout, len(pool.members))


def _kept(block: Block, storage: str) -> Block:
    """A dense block in fewer bits, if that is how the pool is kept."""
    if not isinstance(block, Dense):
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
        case Packed():
            return block.to(device)
        case Residual(shared, own, key):
            return Residual(shared.to(device), own.to(device), key)
