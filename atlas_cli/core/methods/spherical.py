"""Interpolation along the sphere: slerp between two models, or task vectors."""

from __future__ import annotations

import torch

from atlas_cli.core.methods.method import Method, Parameter, Tile, Tiles, Values
from atlas_cli.core.methods.tiling import all_pieces, by_pieces, total, wide

_EPS = 1e-8  # a norm that counts as zero
_PARALLEL = 0.9995  # a cosine above which the arc is a straight line


def survey_slerp(tiles: Tiles, values: Values) -> tuple[float, float]:
    """sin((1 - t) a) / sin(a) and sin(t a) / sin(a), a the angle between the flat tensors."""
    sums = torch.zeros(3, dtype=torch.float64)
    for piece in all_pieces(tiles):
        assert piece.base is not None
        work = wide(piece.base.dtype)
        base, model = piece.base.to(work), piece.models[0].to(work)
        products = (total(base * model), total(base.square()), total(model.square()))
        sums += torch.stack(products).cpu()
    sizes = sums[1:].sqrt()
    sizes[sizes <= _EPS] = 1.0
    cosine = (sums[0] / sizes.prod()).clamp(-1, 1)
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
    assert tile.base is not None
    work = wide(tile.base.dtype)
    merged = tile.base.to(work, copy=True).mul_(found[0])
    return merged.add_(tile.models[0].to(work, copy=True).mul_(found[1])).to(tile.base.dtype)


METHODS = (
    Method(
        "slerp",
        by_pieces(slerp),
        survey_slerp,
        per_merge=(Parameter("t", None),),
        needs_base=True,
        models=(1, 1),
    ),
)
