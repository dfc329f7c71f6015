"""What a sparsifier is: it finds what it needs in the whole tensor, then zeroes elements."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from atlas_cli.core.methods.method import Tile, Tiles, Values
from atlas_cli.core.methods.tiling import rounded, sum_over

NOTHING, EVERYTHING = object(), object()  # what a survey may find for a model
_TINY = 1e-7  # a norm below this is not matched


@dataclass(frozen=True)
class Sparsifier:
    """`survey` finds, for every model, what `keep_` needs to zero the other elements in place."""

    survey: Callable[[Tiles, Values], list[Any]]
    keep_: Callable[[torch.Tensor, Tile, Any], None]
    by_chance: bool = False


def delta_of(tile: Tile, model: int) -> torch.Tensor:
    """theta_t - theta_0, in the dtype of the tensors."""
    assert tile.base is not None
    return tile.models[model] - tile.base


def sparsify_(sparsifier: Sparsifier, delta: torch.Tensor, tile: Tile, found: Any) -> None:
    """delta * mask, in place."""
    if found is NOTHING:
        delta.zero_()
    elif found is not EVERYTHING:
        sparsifier.keep_(delta, tile, found)


def scales_by_norm(tiles: Tiles, sparsifier: Sparsifier, found: list[Any]) -> list[float]:
    """sum |delta| / sum |delta * mask| of each model, rounded as the tensors are."""
    some = [i for i, kept in enumerate(found) if kept is not EVERYTHING and kept is not NOTHING]
    if not some:
        return [1.0] * len(found)

    def sizes(tile: Tile) -> Iterator[torch.Tensor]:
        for model in some:
            delta = delta_of(tile, model)
            yield delta.abs()
            sparsify_(sparsifier, delta, tile, found[model])
            yield delta.abs_()

    dtype = next(tiles()).dtype
    if sparsifier.by_chance and dtype == torch.float16:
        dtype = torch.float32
    before, after = rounded(sum_over(tiles, sizes), dtype).view(-1, 2).unbind(1)
    matched = (before >= _TINY) & (after >= _TINY)
    scales = torch.where(matched, before / after, torch.ones_like(after)).tolist()
    return [scales[some.index(i)] if i in some else 1.0 for i in range(len(found))]


def scales_by_density(values: Values, found: list[Any]) -> list[float]:
    """1 / density of each model, as DARE was published."""
    kept = [
        found[i] is not EVERYTHING and own["density"] > 0 for i, own in enumerate(values.models)
    ]
    return [1 / own["density"] if k else 1.0 for k, own in zip(kept, values.models, strict=True)]
