"""What a picture of task vectors shows: numbers in rows and columns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from atlas_cli.compare import Comparison
from atlas_cli.describe import VectorFacts

_LONGEST = 24  # letters of a vector's name


@dataclass(frozen=True)
class Grid:
    """Values in rows and columns, None where there is none."""

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[float | None, ...], ...]


def norm_grids(vectors: Sequence[VectorFacts]) -> list[Grid]:
    """Relative norms in percent by kind and layer, and those of blocks outside the layers.

    Of several vectors, the root of the mean of the squares; a block that one lacks is zero there.
    """
    norms: dict[tuple[str, str], list[float]] = {}
    for block in (block for vector in vectors for block in vector.blocks):
        if block.relative_norm:
            norms.setdefault((block.kind, block.layer), []).append(block.relative_norm)
    means = {
        place: 100 * math.sqrt(math.fsum(value**2 for value in values) / len(vectors))
        for place, values in norms.items()
    }
    inside = {place: value for place, value in means.items() if place[1]}
    outside = {(kind, ""): value for (kind, layer), value in means.items() if not layer}
    mean = f" (root mean square of {len(vectors)})" if len(vectors) > 1 else ""
    parts = {f"norm of tau in % of theta0{mean}": inside, "outside the layers": outside}
    return [_grid(title, part) for title, part in parts.items() if part]


def _grid(title: str, values: Mapping[tuple[str, str], float]) -> Grid:
    rows = tuple(dict.fromkeys(kind for kind, _ in values))
    layers = dict.fromkeys(layer for _, layer in values)
    columns = tuple(sorted(layers, key=lambda name: (not name.isdigit(), name.zfill(6))))
    cells = tuple(tuple(values.get((row, column)) for column in columns) for row in rows)
    return Grid(title, rows, columns, cells)


def cosine_grid(comparison: Comparison) -> Grid:
    """The cosines of different vectors; nothing on the diagonal."""
    names = tuple(map(_short, comparison.vectors))
    cells = tuple(
        tuple(None if i == j else cell for j, cell in enumerate(row))
        for i, row in enumerate(comparison.cosine)
    )
    return Grid("cosine", names, names, cells)


def _short(name: str) -> str:
    """A long name without its middle: names of one set often begin alike."""
    half = (_LONGEST - 1) // 2
    return name if len(name) <= _LONGEST else f"{name[:half]}…{name[-half:]}"
