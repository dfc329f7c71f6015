"""Task vectors scaled by layer, by length or by element, or masked where they agree or overlap."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atlas_cli.merge_methods.method import Parameter, Values, merge_method
from atlas_cli.merge_methods.sparsify import delta_of
from atlas_cli.merge_methods.tiling import Tile, Tiles, add_up, all_pieces, square, sum_over, wide
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


@merge_method("nearswap", models=(1, 1), per_merge={"t": Parameter()}, spreads=True)
def nearswap(tile: Tile, values: Values, found: Any) -> torch.Tensor:
    """s theta_1 + (1 - s) theta_0, s = t / |theta_1 - theta_0| for each element, from 0 to 1.

    Elements that are within t of each other are swapped. In the dtype of the tensors, as mergekit
    computes it.
    """
    assert tile.base is not None
    base, model = tile.base, tile.models[0]
    apart = (base - model).abs_().clamp_(min=1e-6)
    share = apart.reciprocal_().mul_(values.merge["t"]).clamp_(0, 1)  # as Python divides by it
    return share * model + (1 - share) * base


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


# Entries that one model changes alone -----------------------------------------------------------


@merge_method("ram", per_merge={"epsilon": Parameter(1e-5, 0.0)})
def ram(tile: Tile, values: Values, found: Any) -> torch.Tensor:
    """theta_0 + sum_t tau_t / n over the n models with |tau_t| > epsilon, element by element."""
    assert tile.base is not None
    changes, count = _changes(tile, values)
    return tile.base + add_up(change / count.clamp(min=1) for change in changes)


def unique_scales(tiles: Tiles, values: Values) -> list[float]:
    """1 + r min(alpha, shared / unique) of every model: how many elements others change, too."""
    shared, unique = [0] * len(values.models), [0] * len(values.models)
    for piece in all_pieces(tiles):
        changes, count = _changes(piece, values)
        for model, change in enumerate(changes):
            own = change != 0
            shared[model] += int((own & (count > 1)).count_nonzero())
            unique[model] += int((own & (count == 1)).count_nonzero())
    r, alpha, least = (values.merge[key] for key in ("r", "alpha", "epsilon"))
    # In float32, as mergekit divides counts.
    ratios = torch.tensor(shared).float() / torch.tensor(unique).float().clamp(min=least)
    return list((1 + r * ratios.clamp(0, alpha)).tolist())


@merge_method(
    "ramplus_tl",
    per_merge={
        "epsilon": Parameter(1e-5, 0.0),
        "r": Parameter(0.1),
        "alpha": Parameter(0.2, 0.0),
    },
    statistics=unique_scales,
)
def ramplus_tl(tile: Tile, values: Values, scales: list[float]) -> torch.Tensor:
    """as `ram`, with what only model t changes times 1 + r min(alpha, shared_t / unique_t).

    shared_t and unique_t count the elements of the tensor that t changes with others and alone.
    In float32.
    """
    assert tile.base is not None
    changes, count = _changes(tile, values)
    work, alone = wide(tile.base.dtype), count == 1
    terms = (
        torch.where(alone, change.to(work) * scale, (change / count.clamp(min=1)).to(work))
        for change, scale in zip(changes, scales, strict=True)
    )
    return tile.base.to(work) + add_up(terms)


def _changes(tile: Tile, values: Values) -> tuple[list[torch.Tensor], torch.Tensor]:
    """tau_t where |tau_t| > epsilon, else 0, of every model; and how many are not zero."""
    deltas = [delta_of(tile, model) for model in range(len(tile.models))]
    kept = [delta.abs() > values.merge["epsilon"] for delta in deltas]
    return [d * k for d, k in zip(deltas, kept, strict=True)], torch.stack(kept).sum(0)


@merge_method("negmerge", per_merge={"lambda": Parameter(1.0)})
def negmerge(tile: Tile, values: Values, found: Any) -> torch.Tensor:
    """theta_0 - lambda * mean_t tau_t * [all tau_t have the same sign]; to forget one task.

    The models are several fine-tunes of that task (NegMerge). In float32.
    """
    assert tile.base is not None
    work = wide(tile.base.dtype)
    deltas = [model.to(work).sub(tile.base) for model in tile.models]
    signs = add_up(delta.sign() for delta in deltas)
    mean = add_up(deltas).div_(len(deltas))
    return mean.mul_(signs.abs() == len(deltas)).mul_(-values.merge["lambda"]).add_(tile.base)


def add_vectors(tile: Tile, coefficients: list[float]) -> torch.Tensor:
    """theta_0 + sum_t c_t (theta_t - theta_0), in float32."""
    assert tile.base is not None
    work = wide(tile.base.dtype)
    base = tile.base.to(work)
    merged = base.clone()
    for model, coefficient in zip(tile.models, coefficients, strict=True):
        merged.add_(model.to(work) - base, alpha=coefficient)
    return merged
