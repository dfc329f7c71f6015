"""The vectors of one block as they are stored, together: sums and dot products in tiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from atlas_cli.core import packed
from atlas_cli.core.packed import PackedStack, SharedStack
from atlas_cli.core.storage import Dense, Quantised, widest
from atlas_cli.native import kernels

_SUMMED = 1 << 15  # elements whose products are summed in float32: more would cost digits
_TILE = {"cpu": 1 << 20, "cuda": 1 << 27}  # elements, of all vectors together, expanded at a time


@dataclass(frozen=True)
class DenseStack:
    """T with one row per vector, (k, d), in the dtype of storage."""

    members: tuple[int, ...]
    values: torch.Tensor


@dataclass(frozen=True)
class QuantisedStack:
    """Codes (k, rows, columns) and scales (k, rows): T = scales * codes."""

    members: tuple[int, ...]
    codes: torch.Tensor
    scales: torch.Tensor


@dataclass(frozen=True)
class FactorStack:
    """T_i = up[:, owner = i] @ down[owner = i] in `rows`; `owner` tells the vector of a term."""

    members: tuple[int, ...]
    start: int
    up: torch.Tensor
    down: torch.Tensor
    owner: torch.Tensor


@dataclass(frozen=True)
class MappedStack:
    """Blocks that stay where they are, such as in a mapped file; one for each vector."""

    members: tuple[int, ...]
    blocks: tuple[Dense | Quantised, ...]


Stack = DenseStack | QuantisedStack | FactorStack | MappedStack | PackedStack | SharedStack


# One stack, a contiguous range of elements, one weight per vector ------------------------------

Range = tuple[int, int]


def add(
    total: torch.Tensor, stack: Stack, span: Range, weights: torch.Tensor, onto: torch.Tensor
) -> None:
    """total[span] = onto[span] + weights @ T[:, span]; factors find `onto` in `total` already."""
    if isinstance(stack, FactorStack):
        span, width, inner = _factor_rows(stack, span)
        up = stack.up[inner].float() * weights[stack.owner]
        total[slice(*span)].view(-1, width).addmm_(up, stack.down.float())
        return
    if isinstance(stack, SharedStack):
        packed.add(total, stack.once, span, weights.sum()[None], onto)
        return
    if isinstance(stack, PackedStack):
        packed.add(total, stack, span, weights, onto)
        return
    if total.is_cpu and (stored := _as_stored(stack, span)):
        source, place = onto[slice(*span)].float().contiguous(), total[slice(*span)]
        for some in stored:
            own = weights if len(stored) == 1 else weights[some.places]
            table = own[None] if some.scales is None else some.scales * own
            kernels.add_vectors(some.vectors, table, source, place)
            source = place
        return
    for start, stop, tile in _tiles(stack, span):
        there = tile.to(total.device)
        torch.addmv(onto[start:stop].float(), there.T, weights, out=total[start:stop])


def dot(gradient: torch.Tensor, stack: Stack, span: Range) -> torch.Tensor:
    """T[:, span] @ gradient[span], one number per vector, summed over tiles in float64."""
    total = torch.zeros(len(stack.members), dtype=widest(gradient), device=gradient.device)
    if isinstance(stack, FactorStack):
        span, width, inner = _factor_rows(stack, span)
        part = gradient[slice(*span)].view(-1, width)
        terms = ((stack.up[inner].float().T @ part) * stack.down.float()).sum(1)
        return total.index_add_(0, stack.owner, terms.to(total.dtype))
    if isinstance(stack, SharedStack):
        return packed.dot(gradient, stack.once, span).expand(len(total))
    if isinstance(stack, PackedStack):
        return packed.dot(gradient, stack, span)
    if gradient.is_cpu and (stored := _as_stored(stack, span)):
        for some in stored:
            total[some.places] = kernels.dot_vectors(
                some.vectors, some.scales, gradient[slice(*span)]
            )
        return total
    found = []
    for start, stop, tile in _tiles(stack, span):
        pieces = tile.to(gradient.device).split(_SUMMED, dim=1)
        parts = gradient[start:stop].split(_SUMMED)
        found += [piece @ part for piece, part in zip(pieces, parts, strict=True)]
    return torch.stack(found).sum(0, dtype=total.dtype) if found else total


@dataclass(frozen=True)
class _StoredStack:
    """A range of some vectors of a stack, flat and as they are kept: T = scales * vectors.

    `places` tells which rows of T they are; scales are (rows of the range, vectors).
    """

    places: list[int]
    vectors: Sequence[torch.Tensor]
    scales: torch.Tensor | None = None


def _as_stored(stack: DenseStack | QuantisedStack | MappedStack, span: Range) -> list[_StoredStack]:
    """A range of a stack, those of one storage together; empty if it has to be expanded first."""
    if span[0] == span[1]:
        return []
    match stack:
        case DenseStack(members, values):
            every = list(range(len(members)))
            found = [_StoredStack(every, values[:, slice(*span)].unbind())]
        case QuantisedStack(members, codes, scales):
            found = [_quantised(list(range(len(members))), list(codes), list(scales), span)]
        case MappedStack(_, blocks):
            found = list(_kinds_of(blocks, span))
    return found if all(kernels.ready(some.vectors) for some in found) else []


def _kinds_of(blocks: Sequence[Dense | Quantised], span: Range) -> Iterator[_StoredStack]:
    kinds: dict[Any, list[int]] = {}
    for place, block in enumerate(blocks):
        kinds.setdefault((type(block), block.values.dtype), []).append(place)
    for places in kinds.values():
        eight = [b for place in places if isinstance(b := blocks[place], Quantised)]
        if eight:
            codes = [block.values.reshape(len(block.scales), -1) for block in eight]
            yield _quantised(places, codes, [block.scales for block in eight], span)
        else:
            yield _StoredStack(places, [blocks[p].values.reshape(-1)[slice(*span)] for p in places])


def _quantised(
    places: list[int], codes: Sequence[torch.Tensor], scales: Sequence[torch.Tensor], span: Range
) -> _StoredStack:
    """Codes are (rows, columns), scales (rows); a range has whole rows, or is of a single one."""
    count, columns = codes[0].shape
    rows = slice(span[0] // columns, span[1] // columns) if count > 1 else slice(None)
    vectors = [code.reshape(-1)[slice(*span)] for code in codes]
    return _StoredStack(places, vectors, torch.stack([scale[rows] for scale in scales], dim=1))


def _tiles(
    stack: DenseStack | QuantisedStack | MappedStack, span: Range
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """A range of T in float32: start, stop, (k, stop - start).

    What has to be expanded comes in pieces that a cache holds, each in the place of the last.
    """
    if isinstance(stack, MappedStack):
        for start, stop in _steps(span, _TILE["cpu"] // len(stack.blocks)):
            yield start, stop, torch.stack([_slice(b, start, stop) for b in stack.blocks])
    elif isinstance(stack, QuantisedStack):
        yield from _quantised_tiles(stack, span)
    elif stack.values.dtype == torch.float32:
        yield *span, stack.values[:, slice(*span)]
    else:
        tile = _room(stack.values, span[1] - span[0])
        for start, stop in _steps(span, tile.shape[1]):
            yield start, stop, tile[:, : stop - start].copy_(stack.values[:, start:stop])


def _quantised_tiles(stack: QuantisedStack, span: Range) -> Iterator[tuple[int, int, torch.Tensor]]:
    count, rows, columns = stack.codes.shape
    if rows == 1:  # one scale for all
        for start, stop, tile in _tiles(DenseStack(stack.members, stack.codes[:, 0]), span):
            yield start, stop, tile * stack.scales
        return
    first, last = span[0] // columns, span[1] // columns
    room = _room(stack.codes, (last - first) * columns, columns)
    step = room.shape[1] // columns
    for start, stop in _steps((first, last), step):
        tile = room.view(count, step, columns)[:, : stop - start]
        tile.copy_(stack.codes[:, start:stop]).mul_(stack.scales[:, start:stop, None])
        yield start * columns, stop * columns, tile.flatten(1)


def _steps(span: Range, step: int) -> Iterator[Range]:
    """A range in steps."""
    for start in range(span[0], span[1], step):
        yield start, min(start + step, span[1])


def _room(stored: torch.Tensor, size: int, multiple: int = 1) -> torch.Tensor:
    """A float32 tile for all vectors, (k, at most size), of whole rows of `multiple` elements."""
    step = _TILE.get(stored.device.type, 1 << 23) // len(stored)
    step = max(multiple, min(step, size) // multiple * multiple)
    return torch.empty(len(stored), step, dtype=torch.float32, device=stored.device)


def _slice(block: Dense | Quantised, start: int, stop: int) -> torch.Tensor:
    """Some elements of a block in float32."""
    if isinstance(block, Dense):
        return block.values.reshape(-1)[start:stop].float()
    codes = block.values.reshape(len(block.scales), -1)
    columns = codes.shape[1]
    rows = slice(start // columns, -(-stop // columns))
    values = codes[rows].float() * block.scales[rows, None]
    return values.flatten()[start - rows.start * columns : stop - rows.start * columns]


def _factor_rows(stack: FactorStack, span: Range) -> tuple[Range, int, slice]:
    """What a range and the stack share: elements, columns of the block, rows of `up`."""
    width = stack.down.shape[1]
    first = max(span[0] // width, stack.start)
    last = max(first, min(span[1] // width, stack.start + len(stack.up)))
    inner = slice(first - stack.start, last - stack.start)
    return (first * width, last * width), width, inner


# One stack, a coefficient for each of many scattered subsets -----------------------------------


def scatter_add(
    total: torch.Tensor, stack: Stack, coefficients: torch.Tensor, part_of: torch.Tensor
) -> None:
    """total += sum over i of coefficients[i, part_of[e]] * T_i, tile by tile."""
    if isinstance(stack, SharedStack):
        stack, coefficients = stack.once, coefficients.sum(0, keepdim=True)
    parts = part_of.to(total.device)
    for start, stop, tile in _dense_tiles(stack, len(total)):
        there = tile.to(total.device)
        total[start:stop] += (coefficients[:, parts[start:stop].long()] * there).sum(0)


def scattered_dot(
    gradient: torch.Tensor, stack: Stack, count: int, part_of: torch.Tensor
) -> torch.Tensor:
    """Per vector and part, `count` in all, the sum of T_i * gradient over elements of the part."""
    if isinstance(stack, SharedStack):
        found = scattered_dot(gradient, stack.once, count, part_of)
        return found.expand(len(stack.members), count)
    parts = part_of.to(gradient.device)
    shape = len(stack.members), count
    total = torch.zeros(shape, dtype=widest(gradient), device=gradient.device)
    for start, stop, tile in _dense_tiles(stack, len(gradient)):
        products = (tile.to(total.device) * gradient[start:stop]).to(total.dtype)
        total.index_add_(1, parts[start:stop].long(), products)
    return total


def _dense_tiles(
    stack: DenseStack | QuantisedStack | FactorStack | MappedStack | PackedStack, size: int
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Ranges of elements and the float32 values of every vector in them, (k, tile)."""
    if isinstance(stack, PackedStack):
        yield from packed.tiles(stack, (0, size))
        return
    if not isinstance(stack, FactorStack):
        yield from _tiles(stack, (0, size))
        return
    width = stack.down.shape[1]
    step = max(1, _TILE.get(stack.up.device.type, 1 << 23) // len(stack.members) // width)
    terms = [stack.owner == i for i in range(len(stack.members))]
    for row in range(0, len(stack.up), step):
        some = stack.up[row : row + step].float()
        values = torch.stack([(some[:, t] @ stack.down[t].float()).flatten() for t in terms])
        start = (stack.start + row) * width
        yield start, start + values.shape[1], values
