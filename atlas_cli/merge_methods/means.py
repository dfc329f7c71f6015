"""Means of whole models: weighted sums, points on an arc between two, the middle of many.

A mean may also be one of task vectors, if there is a base.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from atlas_cli.errors import UsageError
from atlas_cli.merge_methods.method import Parameter, Values, merge_method
from atlas_cli.merge_methods.tiling import (
    Tile,
    Tiles,
    add_up,
    all_pieces,
    exact,
    inner_products,
    rounded,
    square,
    sum_of,
    sum_over,
    total,
    weighted_sum,
    weights_of,
    wide,
)
from atlas_cli.native.operands import Sum
from atlas_cli.registry import late

if TYPE_CHECKING:
    import torch
else:
    torch = late("torch")

_EPS = 1e-8  # a norm that counts as zero
_PARALLEL = 0.9995  # a cosine above which the arc is a straight line


def linear_sum(values: Values, dtype: torch.dtype) -> Sum:
    """The sum that `linear` is."""
    work = wide(dtype)
    weights = weights_of(values, work)
    return Sum(weights, sum_of(weights, work) if values.merge["normalize"] else 1.0)


@merge_method(
    "linear",
    base="no",
    per_model={"weight": Parameter(usual=1.0)},
    per_merge={"normalize": Parameter(True)},
    spreads=True,
)
def linear(tile: Tile, values: Values, found: Any) -> torch.Tensor:
    """sum_t w_t theta_t / sum_t w_t, in float32; without the divisor if not `normalize`."""
    return weighted_sum(tile.inputs, linear_sum(values, tile.dtype))


# slerp: an arc between the base and a model ----------------------------------------------------


def arc_weights(tiles: Tiles, values: Values) -> tuple[float, float]:
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


@merge_method(
    "slerp",
    models=(1, 1),
    per_merge={"t": Parameter()},
    statistics=arc_weights,
    spreads=True,
)
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
    """The dimension along which a vector lies: all of the tensor, the last, or the first."""
    if values.merge["nuslerp_flatten"] or len(tile.shape) < 2:
        return "all"
    return "first" if values.merge["nuslerp_row_wise"] else "last"


def _sum(values: torch.Tensor, along: str) -> torch.Tensor:
    if along == "all":
        return torch.tensor(total(values), dtype=torch.float64)
    return exact(values).sum(0)


def unit_product(tiles: Tiles, values: Values) -> torch.Tensor | None:
    """<v_0 / |v_0|, v_1 / |v_1|> for each vector; None if every tile holds whole vectors."""
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


@merge_method(
    "nuslerp",
    base="may",
    models=(2, 2),
    per_model={"weight": Parameter()},
    per_merge={"nuslerp_flatten": Parameter(True), "nuslerp_row_wise": Parameter(False)},
    statistics=unit_product,
)
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


# multislerp: the middle of many models on a sphere ---------------------------------------------


@dataclass(frozen=True)
class Frame:
    """Statistics of the whole tensor for multislerp, in the dtype of the tensors."""

    weights: torch.Tensor
    eps: float
    norms: torch.Tensor
    mean_norm: torch.Tensor
    dots: torch.Tensor | None = None  # <u_t, m>, which only two-byte numbers need

    def units(self, tile: Tile) -> list[torch.Tensor]:
        """u_t = v_t / |v_t|"""
        return [v / (n + self.eps) for v, n in zip(vectors_of(tile), self.norms, strict=True)]

    def weighted(self, terms: list[torch.Tensor]) -> torch.Tensor:
        """sum_t w_t x_t"""
        return add_up([x * w for x, w in zip(terms, self.weights, strict=True)])

    def mean(self, units: list[torch.Tensor]) -> torch.Tensor:
        """m = sum_t w_t u_t / |sum_t w_t u_t|"""
        return self.weighted(units).div_(self.mean_norm)


def find_frame(tiles: Tiles, values: Values) -> Frame | None:
    """|v_t|, |sum_t w_t u_t| and <u_t, m>, by a pass for each."""
    if len(values.models) == 1:
        return None
    first = next(tiles())
    dtype = first.dtype
    weights = torch.tensor([own["weight"] for own in values.models], dtype=dtype)
    if values.merge["normalize_weights"]:
        weights = weights / weights.sum()
    norms = sum_over(tiles, lambda tile: [square(v) for v in vectors_of(tile)]).sqrt()
    frame = Frame(weights, values.merge["eps"], rounded(norms, dtype), torch.ones(()))
    length = sum_over(tiles, lambda tile: [square(frame.weighted(frame.units(tile)))])[0].sqrt()
    frame = replace(frame, mean_norm=rounded(length, dtype))
    if frame.mean_norm < frame.eps and len(weights) > 2 and norms.any():
        raise UsageError(f"multislerp: the models cancel out in {first.name}; change a weight")
    if dtype.itemsize > 2 or frame.mean_norm < frame.eps:
        return frame
    return replace(frame, dots=rounded(sum_over(tiles, partial(_along_mean, frame)), dtype))


def _along_mean(frame: Frame, tile: Tile) -> list[torch.Tensor]:
    """u_t * m, element by element."""
    units = frame.units(tile)
    mean = frame.mean(units)
    return [unit.mul_(mean) for unit in units]


@merge_method(
    "multislerp",
    base="may",
    per_model={"weight": Parameter(usual=1.0)},
    per_merge={"normalize_weights": Parameter(True), "eps": Parameter(1e-8, 0.0)},
    statistics=find_frame,
    formula="the weighted mean of the directions, with the weighted mean of the lengths",
)
def multislerp(tile: Tile, values: Values, frame: Frame | None) -> torch.Tensor:
    """theta_0 + r (m + q), q = sum_t w_t (u_t - <u_t, m> m), r = sum_t w_t |v_t|.

    u are the unit task vectors (models, if there is no base), m the unit vector of their weighted
    mean. q is the step from m along the sphere, and zero but for rounding, since sum_t w_t u_t is
    parallel to m: two-byte numbers are given mergekit's rounding, all others none. Two vectors
    that cancel out, and any that are zero, are interpolated linearly.
    """
    if frame is None:
        return tile.models[0]
    if frame.mean_norm < frame.eps:
        merged = frame.weighted(list(vectors_of(tile)))
    else:
        units = frame.units(tile)
        merged = frame.mean(units)
        if frame.dots is not None:
            steps = [u - dot * merged for u, dot in zip(units, frame.dots, strict=True)]
            merged += frame.weighted(steps)
        merged *= (frame.norms * frame.weights).sum()
    return merged if tile.base is None else merged.add_(tile.base)


# The Karcher mean ------------------------------------------------------------------------------


def mean_coefficients(tiles: Tiles, values: Values) -> list[float]:
    """The coefficients of the mean, from the products of all pairs of models, in float64."""
    count = len(values.models)
    if count == 1:
        return [1.0]
    products = torch.zeros(count, count, dtype=torch.float64)
    for piece in all_pieces(tiles):
        flat = [exact(model.reshape(-1)) for model in piece.models]
        for i in range(count):
            for j in range(i + 1):
                products[i, j] += torch.dot(flat[i], flat[j]).cpu()
    products = torch.tril(products) + torch.tril(products, -1).T
    return karcher_coefficients(products, int(values.merge["max_iter"]), values.merge["tol"])


def karcher_coefficients(products: torch.Tensor, most: int, tolerance: float) -> list[float]:
    """c such that sum_t c_t theta_t is the Karcher mean, of the mean length, given <theta, theta>.

    Every step of the descent stays in the span of the models, so that it is one of coefficients.
    """
    sizes = products.diagonal().sqrt()
    some = sizes > tolerance
    found = torch.zeros_like(sizes)
    if not some.any():
        return found.tolist()
    cosines = products[some][:, some] / torch.outer(sizes[some], sizes[some])
    share = 1 / len(cosines)
    mean = torch.full_like(cosines[0], share)
    length = _length(mean, cosines)
    mean = mean / length if length >= tolerance else torch.eye(len(cosines)).double()[0]
    for _ in range(most):
        step = _tangent(mean, cosines, share, tolerance)
        angle = _length(step, cosines)
        if angle < tolerance:
            break
        mean = angle.cos() * mean + angle.sin() / angle * step
        mean = mean / _length(mean, cosines)
    found[some] = sizes.mean() * mean / sizes[some]
    return found.tolist()


def _length(coefficients: torch.Tensor, cosines: torch.Tensor) -> torch.Tensor:
    return (coefficients @ cosines @ coefficients).clamp(min=0).sqrt()


def _tangent(
    mean: torch.Tensor, cosines: torch.Tensor, share: float, tolerance: float
) -> torch.Tensor:
    """sum_t share * (a_t / sin a_t) (u_t - cos(a_t) mean), a_t the angle from the mean to u_t."""
    dots = (cosines @ mean).clamp(-1, 1)
    angles = dots.acos()
    pull = torch.where(angles < tolerance, 0, share * angles / angles.sin())
    return pull - (pull * dots).sum() * mean


@merge_method(
    "karcher",
    base="no",
    per_merge={"max_iter": Parameter(10, 0), "tol": Parameter(1e-5, 0.0)},
    statistics=mean_coefficients,
)
def karcher(tile: Tile, values: Values, coefficients: list[float]) -> torch.Tensor:
    """argmin over m of sum_t angle(m, theta_t)^2, times the mean of |theta_t|; in float32."""
    first = tile.models[0]
    merged = torch.zeros_like(first, dtype=wide(first.dtype))
    for model, coefficient in zip(tile.models, coefficients, strict=True):
        merged.add_(model, alpha=coefficient)
    return merged


# passthrough ----------------------------------------------------------------------------------


@merge_method(
    "passthrough",
    base="no",
    models=(1, 1),
    per_model={"scale": Parameter(1.0)},
    pieces=False,
    spreads=True,
)
def passthrough(tile: Tile, values: Values, found: Any) -> torch.Tensor:
    """scale * theta"""
    scale = values.models[0]["scale"]
    return tile.models[0] if scale in (1, None) else tile.models[0] * scale
