"""Tiles of tensors, pieces of tiles, and sums that do not depend on how a tensor was cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, wraps
from itertools import combinations_with_replacement
from typing import TYPE_CHECKING, Any

from atlas_cli.errors import MismatchError
from atlas_cli.native.operands import Operands, Sum, in_memory
from atlas_cli.registry import late

if TYPE_CHECKING:
    import torch

    from atlas_cli.merge_methods.method import Formula, Values
    from atlas_cli.native import kernels
else:
    torch, kernels = late("torch"), late("atlas_cli.native.kernels")

PIECE = 1 << 19  # elements: enough that threads do not wait for each other's Python


@dataclass(frozen=True)
class Tile:
    """The same elements of one tensor in the base and in every model.

    `start` is the flat position of the first element; `shape` is the whole tensor's. Tiles of
    tensors with two or more dimensions hold whole rows (the first dimension), as many as fit; the
    values have the shape (rows, *shape[1:]). A vector is cut anywhere. `inputs` has the base, if
    there is one, before the models; inputs in files are read when they are first used.
    """

    name: str
    start: int
    shape: tuple[int, ...]
    inputs: Operands
    has_base: bool

    @property
    def base(self) -> torch.Tensor | None:
        """The base, in memory."""
        return self.inputs.tensors[0] if self.has_base else None

    @property
    def models(self) -> tuple[torch.Tensor, ...]:
        """The models, in memory."""
        return self.inputs.tensors[self.has_base :]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all values."""
        return self.inputs.dtype

    @property
    def device(self) -> torch.device:
        """Where all values are."""
        return self.inputs.device


Tiles = Callable[[], Iterator[Tile]]  # go over the tensor once more; one tile may be all of it


def tile_of(
    name: str,
    start: int,
    shape: tuple[int, ...],
    base: torch.Tensor | None,
    models: Sequence[torch.Tensor],
) -> Tile:
    """A tile of tensors that are in memory."""
    tensors = tuple(models) if base is None else (base, *models)
    return Tile(name, start, shape, in_memory(tensors), base is not None)


# Pieces ---------------------------------------------------------------------------------------


def pieces(tile: Tile) -> Iterator[Tile]:
    """The rows of a tile (the elements, if it is a vector), PIECE elements at a time."""
    inputs = tile.inputs
    if inputs.size <= PIECE:
        yield tile
        return
    width = math.prod(inputs.shape[1:])
    step = max(1, PIECE // width)
    for first in range(0, inputs.shape[0], step):
        some = inputs.rows(first, first + step)
        yield replace(tile, start=tile.start + first * width, inputs=some)


def all_pieces(tiles: Tiles) -> Iterator[Tile]:
    """One pass over the tensor, a piece at a time."""
    for tile in tiles():
        yield from pieces(tile)


def check_size(merged: torch.Tensor, tile: Tile) -> torch.Tensor:
    """The merged values. Raises MismatchError unless there is one for each element of the tile."""
    if merged.numel() != tile.inputs.size:
        found, wanted = merged.numel(), tile.inputs.size
        raise MismatchError(f"{tile.name}: the merge method gave {found} values for {wanted}")
    return merged


def by_pieces(formula: Formula) -> Formula:
    """The same formula, applied to one piece of a tile after another.

    Its results, which may be wider, are rounded to the dtype of the tensors.
    """

    @wraps(formula)
    def apply(tile: Tile, values: Values, statistics: Any) -> torch.Tensor:
        if tile.inputs.size <= PIECE:
            return check_size(formula(tile, values, statistics), tile).to(tile.dtype)
        result = torch.empty(tile.inputs.shape, dtype=tile.dtype, device=tile.device)
        flat, done = result.view(-1), 0
        for part in pieces(tile):
            merged = check_size(formula(part, values, statistics), part).reshape(-1)
            flat[done : done + len(merged)] = merged
            done += len(merged)
        return result

    return apply


# Sums -----------------------------------------------------------------------------------------


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums are kept: float64 for float64, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def exact(values: torch.Tensor) -> torch.Tensor:
    """values, in float64; on the CPU if they are on a device that has no float64."""
    return (
        values if values.is_cpu or kernels.has_float64(values.device) else values.cpu()
    ).double()


def total(values: torch.Tensor) -> float:
    """sum of all elements, in float64: rows in float32 first, the elements of a vector one by one.

    Tiles hold whole rows, so that the sum is the same however a tensor was cut, to 1e-15.
    """
    if values.ndim < 2:
        return float(exact(values).sum())
    return float(exact(values.flatten(1).sum(1, dtype=wide(values.dtype))).sum())


def sum_over(tiles: Tiles, terms: Callable[[Tile], Iterable[torch.Tensor]]) -> torch.Tensor:
    """The total of each of several terms over the whole tensor, in float64; one pass."""
    sums = [[total(term) for term in terms(piece)] for piece in all_pieces(tiles)]
    return torch.tensor(
        [math.fsum(parts) for parts in zip(*sums, strict=True)], dtype=torch.float64
    )


def inner_products(tiles: Tiles, *, from_base: bool = False) -> torch.Tensor:
    """<x_s, x_t> of all pairs of inputs over the whole tensor, as a float64 matrix; one pass.

    With `from_base`, x are the differences of the models from the base, in float32.
    """
    sums = [found for tile in tiles() for found in _products_of_pieces(tile, from_first=from_base)]
    totals = [math.fsum(parts) for parts in zip(*sums, strict=True)]
    count = round(math.sqrt(2 * len(totals) + 0.25) - 0.5)
    found = torch.zeros(count, count, dtype=torch.float64)
    for (s, t), total_of in zip(_pairs(count), totals, strict=True):
        found[s, t] = found[t, s] = total_of
    return found


def _products_of_pieces(tile: Tile, *, from_first: bool) -> Iterator[list[float]]:
    """<x_s, x_t> for s <= t, x the inputs or their differences from the first.

    The C loops read files themselves, a little at a time, and need no pieces.
    """
    for piece in [tile] if kernels.reads(tile.inputs) else pieces(tile):
        terms = piece.inputs
        found = kernels.products(terms, from_first=from_first)
        yield _products(terms.tensors, from_first=from_first) if found is None else found


def _products(terms: Sequence[torch.Tensor], *, from_first: bool) -> list[float]:
    work = wide(terms[0].dtype)
    values = [term.to(work) for term in terms]
    if from_first:
        values = [value - values[0] for value in values[1:]]
    return [total(values[s] * values[t]) for s, t in _pairs(len(values))]


def _pairs(count: int) -> list[tuple[int, int]]:
    return list(combinations_with_replacement(range(count), 2))


def square(values: torch.Tensor) -> torch.Tensor:
    """values^2, in float32."""
    return values.to(wide(values.dtype)).square()


def rounded(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A float64 statistic as one call over the whole tensor gives it: float32, then `dtype`."""
    return value.to(wide(dtype)).to(dtype)


def weights_of(values: Values, dtype: torch.dtype) -> tuple[float, ...]:
    """The weight of every model, rounded to a dtype."""
    return _rounded(tuple(own["weight"] for own in values.models), dtype)


@lru_cache(maxsize=64)  # the same for every piece of a tensor
def _rounded(weights: tuple[float, ...], dtype: torch.dtype) -> tuple[float, ...]:
    return tuple(torch.tensor(weights, dtype=dtype).tolist())


@lru_cache(maxsize=64)
def sum_of(weights: tuple[float, ...], dtype: torch.dtype) -> float:
    """sum_t w_t, in a dtype."""
    return float(torch.tensor(weights, dtype=dtype).sum())


def weighted_sum(terms: Operands, total: Sum) -> torch.Tensor:
    """(w_1 x_1 + ... + w_n x_n) / divisor, kept in float32, from left to right, rounded once."""
    if (found := kernels.add(terms, total)) is not None:
        return found
    work = wide(terms.dtype)
    first, *rest = terms.tensors
    result = first.to(work, copy=True).mul_(total.weights[0])
    for term, weight in zip(rest, total.weights[1:], strict=True):
        result.add_(term.to(work), alpha=weight)
    if total.divisor != 1:
        result.div_(total.divisor)
    return result.to(terms.dtype)


def add_up(terms: Iterable[torch.Tensor]) -> torch.Tensor:
    """x_1 + ... + x_n, kept in float32 and rounded once at the end, from left to right."""
    rest = iter(terms)
    first = next(rest)
    work = wide(first.dtype)
    result = first.to(work, copy=True)
    for term in rest:
        result.add_(term.to(work))
    return result.to(first.dtype)
