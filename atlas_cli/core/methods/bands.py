"""Sparsifying by magnitude: the largest elements, or those between the small and the outliers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from atlas_cli.core.methods.bits import at_least, below, bits_of, magnitudes
from atlas_cli.core.methods.method import Tile, Tiles, Values
from atlas_cli.core.methods.selection import Cut, find_cuts
from atlas_cli.core.methods.sparsify import EVERYTHING, NOTHING, Sparsifier, delta_of
from atlas_cli.core.methods.tiling import all_pieces

Ranks = tuple[int, int]


@dataclass(frozen=True)
class Band:
    """Keep what lies between two cuts; `high` None has no end."""

    low: Cut
    high: Cut | None


def top_ranks(size: int, density: float, rounding: str = "floor") -> Ranks:
    """[n - k, n) with k = density * n rounded: `floor` (at least 1), `ceil`, or `above` (+ 1)."""
    exact = density * size
    count = {"ceil": math.ceil(exact), "above": int(exact) + 1}.get(rounding, int(exact))
    return size - min(max(1, count), size), size


def middle_ranks(size: int, density: float, gamma: float) -> Ranks:
    """[b, b + k) with k = floor(density n), b = max(0, n - k - floor(gamma n))."""
    count = int(density * size)
    first = max(0, size - count - int(gamma * size))
    return first, first + count


def _top(size: int, own: Mapping[str, Any], values: Values) -> Ranks:
    return top_ranks(size, own["density"], values.merge.get("rounding", "floor"))


def _middle(size: int, own: Mapping[str, Any], values: Values) -> Ranks:
    return middle_ranks(size, own["density"], own["gamma"])


def survey_bands(
    tiles: Tiles, values: Values, ranks_of: Callable[[int, Mapping[str, Any], Values], Ranks]
) -> list[Any]:
    """The band of every model, from the k-th largest magnitudes of the whole tensor."""
    size = math.prod(next(tiles()).shape)
    found: list[Any] = []
    ranks: list[list[int]] = []
    for own in values.models:
        first, last = ranks_of(size, own, values) if 0 < own["density"] < 1 else (0, 0)
        found.append(EVERYTHING if own["density"] >= 1 else NOTHING)
        ranks.append([rank for rank in (first, last) if rank < size] if first < last else [])

    def passes() -> Iterator[tuple[int, Callable[[int], torch.Tensor]]]:
        for piece in all_pieces(tiles):
            yield piece.start, lambda model, piece=piece: delta_of(piece, model)  # type: ignore[misc]

    cuts = find_cuts(passes, ranks)
    return [
        _band(cut) if cut else all_or_none for cut, all_or_none in zip(cuts, found, strict=True)
    ]


def _band(cuts: list[Cut]) -> Band:
    return Band(cuts[0], cuts[1] if len(cuts) > 1 else None)


def band_mask(values: torch.Tensor, start: int, band: Band) -> torch.Tensor:
    """-1 where low <= (|value|, position) < high, else 0; the first value is at `start`."""
    sizes = magnitudes(values)
    flat, ends = sizes.view(-1), {0, sizes.numel()}
    for cut in (band.low, band.high):
        if cut is not None and 0 < cut.position - start < len(flat):
            ends.add(cut.position - start)
    for first, last in pairwise(sorted(ends)):
        _mask_(flat[first:last], start + first, band)
    return sizes


def _mask_(sizes: torch.Tensor, start: int, band: Band) -> None:
    """As band_mask, in place, for elements all on one side of the positions of the cuts."""
    mask = at_least(sizes, band.low.value + (start < band.low.position))
    if band.high is not None:
        mask &= below(sizes, band.high.value + (start < band.high.position))
    sizes.copy_(mask)


def keep_band_(delta: torch.Tensor, tile: Tile, band: Band) -> None:
    """delta * [low <= (|delta|, position) < high], in place."""
    bits_of(delta).bitwise_and_(band_mask(delta, tile.start, band))


LARGEST = Sparsifier(lambda tiles, values: survey_bands(tiles, values, _top), keep_band_)
MIDDLE = Sparsifier(lambda tiles, values: survey_bands(tiles, values, _middle), keep_band_)
