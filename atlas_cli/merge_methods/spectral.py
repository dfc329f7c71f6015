"""Merging in the space of singular vectors; a matrix is needed whole, all else is averaged."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any

from atlas_cli.merge_methods.method import Parameter, Values, merge_method, post_step
from atlas_cli.merge_methods.tiling import Tile, exact, wide
from atlas_cli.registry import late

if TYPE_CHECKING:
    import torch

    Vectors = list[torch.Tensor]
    Merge = Callable[[Vectors, Values], torch.Tensor]
else:
    torch = late("torch")


def on_matrices(name: str, **more: Parameter) -> Callable[[Merge], Merge]:
    """Register theta_0 + lambda * merge(w_t (theta_t - theta_0)) for matrices.

    All other tensors are averaged. In float32, written in the dtype of the base.
    """

    def register(merge: Merge) -> Merge:
        @wraps(merge)
        def apply(tile: Tile, values: Values, statistics: Any) -> torch.Tensor:
            assert tile.base is not None
            base = tile.base.to(wide(tile.base.dtype))
            vectors = [
                (model.to(base.dtype) - base) * own["weight"]
                for model, own in zip(tile.models, values.models, strict=True)
            ]
            merged = merge(vectors, values) if base.ndim == 2 else _sum(vectors) / len(vectors)
            return merged.mul_(values.merge["lambda"]).add_(base).to(tile.base.dtype)

        per_merge = {"lambda": Parameter(1.0), **more}
        weight = {"weight": Parameter(1.0)}
        merge_method(name, per_model=weight, per_merge=per_merge, whole=True)(apply)
        return merge

    return register


def _svd(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    left, sizes, right = torch.linalg.svd(matrix, full_matrices=False)
    return left, sizes, right


def nearest_orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """argmin over Q with orthonormal columns (or rows) of |Q - M| = U V^T, M = U S V^T."""
    left, _, right = _svd(matrix)
    return left @ right


@on_matrices("tsv")
def tsv(vectors: Vectors, values: Values) -> torch.Tensor:
    """Q(U) S Q(V): the first r / T singular triplets of each of T vectors, made orthogonal.

    U, S and V hold the triplets of all vectors side by side (task singular vectors, TSV-M).
    """
    rank = min(vectors[0].shape) // len(vectors)
    parts = [_svd(vector) for vector in vectors]
    left = torch.cat([u[:, :rank] for u, _, _ in parts], 1)
    sizes = torch.cat([s[:rank] for _, s, _ in parts])
    right = torch.cat([v[:rank] for _, _, v in parts])
    return nearest_orthogonal(left) * sizes @ nearest_orthogonal(right)


@on_matrices("iso_c")
def iso_c(vectors: Vectors, values: Values) -> torch.Tensor:
    """mean(S) U V^T, where U S V^T = sum_t tau_t: every direction equally long (Iso-C)."""
    left, sizes, right = _svd(_sum(vectors))
    return left @ right * sizes.mean()


@on_matrices("iso_cts", common_space_fraction=Parameter(0.8, 0.0, 1.0))
def iso_cts(vectors: Vectors, values: Values) -> torch.Tensor:
    """mean(S) Q(U) Q(V): common directions of the sum, then those each vector has besides.

    Of r directions, about `common_space_fraction` are the first of the sum; the rest is shared
    out evenly among the vectors, less their part in the common ones (Iso-CTS).
    """
    rank, count = min(vectors[0].shape), len(vectors)
    common = int(rank * values.merge["common_space_fraction"])
    own = min(round((rank - common) / count), rank // count)
    common = rank - own * count
    left, sizes, right = _svd(_sum(vectors))
    shared = left[:, :common]
    parts = [_svd(vector - shared @ (shared.T @ vector)) for vector in vectors]
    lefts = torch.cat([*(u[:, :own] for u, _, _ in parts), shared], 1)
    rights = torch.cat([*(v[:own] for _, _, v in parts), right[:common]])
    scales = torch.cat([*(s[:own] for _, s, _ in parts), sizes[:common]])
    return nearest_orthogonal(lefts) @ nearest_orthogonal(rights) * scales.mean()


@on_matrices("wudi")
def wudi(vectors: Vectors, values: Values) -> torch.Tensor:
    """(sum_t tau_t G_t / |tau_t|^2) (sum_t G_t / |tau_t|^2 + 1e-8 I)^-1, G_t = tau_t^T tau_t.

    That is what is nearest to every task vector along its own rows (WUDI, in closed form). In
    float64, which the inverse needs.
    """
    some = [exact(vector) for vector in vectors if vector.any()]
    if not some:
        return vectors[0]
    units = [vector / vector.norm() for vector in some]
    grams = [unit.T @ unit for unit in units]
    ridge = 1e-8 * torch.eye(len(grams[0]), dtype=grams[0].dtype, device=grams[0].device)
    wanted = _sum([vector @ gram for vector, gram in zip(some, grams, strict=True)])
    found: torch.Tensor = torch.linalg.solve(_sum(grams) + ridge, wanted, left=False)
    return found.to(vectors[0])


@merge_method(
    "cart",
    base="may",
    models=(2, None),
    per_merge={"lambda": Parameter(1.0), "rank_fraction": Parameter(0.08, 0.0, 1.0)},
    whole=True,
)
def cart(tile: Tile, values: Values, found: Any) -> torch.Tensor:
    """mean + lambda * sum_t SVD_k(theta_t - mean) for matrices, mean = mean_t theta_t.

    k is `rank_fraction` of the rank, rounded up. All other tensors are averaged; the base, if
    there is one, gives names and files only (CART). In float32.
    """
    dtype = tile.dtype
    models = [model.to(wide(dtype)) for model in tile.models]
    mean = _sum(models) / len(models)
    if mean.ndim != 2:
        return mean.to(dtype)
    rank = math.ceil(values.merge["rank_fraction"] * min(mean.shape))
    merged = mean.clone()
    for model in models:
        left, sizes, right = _svd(model - mean)
        merged += left[:, :rank] * sizes[:rank] @ right[:rank] * values.merge["lambda"]
    return merged.to(dtype)


@post_step("svc", alpha=Parameter(0.1, 0.0))
def svc(
    merged: torch.Tensor, base: torch.Tensor, models: Vectors, parameters: Mapping[str, Any]
) -> torch.Tensor:
    """theta_0 + U S' V^T, S'_r = S_r T / sum_t max(alpha, s_rt), where U S V^T = merged - theta_0.

    s_rt = <u_r^T tau, u_r^T tau_t> / |u_r^T tau_t|^2 tells how often the direction u_r of task t
    was counted, tau being the merged task vector (singular value calibration). In float64.
    """
    base = exact(base)
    left, sizes, right = _svd(exact(merged) - base)
    whole = sizes[:, None] * right  # u_r^T tau
    counts = torch.zeros_like(sizes)
    for model in models:
        own = left.T @ (exact(model) - base)
        shares = (whole * own).sum(1) / own.square().sum(1).clamp(min=1e-12)
        counts += shares.clamp(min=parameters["alpha"])
    scales = torch.where(counts > 0, len(models) / counts, 1.0)
    return base + left * (sizes * scales) @ right


def _sum(vectors: Vectors) -> torch.Tensor:
    return torch.stack(vectors).sum(0)
