"""Norms, cosines and coefficients arranged in rows and columns, as heat maps show them."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atlas_cli.core.layer_names import places

if TYPE_CHECKING:
    from atlas_cli.recipes.text import Table
    from atlas_cli.vectors.describe import Comparison, VectorFacts

_LONGEST = 24  # letters of a vector's name
_BINS = 50  # columns for coefficients without names
_PART = re.compile(r"\[\d+\]$")


@dataclass(frozen=True)
class Grid:
    """Values in rows and columns, None where a cell is empty.

    `names` are the full names of the columns, where `columns` are short ones.
    """

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[float | None, ...], ...]
    names: tuple[str, ...] = ()


def norm_grids(vectors: Sequence[VectorFacts]) -> list[Grid]:
    """Relative norms in percent by kind and layer, and those of blocks outside the layers.

    Several vectors give the root mean square of their norms; a block that one lacks counts as zero.
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
    columns = tuple(by_depth({layer for _, layer in values}))
    cells = tuple(tuple(values.get((row, column)) for column in columns) for row in rows)
    return Grid(title, rows, columns, cells)


def by_depth(layers: Iterable[str]) -> list[str]:
    """Layers from the first to the last: numbers within their names are compared as numbers."""
    return sorted(layers, key=lambda name: [part.zfill(6) for part in re.split(r"(\d+)", name)])


def cosine_grid(comparison: Comparison) -> Grid:
    """The cosines of different vectors; the diagonal is empty."""
    names = tuple(map(_short, comparison.vectors))
    cells = tuple(
        tuple(None if i == j else cell for j, cell in enumerate(row))
        for i, row in enumerate(comparison.cosine)
    )
    return Grid("cosine", names, names, cells)


def _short(name: str) -> str:
    """A long name without its middle, since related names often begin alike."""
    half = (_LONGEST - 1) // 2
    return name if len(name) <= _LONGEST else f"{name[:half]}…{name[-half:]}"


def coefficient_grids(table: Table) -> list[Grid]:
    """A grid of vectors by layers for every kind of block, and one for all other blocks."""
    short = _short_table(table)
    labels = dict.fromkeys(label for row in short.values() for label in row)
    where = places(labels)
    kinds: dict[str, dict[str, str]] = {}
    outside: dict[str, str] = {}
    for label, place in where.items():
        if place.layer:
            kinds.setdefault(place.kind, {})[place.layer] = label
        else:
            outside[place.kind] = label
    grids = [
        _coefficients(kind, short, {layer: columns[layer] for layer in by_depth(columns)})
        for kind, columns in kinds.items()
    ]
    title = "outside the layers" if kinds else "coefficients"
    return [*grids, *([_coefficients(title, short, outside)] if outside else [])]


def _coefficients(title: str, table: Table, columns: Mapping[str, str]) -> Grid:
    cells = tuple(tuple(row.get(label) for label in columns.values()) for row in table.values())
    return Grid(title, tuple(table), tuple(columns), cells, tuple(columns.values()))


def _short_table(table: Table) -> Table:
    """Replace random parts of a block, or too many neighbours without names, by their means."""
    width = max((len(row) for row in table.values()), default=0)
    return {vector: _means(row, width) for vector, row in table.items()}


def _means(row: Mapping[str, float], width: int) -> dict[str, float]:
    together = math.ceil(width / _BINS)
    found: dict[str, list[float]] = {}
    for label, value in row.items():
        name = _PART.sub("", label)
        if label.isdigit():
            first = int(label) // together * together
            last = min(first + together, width) - 1
            name = label if together == 1 else f"{first} to {last} (mean)"
        elif name != label:
            name = f"{name} (mean of its parts)"
        found.setdefault(name, []).append(value)
    return {name: statistics.fmean(values) for name, values in found.items()}
