"""Interpolation along an arc between two models, or between their task vectors."""

from __future__ import annotations

import torch

from atlas_cli.merge_methods.method import Method, Parameter, Tile, Tiles, Values
from atlas_cli.merge_methods.tiling import (
    all_pieces,
    by_pieces,
    exact,
    inner_products,
    rounded,
    total,
    weighted_sum,
    wide,
)
from atlas_cli.native.operands import Sum

_EPS = 1e-8  # a norm that counts as zero
_PARALLEL = 0.9995  # a cosine above which the arc is a straight line


def survey_slerp(tiles: Tiles, values: Values) -> tuple[float, float]:
    """sin((1 - t) a) / sin(a) and sin(t a) / sin(a), a the angle between the flat tensors."""
    found = inner_products(tiles)
    sizes = found.diagonal().sqrt()
    sizes[sizes <= _EPS] = 1.0
    cosine = (found[0, 1] / sizes.prod()).clamp(-1, 1)
    t = float(values.merge["t"])
    if cosine.abs() > _PARALLEL:
        return 1 - t, t
    angle = cosine.acos()
    first, second = ((1 - t) * angle).sin() / angle.sin(), (t * angle).sin() / angle.sin()
    return float(first), float(second)


def slerp(tile: Tile, values: Values, found: tuple[float, float]) -> torch.Tensor:
    """sin((1 - t) a) / sin(a) theta_0 + sin(t a) / sin(a) theta_1, in float32.

    (1 - t) theta_0 + t theta_1 if the two are parallel.
    """
    return weighted_sum(tile.inputs, Sum(found))


# nuslerp: in the dtype of the tensors throughout ------------------------------------------------


def vectors_of(tile: Tile) -> tuple[torch.Tensor, ...]:
    """theta_t - theta_0, or theta_t if there is no base."""
    if tile.base is None:
        return tile.models
    return tuple(model - tile.base for model in tile.models)


def _along(tile: Tile, values: Values) -> str:
    """What is one vector: the whole tensor, its last dimension, or its first."""
    if values.merge["nuslerp_flatten"] or len(tile.shape) < 2:
        return "all"
    return "first" if values.merge["nuslerp_row_wise"] else "last"


def _sum(values: torch.Tensor, along: str) -> torch.Tensor:
    if along == "all":
        return torch.tensor(total(values), dtype=torch.float64)
    return exact(values).sum(0)


def survey_cosine(tiles: Tiles, values: Values) -> torch.Tensor | None:
    """<v_0 / |v_0|, v_1 / |v_1|>, unless a tile can tell by itself; one for each vector."""
    first = next(tiles())
    along, dtype, device = _along(first, values), first.dtype, first.device
    if along == "last":
        return None
    squares, products = [torch.zeros(()), torch.zeros(())], torch.zeros(())
    for piece in all_pieces(tiles):
        for i, vector in enumerate(vectors_of(piece)):
            squares[i] = squares[i] + _sum(vector.to(wide(dtype)).square(), along)
    norms = [rounded(square.sqrt(), dtype).to(device) for square in squares]
    for piece in all_pieces(tiles):
        products = products + _sum(_product(vectors_of(piece), norms), along)
    return rounded(products, dtype).to(device)


def _product(vectors: tuple[torch.Tensor, ...], norms: list[torch.Tensor]) -> torch.Tensor:
    one, other = (v / norm.clamp(min=1e-7) for v, norm in zip(vectors, norms, strict=True))
    return one * other


def nuslerp(tile: Tile, values: Values, cosine: torch.Tensor | None) -> torch.Tensor:
    """theta_0 + (sin((1 - t) a) v_0 + sin(t a) v_1) / sin(a), t = w_1 / (w_0 + w_1).

    v are task vectors, or the models if there is no base; a is the angle between the whole
    tensors (`nuslerp_flatten`), each of the last dimension, or of the first (`row_wise`).
    """
    vectors = vectors_of(tile)
    weights = [own["weight"] for own in values.models]
    t = 0.5 if abs(sum(weights)) < 1e-6 else weights[1] / sum(weights)
    if cosine is None:
        norms = [torch.linalg.vector_norm(v, dim=-1, keepdim=True) for v in vectors]
        cosine = _product(vectors, norms).sum(-1, keepdim=True)
    merged = _arc(vectors, t, cosine.clamp(-1, 1))
    return merged if tile.base is None else tile.base + merged


def _arc(vectors: tuple[torch.Tensor, ...], t: float, cosine: torch.Tensor) -> torch.Tensor:
    straight = (1 - cosine.square()) <= _EPS**2
    angle = torch.where(straight, 0, cosine).acos()
    merged = ((1 - t) * angle).sin() * vectors[0]
    merged += (t * angle).sin() * vectors[1]
    merged /= angle.sin()
    if straight.any():
        return torch.where(straight, (1 - t) * vectors[0] + t * vectors[1], merged)
    return merged


_FLATTEN, _ROW_WISE = Parameter("nuslerp_flatten", True), Parameter("nuslerp_row_wise", False)
METHODS = (
    Method(
        "slerp",
        by_pieces(slerp),
        survey_slerp,
        total=lambda values, found, dtype: Sum(found),
        per_merge=(Parameter("t", None),),
        needs_base=True,
        models=(1, 1),
        spreads=True,
    ),
    Method(
        "nuslerp",
        by_pieces(nuslerp),
        survey_cosine,
        (Parameter("weight", None),),
        (_FLATTEN, _ROW_WISE),
        models=(2, 2),
    ),
)
