"""Task vectors scaled by layer or by length, or masked where they agree; nothing is learned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atlas_cli.merge_methods.method import Parameter, Values, merge_method
from atlas_cli.merge_methods.sparsify import delta_of
from atlas_cli.merge_methods.tiling import Tile, Tiles, square, sum_over, wide
from atlas_cli.registry import late

if TYPE_CHECKING:
    import torch
else:
    torch = late("torch")


@merge_method("wise_ft", models=(1, 1), per_merge={"alpha": Parameter(0.5)}, spreads=True)
def wise_ft(tile: Tile, values: Values, found: Any) -> torch.Tensor:
    """(1 - alpha) theta_0 + alpha theta_1, in float32."""
    assert tile.base is not None
    work = wide(tile.base.dtype)
    return tile.base.to(work).lerp(tile.models[0].to(work), values.merge["alpha"])


@merge_method(
    "lines",
    per_model={"weight": Parameter(1.0)},
    per_merge={"alpha": Parameter(usual=0.1), "beta": Parameter(usual=0.5)},
)
def lines(tile: Tile, values: Values, found: Any) -> torch.Tensor:
    """theta_0 + (alpha + beta * depth) * sum_t w_t tau_t; outside the layers only alpha.

    `depth` is l / (L - 1) for layer l of L (LiNeS): deep layers move more than shallow ones.
    """
    scale = values.merge["alpha"] + values.merge["beta"] * (values.depth or 0.0)
    return add_vectors(tile, [scale * own["weight"] for own in values.models])


def squared_norms(tiles: Tiles, values: Values) -> list[float]:
    """|tau_t|^2 of every model, in float64."""
    count = len(values.models)
    squares = sum_over(tiles, lambda tile: (square(delta_of(tile, i)) for i in range(count)))
    return list(squares.tolist())


@merge_method("metagpt", per_merge={"lambda": Parameter(1.0)}, statistics=squared_norms)
def metagpt(tile: Tile, values: Values, norms: list[float]) -> torch.Tensor:
    """theta_0 + lambda * sum_t |tau_t|^2 / (sum_k |tau_k|^2) tau_t, norms of this tensor."""
    scale = values.merge["lambda"] / (sum(norms) or 1.0)
    return add_vectors(tile, [scale * norm for norm in norms])


@merge_method(
    "consensus",
    per_model={"threshold": Parameter(0.4, 0.0)},
    per_merge={"lambda": Parameter(1.0), "agreement": Parameter(2, 1)},
)
def consensus(tile: Tile, values: Values, found: Any) -> torch.Tensor:
    """theta_0 + lambda * tau * [|tau_t| > l_t |tau - tau_t| for at least `agreement` models t].

    tau is the sum of all task vectors: weights that matter to one model only, or to none, are left
    at the base (TALL masks, consensus merging). In float32.
    """
    assert tile.base is not None
    work = wide(tile.base.dtype)
    deltas = [model.to(work).sub(tile.base) for model in tile.models]
    whole = deltas[0].clone()
    for delta in deltas[1:]:
        whole += delta
    votes = torch.zeros_like(whole, dtype=torch.int8)
    for delta, own in zip(deltas, values.models, strict=True):
        votes += delta.abs() > (whole - delta).abs_().mul_(own["threshold"])
    whole *= votes >= values.merge["agreement"]
    return whole.mul_(values.merge["lambda"]).add_(tile.base)


def add_vectors(tile: Tile, coefficients: list[float]) -> torch.Tensor:
    """theta_0 + sum_t c_t (theta_t - theta_0), in float32."""
    assert tile.base is not None
    work = wide(tile.base.dtype)
    base = tile.base.to(work)
    merged = base.clone()
    for model, coefficient in zip(tile.models, coefficients, strict=True):
        merged.add_(model.to(work) - base, alpha=coefficient)
    return merged
