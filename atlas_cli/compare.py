"""Several task vectors of one base: the angles between them, and how many directions they span."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from atlas_cli.core import geometry
from atlas_cli.core.geometry import Spectrum
from atlas_cli.core.places import places
from atlas_cli.errors import MismatchError
from atlas_cli.vectors import TaskVector, check_same_base
from atlas_cli.workers import in_order

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


def compare(vectors: Mapping[str, TaskVector], advance: Callable[[int], None]) -> Comparison:
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
        spectrum=geometry.spectrum(whole, centred=False),
        centred_spectrum=geometry.spectrum(whole, centred=True),
    )


def _kinds(vectors: Mapping[str, TaskVector]) -> dict[str, str]:
    """The kind of every block that at least one of the vectors has."""
    names = dict.fromkeys(name for vector in vectors.values() for name in vector.names)
    return {name: place.kind for name, place in places(names).items()}


def block_count(vectors: Mapping[str, TaskVector]) -> int:
    """How many names of blocks there are among the vectors."""
    return len(_kinds(vectors))


def _products(name: str, vectors: Mapping[str, TaskVector]) -> torch.Tensor:
    """The Gram matrix of the blocks of one name."""
    there = {label: vector for label, vector in vectors.items() if name in set(vector.names)}
    shapes = {
        label: next(block.shape for block in vector.header.blocks if block.name == name)
        for label, vector in there.items()
    }
    if len(set(shapes.values())) > 1:
        found = ", ".join(f"{shape} in {label}" for label, shape in shapes.items())
        raise MismatchError(f"{name} has different shapes: {found}")
    return geometry.gram(
        [vector.read(name) if label in there else None for label, vector in vectors.items()]
    )


def _matrix(products: torch.Tensor) -> Matrix:
    rows: list[list[float]] = geometry.cosines(products).tolist()
    return [[None if math.isnan(value) else value for value in row] for row in rows]
