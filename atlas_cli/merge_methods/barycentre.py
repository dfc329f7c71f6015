"""The middle of many models on a sphere: multislerp, and the Karcher mean."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from atlas_cli.errors import UsageError
from atlas_cli.merge_methods.method import Method, Parameter, Tile, Tiles, Values
from atlas_cli.merge_methods.spherical import vectors_of
from atlas_cli.merge_methods.tiling import (
    add_up,
    all_pieces,
    by_pieces,
    exact,
    rounded,
    square,
    sum_over,
    wide,
)


@dataclass(frozen=True)
class Frame:
    """What multislerp knows of the whole tensor, in the dtype of the tensors."""

    weights: torch.Tensor
    eps: float
    norms: torch.Tensor
    mean_norm: torch.Tensor
    dots: torch.Tensor | None = None  # <u_t, m>; float32 has no need of them

    def units(self, tile: Tile) -> list[torch.Tensor]:
        """u_t = v_t / |v_t|"""
        return [v / (n + self.eps) for v, n in zip(vectors_of(tile), self.norms, strict=True)]

    def weighted(self, terms: list[torch.Tensor]) -> torch.Tensor:
        """sum_t w_t x_t"""
        return add_up([x * w for x, w in zip(terms, self.weights, strict=True)])

    def mean(self, units: list[torch.Tensor]) -> torch.Tensor:
        """m = sum_t w_t u_t / |sum_t w_t u_t|"""
        return self.weighted(units).div_(self.mean_norm)


def survey_multislerp(tiles: Tiles, values: Values) -> Frame | None:
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


def survey_karcher(tiles: Tiles, values: Values) -> list[float]:
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


def karcher(tile: Tile, values: Values, coefficients: list[float]) -> torch.Tensor:
    """argmin over m of sum_t angle(m, theta_t)^2, times the mean of |theta_t|; in float32."""
    first = tile.models[0]
    merged = torch.zeros_like(first, dtype=wide(first.dtype))
    for model, coefficient in zip(tile.models, coefficients, strict=True):
        merged.add_(model, alpha=coefficient)
    return merged


METHODS = (
    Method(
        "multislerp",
        by_pieces(multislerp),
        survey_multislerp,
        (Parameter("weight", None),),
        (Parameter("normalize_weights", True), Parameter("eps", 1e-8, 0.0)),
    ),
    Method(
        "karcher",
        by_pieces(karcher),
        survey_karcher,
        per_merge=(Parameter("max_iter", 10, 0), Parameter("tol", 1e-5, 0.0)),
        ignores_base=True,
    ),
)
