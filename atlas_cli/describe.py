"""What is in a task vector: where it came from, its norms and its ranks."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from atlas_cli.checkpoint import read_metadata
from atlas_cli.core import geometry
from atlas_cli.core.places import Place, places
from atlas_cli.core.storage import Block
from atlas_cli.headers import BlockInfo
from atlas_cli.sources import Source
from atlas_cli.vectors import TaskVector
from atlas_cli.workers import in_order

RANKS = (1, 4, 16, 64)
_COPIED = (
    *("name", "base", "finetuned", "architecture", "activation", "scope", "scale"),
    *("linearised", "fingerprint", "atlas", "dropped"),
)


@dataclass(frozen=True)
class BlockFacts:
    """One block. `norm` is |tau| before storage, `relative_norm` |tau| / |theta0|.

    `effective_rank` and `energy`, the share of |tau|^2 that the first r singular values hold,
    are those of the stored values of a matrix; None and empty for other blocks.
    """

    name: str
    layer: str
    kind: str
    shape: tuple[int, ...]
    storage: str
    parameters: int
    norm: float
    relative_norm: float | None
    error: float
    effective_rank: float | None
    energy: dict[int, float]


@dataclass(frozen=True)
class KindFacts:
    """The blocks of one kind together: norms over all of them, means of rank and energy."""

    kind: str
    blocks: int
    parameters: int
    norm: float
    relative_norm: float | None
    worst_error: float
    effective_rank: float | None
    energy: dict[int, float]


@dataclass(frozen=True)
class VectorFacts:
    """One task vector. The relative norm is over the scope, so dropped blocks count too."""

    label: str
    file: str
    name: str
    base: dict[str, Any]
    finetuned: dict[str, Any]
    architecture: dict[str, Any]
    activation: str
    scope: str
    scale: float
    linearised: bool
    fingerprint: str
    atlas: str
    dropped: tuple[str, ...]
    storage: dict[str, int]
    bytes: int
    parameters: int
    norm: float
    relative_norm: float | None
    worst_error: float
    mean_error: float
    kinds: tuple[KindFacts, ...]
    blocks: tuple[BlockFacts, ...]


def is_vector(source: Source) -> bool:
    """Whether a source is a task-vector file rather than a model."""
    return len(source.weights) == 1 and "atlas" in read_metadata(source.weights[0])


def describe_vector(
    label: str, source: Source, vector: TaskVector, advance: Callable[[int], None]
) -> VectorFacts:
    """Measure every block of a task vector, holding a few at a time."""
    header = vector.header
    where = places(vector.names)

    def describe(info: BlockInfo) -> BlockFacts:
        return _describe_block(info, where[info.name], vector.read(info.name))

    blocks = []
    for block in in_order(describe, header.blocks):
        blocks.append(block)
        advance(1)
    return VectorFacts(
        label=label,
        file=source.reference.text,
        **{field: getattr(header, field) for field in _COPIED},
        storage=dict(Counter(info.storage for info in header.blocks)),
        bytes=source.weights[0].stat().st_size,
        parameters=sum(block.parameters for block in blocks),
        norm=header.norm,
        relative_norm=header.relative_norm,
        worst_error=max(info.error for info in header.blocks),
        mean_error=statistics.fmean(info.error for info in header.blocks),
        kinds=_by_kind(header.blocks, blocks),
        blocks=tuple(blocks),
    )


def _describe_block(info: BlockInfo, place: Place, block: Block) -> BlockFacts:
    rank, energy = None, {}
    if geometry.is_matrix(info.shape):
        singular = geometry.singular_values(block)
        rank = geometry.effective_rank(singular)
        energy = {count: geometry.energy(singular, count) for count in RANKS}
    return BlockFacts(
        name=info.name,
        layer=place.layer,
        kind=place.kind,
        shape=info.shape,
        storage=info.storage,
        parameters=math.prod(info.shape),
        norm=info.norm,
        relative_norm=_relative([info]),
        error=info.error,
        effective_rank=rank,
        energy=energy,
    )


def _relative(blocks: Sequence[BlockInfo]) -> float | None:
    """|tau| / |theta0| over some blocks; None where the base is zero."""
    base = math.hypot(*(block.base_norm for block in blocks))
    return math.hypot(*(block.norm for block in blocks)) / base if base else None


def _by_kind(infos: Sequence[BlockInfo], blocks: Sequence[BlockFacts]) -> tuple[KindFacts, ...]:
    kinds = []
    for kind in dict.fromkeys(block.kind for block in blocks):
        pairs = [pair for pair in zip(infos, blocks, strict=True) if pair[1].kind == kind]
        kinds.append(_describe_kind(kind, [i for i, _ in pairs], [b for _, b in pairs]))
    return tuple(kinds)


def _describe_kind(
    kind: str, infos: Sequence[BlockInfo], blocks: Sequence[BlockFacts]
) -> KindFacts:
    ranks = [block.effective_rank for block in blocks if block.effective_rank is not None]
    energies = [block.energy for block in blocks if block.energy]
    return KindFacts(
        kind=kind,
        blocks=len(blocks),
        parameters=sum(block.parameters for block in blocks),
        norm=math.hypot(*(info.norm for info in infos)),
        relative_norm=_relative(infos),
        worst_error=max(info.error for info in infos),
        effective_rank=statistics.fmean(ranks) if ranks else None,
        energy={r: statistics.fmean(e[r] for e in energies) for r in RANKS} if energies else {},
    )
