"""Several task vectors of one base: the angles between them, and how many directions they span."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from atlas_cli.core import spectra, storage
from atlas_cli.core.layer_names import LayerPosition, places
from atlas_cli.core.spectra import Spectrum
from atlas_cli.core.storage import Block
from atlas_cli.errors import MismatchError
from atlas_cli.io.checkpoint import read_metadata
from atlas_cli.parallel import in_order
from atlas_cli.sources.locate import Source
from atlas_cli.vectors.format import BlockInfo, StoredVector, check_same_base

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
    label: str, source: Source, vector: StoredVector, advance: Callable[[int], None]
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


def _describe_block(info: BlockInfo, place: LayerPosition, block: Block) -> BlockFacts:
    rank, energy = None, {}
    if storage.is_matrix(info.shape):
        singular = spectra.singular_values(block)
        rank = spectra.effective_rank(singular)
        energy = {count: spectra.energy(singular, count) for count in RANKS}
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


Matrix = list[list[float | None]]


@dataclass(frozen=True)
class Comparison:
    """Cosines over all blocks and by kind, None where a vector is zero; and the spectra.

    The spectrum is that of the stacked vectors as they are, and of what is left of them without
    their mean.
    """

    vectors: tuple[str, ...]
    cosine: Matrix
    cosine_by_kind: dict[str, Matrix]
    spectrum: Spectrum
    centred_spectrum: Spectrum


def compare(vectors: Mapping[str, StoredVector], advance: Callable[[int], None]) -> Comparison:
    """Compare vectors by label, holding the blocks of one name at a time.

    Raises MismatchError for vectors of different bases. A block that a vector lacks is zero.
    """
    check_same_base({label: vector.header for label, vector in vectors.items()})
    kind_of = _kinds(vectors)
    kinds: dict[str, torch.Tensor] = {}
    found = in_order(lambda name: _products(name, vectors), kind_of, workers=1)
    for kind, products in zip(kind_of.values(), found, strict=True):
        kinds[kind] = kinds[kind] + products if kind in kinds else products
        advance(1)
    whole = torch.stack(list(kinds.values())).sum(dim=0)
    return Comparison(
        vectors=tuple(vectors),
        cosine=_matrix(whole),
        cosine_by_kind={kind: _matrix(products) for kind, products in kinds.items()},
        spectrum=spectra.spectrum(whole, centred=False),
        centred_spectrum=spectra.spectrum(whole, centred=True),
    )


def _kinds(vectors: Mapping[str, StoredVector]) -> dict[str, str]:
    """The kind of every block that at least one of the vectors has."""
    names = dict.fromkeys(name for vector in vectors.values() for name in vector.names)
    return {name: place.kind for name, place in places(names).items()}


def block_count(vectors: Mapping[str, StoredVector]) -> int:
    """How many names of blocks there are among the vectors."""
    return len(_kinds(vectors))


def _products(name: str, vectors: Mapping[str, StoredVector]) -> torch.Tensor:
    """The Gram matrix of the blocks of one name."""
    there = {label: vector for label, vector in vectors.items() if name in set(vector.names)}
    shapes = {
        label: next(block.shape for block in vector.header.blocks if block.name == name)
        for label, vector in there.items()
    }
    if len(set(shapes.values())) > 1:
        found = ", ".join(f"{shape} in {label}" for label, shape in shapes.items())
        raise MismatchError(f"{name} has different shapes: {found}")
    return storage.gram(
        [vector.read(name) if label in there else None for label, vector in vectors.items()]
    )


def _matrix(products: torch.Tensor) -> Matrix:
    rows: list[list[float]] = spectra.cosines(products).tolist()
    return [[None if math.isnan(value) else value for value in row] for row in rows]
