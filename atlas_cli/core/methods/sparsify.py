"""What a sparsifier is: it finds what it needs in the whole tensor, then zeroes elements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from atlas_cli.core.methods.method import Tile, Tiles, Values
from atlas_cli.core.methods.tiling import all_pieces, rounded, total

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
    sums = torch.zeros(len(found), 2, dtype=torch.float64)
    some = [i for i, kept in enumerate(found) if kept is not EVERYTHING and kept is not NOTHING]
    dtype = torch.float32
    for piece in all_pieces(tiles) if some else ():
        dtype = piece.models[0].dtype
        for model in some:
            delta = delta_of(piece, model)
            sums[model, 0] += total(delta.abs()).cpu()
            sparsify_(sparsifier, delta, piece, found[model])
            sums[model, 1] += total(delta.abs_()).cpu()
    if sparsifier.by_chance and dtype == torch.float16:
        dtype = torch.float32
    before, after = rounded(sums, dtype).unbind(1)
    matched = (before >= _TINY) & (after >= _TINY)
    return torch.where(matched, before / after, torch.ones_like(after)).tolist()


def scales_by_density(values: Values, found: list[Any]) -> list[float]:
    """1 / density of each model, as DARE was published."""
    kept = [
        found[i] is not EVERYTHING and own["density"] > 0 for i, own in enumerate(values.models)
    ]
    return [1 / own["density"] if k else 1.0 for k, own in zip(kept, values.models, strict=True)]
