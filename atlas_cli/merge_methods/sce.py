"""SCE: select what varies between models, calculate their shares, erase minority signs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from atlas_cli.merge_methods.election import Rules, merge_elected
from atlas_cli.merge_methods.method import Parameter, Values, merge_method
from atlas_cli.merge_methods.order_statistics import bits_of, find_cuts
from atlas_cli.merge_methods.sparsify import EVERYTHING, NOTHING, Band, band_mask, delta_of
from atlas_cli.merge_methods.tiling import Tile, Tiles, all_pieces, exact, rounded, sum_over
from atlas_cli.registry import late

if TYPE_CHECKING:
    import torch
else:
    torch = late("torch")

_TINY = 1e-6


@dataclass(frozen=True)
class Shares:
    """Which variances are selected, and the weight of every model."""

    selected: Any
    weights: list[float]


def variance(deltas: list[torch.Tensor]) -> torch.Tensor:
    """mean_t (d_t - mean d)^2, in float64 and then rounded as the tensors are."""
    copies = [exact(delta) for delta in deltas]
    mean = sum(copies[1:], copies[0].clone()).div_(len(copies))
    squares = torch.zeros_like(mean)
    for copy in copies:
        squares.add_((copy - mean).square_())
    return rounded(squares.div_(len(copies)), deltas[0].dtype).to(deltas[0].device)


def _deltas(tile: Tile, selected: Any) -> list[torch.Tensor]:
    """d_t * [variance is among the largest]"""
    deltas = [delta_of(tile, model) for model in range(len(tile.models))]
    if selected is EVERYTHING:
        return deltas
    if selected is NOTHING:
        return [delta.zero_() for delta in deltas]
    mask = band_mask(variance(deltas), tile.start, selected)
    for delta in deltas:
        bits_of(delta).bitwise_and_(mask)
    return deltas


def find_shares(tiles: Tiles, values: Values) -> Shares:
    """The cut among variances, then the mean square of what is left of every model."""
    selected = _select(tiles, values.merge["select_topk"])
    tile = next(tiles())
    sums = sum_over(tiles, lambda piece: (d.square_() for d in _deltas(piece, selected)))
    squares = rounded(sums / math.prod(tile.shape), tile.dtype)
    whole = float(squares.sum())
    if abs(whole) < _TINY:
        return Shares(selected, (torch.ones_like(squares) / len(squares)).tolist())
    return Shares(selected, (squares / whole).tolist())


def _select(tiles: Tiles, share: float) -> Any:
    """The cut below the k largest variances, k = share * (how many are not zero)."""
    if not 0 < share < 1:
        return EVERYTHING if share >= 1 else NOTHING

    def passes() -> Iterator[tuple[int, Callable[[int], torch.Tensor]]]:
        for piece in all_pieces(tiles):
            deltas = [delta_of(piece, model) for model in range(len(piece.models))]
            found = variance(deltas)
            yield piece.start, lambda _, found=found: found  # type: ignore[misc]

    changing = sum(int(variance_of(0).count_nonzero()) for _, variance_of in passes())
    count = int(torch.tensor(changing) * share)  # in float32, as mergekit multiplies
    if count == 0:
        return NOTHING
    ((cut,),) = find_cuts(passes, [[math.prod(next(tiles()).shape) - count]])
    return Band(cut, None)


@merge_method(
    "sce",
    per_merge={"select_topk": Parameter(1.0, 0.0, 1.0), "int8_mask": Parameter(False)},
    statistics=find_shares,
)
def sce(tile: Tile, values: Values, shares: Shares) -> torch.Tensor:
    """theta_0 + sum_t s_t d_t / sum_t s_t over the models with the elected sign.

    s_t is the share of model t in the squares of all task vectors; d_t holds the elements whose
    variance between models is among the largest `select_topk`.
    """
    assert tile.base is not None
    deltas = _deltas(tile, shares.selected)
    rules = Rules(weigh="after", least=_TINY)
    return tile.base + merge_elected(deltas, shares.weights, rules, normalize=True)
