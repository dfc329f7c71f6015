"""Model Stock: how far to go from the base to the average, from the angle between the models."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import TYPE_CHECKING

from atlas_cli.merge_methods.method import Parameter, Values, merge_method
from atlas_cli.merge_methods.tiling import Tile, Tiles, inner_products, weighted_sum, wide
from atlas_cli.native.operands import Sum
from atlas_cli.registry import late

if TYPE_CHECKING:
    import torch
else:
    torch = late("torch")

_TINY = 1e-6  # a divisor that is too small


def stock_ratio(tiles: Tiles, values: Values) -> float | None:
    """The ratio t for the whole tensor; None if every row has its own."""
    first = next(tiles())
    if values.merge["filter_wise"] and len(first.shape) > 1:
        return None
    count = len(values.models)
    found = inner_products(tiles, from_base=True)
    pairs = [found[s, t] for s, t in combinations(range(count), 2)]
    return float(ratio(list(found.diagonal().sqrt()), pairs))


def _deltas(tile: Tile) -> list[torch.Tensor]:
    """theta_t - theta_0 of every model, in float32."""
    assert tile.base is not None
    work = wide(tile.base.dtype)
    base = tile.base.to(work)
    return [model.to(work) - base for model in tile.models]


def ratio(norms: Sequence[torch.Tensor], products: Sequence[torch.Tensor]) -> torch.Tensor:
    """t = N c / (1 + (N - 1) c), c the mean cosine of all pairs; 0 where that is infinite."""
    count = len(norms)
    cosines = [
        (product / (norms[i] * norms[j]).clamp(min=_TINY)).clamp(-1, 1)
        for (i, j), product in zip(combinations(range(count), 2), products, strict=True)
    ]
    cosine = torch.stack(cosines).mean(0)
    divisor = 1 + (count - 1) * cosine
    infinite = divisor.abs() < _TINY
    return torch.where(infinite, 0, (count * cosine) / torch.where(infinite, 1, divisor))


def _row_ratios(deltas: Sequence[torch.Tensor]) -> torch.Tensor:
    """The ratio of each vector along the last dimension."""
    norms = [torch.linalg.vector_norm(delta, dim=-1) for delta in deltas]
    products = [(one * other).sum(-1) for one, other in combinations(deltas, 2)]
    return ratio(norms, products)[..., None]


def stock_sum(values: Values, found: float | None) -> Sum | None:
    """The sum for a whole tensor; None if every row has its own."""
    count = len(values.models)
    return None if found is None else Sum([1 - found, *[found / count] * count])


@merge_method(
    "model_stock",
    models=(2, None),
    per_merge={"filter_wise": Parameter(False)},
    statistics=stock_ratio,
    spreads=True,
)
def model_stock(tile: Tile, values: Values, found: float | None) -> torch.Tensor:
    """t * mean_t theta_t + (1 - t) theta_0, t = N c / (1 + (N - 1) c), in float32.

    c is the mean cosine between task vectors, of the whole tensor or of each row (`filter_wise`).
    """
    if total := stock_sum(values, found):
        return weighted_sum(tile.inputs, total)
    assert tile.base is not None
    deltas = _deltas(tile)
    average = torch.stack(deltas).mean(0)
    return average.mul_(_row_ratios(deltas)).add_(tile.base)
