"""Weighted sums of whole models, and task vectors with a coefficient found in closed form."""

from __future__ import annotations

from typing import Any

import torch

from atlas_cli.merge_methods.method import Method, Parameter, Tile, Tiles, Values
from atlas_cli.merge_methods.sparsify import delta_of
from atlas_cli.merge_methods.tiling import (
    by_pieces,
    square,
    sum_of,
    sum_over,
    weighted_sum,
    weights_of,
    wide,
)
from atlas_cli.native.operands import Sum


def linear(tile: Tile, values: Values, found: Any) -> torch.Tensor:
    """sum_t w_t theta_t / sum_t w_t, in float32; without the divisor if not `normalize`."""
    return weighted_sum(tile.inputs, linear_sum(values, found, tile.dtype))


def linear_sum(values: Values, found: Any, dtype: torch.dtype) -> Sum:
    """The sum that `linear` is."""
    work = wide(dtype)
    weights = weights_of(values, work)
    return Sum(weights, sum_of(weights, work) if values.merge["normalize"] else 1.0)


def passthrough(tile: Tile, values: Values, found: Any) -> torch.Tensor:
    """scale * theta"""
    scale = values.models[0]["scale"]
    return tile.models[0] if scale in (1, None) else tile.models[0] * scale


def wise_ft(tile: Tile, values: Values, found: Any) -> torch.Tensor:
    """(1 - alpha) theta_0 + alpha theta_1, in float32."""
    assert tile.base is not None
    work = wide(tile.base.dtype)
    return tile.base.to(work).lerp(tile.models[0].to(work), values.merge["alpha"])


def lines(tile: Tile, values: Values, found: Any) -> torch.Tensor:
    """theta_0 + (alpha + beta * depth) * sum_t w_t tau_t; outside the layers only alpha.

    `depth` is l / (L - 1) for layer l of L (LiNeS): deep layers move more than shallow ones.
    """
    scale = values.merge["alpha"] + values.merge["beta"] * (values.depth or 0.0)
    return add_vectors(tile, [scale * own["weight"] for own in values.models])


def survey_norms(tiles: Tiles, values: Values) -> list[float]:
    """|tau_t|^2 of every model, in float64."""
    count = len(values.models)
    squares = sum_over(tiles, lambda tile: (square(delta_of(tile, i)) for i in range(count)))
    return list(squares.tolist())


def metagpt(tile: Tile, values: Values, norms: list[float]) -> torch.Tensor:
    """theta_0 + lambda * sum_t |tau_t|^2 / (sum_k |tau_k|^2) tau_t, norms of this tensor."""
    scale = values.merge["lambda"] / (sum(norms) or 1.0)
    return add_vectors(tile, [scale * norm for norm in norms])


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


_WEIGHT, _LAMBDA = Parameter("weight", None), Parameter("lambda", 1.0)
METHODS = (
    Method(
        "linear",
        by_pieces(linear),
        total=linear_sum,
        per_model=(_WEIGHT,),
        per_merge=(Parameter("normalize", True),),
        spreads=True,
        ignores_base=True,
    ),
    Method(
        "passthrough",
        passthrough,
        per_model=(Parameter("scale", 1.0),),
        models=(1, 1),
        spreads=True,
        ignores_base=True,
    ),
    Method(
        "wise_ft",
        by_pieces(wise_ft),
        per_merge=(Parameter("alpha", 0.5),),
        needs_base=True,
        models=(1, 1),
        spreads=True,
    ),
    Method(
        "lines",
        by_pieces(lines),
        per_model=(Parameter("weight", 1.0),),
        per_merge=(Parameter("alpha", None), Parameter("beta", None)),
        needs_base=True,
    ),
    Method("metagpt", by_pieces(metagpt), survey_norms, per_merge=(_LAMBDA,), needs_base=True),
    Method(
        "consensus",
        by_pieces(consensus),
        per_model=(Parameter("threshold", 0.4, 0.0),),
        per_merge=(_LAMBDA, Parameter("agreement", 2, 1)),
        needs_base=True,
    ),
)
