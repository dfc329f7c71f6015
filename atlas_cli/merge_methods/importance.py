"""Elements weighed by how important they are: against a threshold, or in competition of models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atlas_cli.merge_methods.method import Parameter, Values, merge_method, one_of
from atlas_cli.merge_methods.order_statistics import values_at
from atlas_cli.merge_methods.tiling import Tile, Tiles, all_pieces, wide
from atlas_cli.registry import late

if TYPE_CHECKING:
    import torch

    Passes = Callable[[], Iterator[tuple[int, Callable[[int], torch.Tensor]]]]
else:
    torch = late("torch")

# arcee_fusion ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Threshold:
    """The importance from which an element is taken; a vector has one divergence for all of it."""

    least: torch.Tensor
    divergence: torch.Tensor | None


def divergence(model: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """KL(softmax(model) | softmax(base)) along the last dimension, in the dtype of the tensors."""
    p, q = (values.softmax(-1) + 1e-8 for values in (model, base))
    return (p * (p / q).log()).sum(-1, keepdim=True)


def importance(tile: Tile, known: torch.Tensor | None) -> torch.Tensor:
    """|theta_1 - theta_0| times the divergence of its row."""
    assert tile.base is not None
    found = divergence(tile.models[0], tile.base) if known is None else known
    return (tile.models[0] - tile.base).abs() * found


def find_threshold(tiles: Tiles, values: Values) -> Threshold:
    """median + 1.5 (third quartile - first quartile) of the importance of the whole tensor.

    A vector is put together for its divergence, as it may be cut anywhere.
    """
    first = next(tiles())
    size, known = math.prod(first.shape), None
    if len(first.shape) < 2:
        pairs = [(piece.base, piece.models[0]) for piece in all_pieces(tiles)]
        base, model = (
            torch.cat([one.reshape(-1) for one in x if one is not None])
            for x in zip(*pairs, strict=True)
        )
        known = divergence(model, base)[0]

    def passes() -> Iterator[tuple[int, Callable[[int], torch.Tensor]]]:
        for piece in all_pieces(tiles):
            found = importance(piece, known)
            yield piece.start, lambda _, found=found: found  # type: ignore[misc]

    quartiles = [int(share * (size - 1)) for share in (0.25, 0.5, 0.75)]
    low, median, high = values_at(passes, [quartiles])[0]
    return Threshold((median + 1.5 * (high - low)).to(first.device), known)


@merge_method("arcee_fusion", models=(1, 1), statistics=find_threshold)
def arcee_fusion(tile: Tile, values: Values, found: Threshold) -> torch.Tensor:
    """theta_0 + tau * [i >= median(i) + 1.5 IQR(i)], i = |tau| KL(row of theta_1 | row of theta_0).

    The divergence is that of softmaxes along the last dimension. Quartiles are those of the whole
    tensor; mergekit draws a million elements of a larger one.
    """
    assert tile.base is not None
    taken = importance(tile, found.divergence) >= found.least
    return tile.base + (tile.models[0] - tile.base) * taken


# pcb ------------------------------------------------------------------------------------------

_CLIPPED = 1e-4  # the share of the smallest and of the largest elements that is clipped


@dataclass(frozen=True)
class Competition:
    """For every model, the range of |tau| and the range of its score."""

    sizes: list[tuple[float, float]]
    scores: list[tuple[float, float]]


def _vectors(tile: Tile) -> list[torch.Tensor]:
    """tau_t of every model, in float32."""
    assert tile.base is not None
    base = tile.base.to(wide(tile.base.dtype))
    return [model.to(base.dtype) - base for model in tile.models]


def _share(values: torch.Tensor, limits: tuple[float, float]) -> torch.Tensor:
    """Where values are between two limits, from 0 to 1; 0 if there is nothing between them."""
    low, high = limits
    return (values.clamp(low, high) - low) / ((high - low) or 1.0)


def _scores(vectors: list[torch.Tensor], sizes: list[tuple[float, float]]) -> list[torch.Tensor]:
    """exp(T |tau_t|^2, scaled to 0..1) tanh(tau_t sum_s tau_s)"""
    whole = torch.stack(vectors).sum(0)
    return [
        (len(vectors) * _share(vector.abs(), limits).square()).exp() * (vector * whole).tanh()
        for vector, limits in zip(vectors, sizes, strict=True)
    ]


def find_ranges(tiles: Tiles, values: Values) -> Competition:
    """Ranges of magnitudes without their ends, then of the `density` highest scores."""
    size, count = math.prod(next(tiles()).shape), len(values.models)

    def ranges(
        series: Callable[[Tile], list[torch.Tensor]], ranks: list[int]
    ) -> list[tuple[float, float]]:
        def passes() -> Iterator[tuple[int, Callable[[int], torch.Tensor]]]:
            for piece in all_pieces(tiles):
                found = series(piece)
                yield piece.start, lambda number, found=found: found[number]  # type: ignore[misc]

        return [(float(low), float(high)) for low, high in values_at(passes, [ranks] * count)]

    ends = [int(size * _CLIPPED), max(0, int(size * (1 - _CLIPPED) - 1))]
    sizes = ranges(lambda tile: [vector.abs() for vector in _vectors(tile)], ends)
    first = min(size - 1, int(size * (1 - values.merge["density"])))
    scores = ranges(lambda tile: _scores(_vectors(tile), sizes), [first, size - 1])
    return Competition(sizes, scores)


@merge_method(
    "pcb",
    per_merge={
        "lambda": Parameter(1.0, usual=1.2),
        "density": Parameter(0.1, 0.0, 1.0),
        "scope": one_of("tensor", "model"),
    },
    statistics=find_ranges,
)
def pcb(tile: Tile, values: Values, found: Competition) -> torch.Tensor:
    """theta_0 + lambda * sum_t b_t tau_t / sum_t b_t, b_t from how tau_t competes with the others.

    The score of an element is exp(T |tau_t|^2) tanh(tau_t sum_s tau_s), with |tau_t| scaled to
    0..1 after its ends are clipped; b_t is the score scaled to 0..1 over the `density` highest
    ones, and 0 for all others (PCB-Merging). In float32.
    """
    assert tile.base is not None
    vectors = _vectors(tile)
    scores = _scores(vectors, found.sizes)
    shares = [_share(score, limits) for score, limits in zip(scores, found.scores, strict=True)]
    clipped = [
        vector.sign() * vector.abs().clamp(*limits)
        for vector, limits in zip(vectors, found.sizes, strict=True)
    ]
    merged = torch.stack([s * v for s, v in zip(shares, clipped, strict=True)]).sum(0)
    merged /= torch.stack(shares).sum(0).clamp_(min=1e-12)
    return merged.mul_(values.merge["lambda"]).add_(tile.base)
