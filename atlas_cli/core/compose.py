"""base + sum of coefficient * vector, differentiable, in one pass over the vectors each way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from atlas_cli.core.blocks import Layout, Placement, Scattered, Segments, indices
from atlas_cli.core.storage import Block, Dense, Factors, Quantised

Tensors = Mapping[str, torch.Tensor]
_TILE = 1 << 16  # elements of one vector handled at a time: n float32 tiles stay in the cache


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


Stack = DenseStack | QuantisedStack | FactorStack


def stack_blocks(blocks: Mapping[int, Block]) -> tuple[Stack, ...]:
    """The blocks of one name in several vectors, those of one storage together.

    Keys are the rows of the coefficient table. A vector without the block is simply absent.
    """
    kinds: dict[Any, dict[int, Block]] = {}
    for vector, block in blocks.items():
        kinds.setdefault(_kind(block), {})[vector] = block
    return tuple(stack for alike in kinds.values() for stack in _stack_alike(alike))


def _kind(block: Block) -> Any:
    match block:
        case Dense(values):
            return values.dtype
        case Quantised():
            return Quantised
        case Factors(_, parts):
            return tuple((part.start, len(part.up)) for part in parts)


def _stack_alike(blocks: Mapping[int, Block]) -> Iterator[Stack]:
    members, found = tuple(blocks), list(blocks.values())
    first = found[0]
    if isinstance(first, Dense):
        dense = [block.values.flatten() for block in found if isinstance(block, Dense)]
        yield DenseStack(members, torch.stack(dense))
    elif isinstance(first, Quantised):
        eight = [block for block in found if isinstance(block, Quantised)]
        rows = len(first.scales)
        codes = torch.stack([block.values.reshape(rows, -1) for block in eight])
        yield QuantisedStack(members, codes, torch.stack([block.scales for block in eight]))
    else:
        factors = [block for block in found if isinstance(block, Factors)]
        for number, part in enumerate(first.parts):
            ups = [block.parts[number].up for block in factors]
            downs = [block.parts[number].down for block in factors]
            owner = [i for i, up in enumerate(ups) for _ in range(up.shape[1])]
            yield FactorStack(
                members, part.start, torch.cat(ups, 1), torch.cat(downs), torch.tensor(owner)
            )


@dataclass(frozen=True)
class Composition:
    """base + sum over i of coefficients[i, column(e)] * T_i, for every block and element e.

    Vectors stay as they are stored; tensors of the base without a stack are left alone.
    """

    base: Tensors
    stacks: Mapping[str, tuple[Stack, ...]]
    layout: Layout
    vectors: int

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the coefficient table: (vectors, columns)."""
        return self.vectors, len(self.layout.labels)


def compose(composition: Composition, coefficients: torch.Tensor) -> dict[str, torch.Tensor]:
    """The composed tensors by name, differentiable in `coefficients`, (vectors, columns).

    The backward pass reads the vectors once more, T vec(G) per block, and saves none of them.
    """
    composed = _Compose.apply(coefficients, composition)  # type: ignore[no-untyped-call]
    return dict(zip(composition.stacks, composed, strict=True))


class _Compose(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, coefficients: torch.Tensor, composition: Composition
    ) -> tuple[torch.Tensor, ...]:
        ctx.composition = composition
        ctx.like = coefficients
        values = coefficients.detach().float()
        return tuple(compose_block(composition, name, values) for name in composition.stacks)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor, None]:
        table = torch.zeros_like(ctx.like, dtype=torch.float64)
        for name, gradient in zip(ctx.composition.stacks, gradients, strict=True):
            if gradient is not None:
                add_gradient(ctx.composition, name, gradient, table)
        return table.to(ctx.like.dtype), None


def compose_block(composition: Composition, name: str, coefficients: torch.Tensor) -> torch.Tensor:
    """theta0 + lambda^T T of one block, accumulated in float32."""
    base = composition.base[name]
    total = base.detach().to(torch.float32, copy=True).contiguous().flatten()
    placement = composition.layout.placements[name]
    for stack in composition.stacks[name]:
        rows = coefficients[list(stack.members)]
        if isinstance(placement, Scattered):
            _scatter_add(total, stack, placement, rows)
            continue
        for start, stop, column in _segments(placement):
            _add(total, stack, (start, stop), rows[:, column])
    return total.reshape(base.shape)


def add_gradient(
    composition: Composition, name: str, gradient: torch.Tensor, table: torch.Tensor
) -> None:
    """Add T vec(G) of one block to the columns of `table`, (vectors, columns), that scale it."""
    flat = gradient.detach().float().contiguous().flatten()
    placement = composition.layout.placements[name]
    for stack in composition.stacks[name]:
        members = torch.tensor(stack.members, device=table.device)
        if isinstance(placement, Scattered):
            columns = slice(placement.first, placement.first + placement.parts)
            table[members, columns] += _scattered_dot(flat, stack, placement)
            continue
        for start, stop, column in _segments(placement):
            table[members, column] += _dot(flat, stack, (start, stop))


def _segments(placement: Placement) -> Iterator[tuple[int, int, int]]:
    assert isinstance(placement, Segments)
    yield from zip(placement.bounds, placement.bounds[1:], placement.columns, strict=False)


# One stack, a contiguous range of elements, one weight per vector ------------------------------

Range = tuple[int, int]


def _add(total: torch.Tensor, stack: Stack, span: Range, weights: torch.Tensor) -> None:
    """total[span] += weights @ T[:, span]."""
    match stack:
        case DenseStack(_, values):
            for start, stop in _tiles(span):
                total[start:stop].addmv_(values[:, start:stop].float().T, weights)
        case QuantisedStack(_, codes, scales):
            for rows, columns, start, stop in _row_tiles(span, codes):
                tile = codes[:, rows, columns].float()
                scaled = weights[:, None] * scales[:, rows]
                total[start:stop] += torch.einsum("krc,kr->rc", tile, scaled).flatten()
        case FactorStack():
            span, width, inner = _factor_rows(stack, span)
            up = stack.up[inner].float() * weights[stack.owner]
            total[slice(*span)].view(-1, width).addmm_(up, stack.down.float())


def _dot(gradient: torch.Tensor, stack: Stack, span: Range) -> torch.Tensor:
    """T[:, span] @ gradient[span], one number per vector, summed over tiles in float64."""
    total = torch.zeros(len(stack.members), dtype=torch.float64, device=gradient.device)
    match stack:
        case DenseStack(_, values):
            for start, stop in _tiles(span):
                total += values[:, start:stop].float() @ gradient[start:stop]
        case QuantisedStack(_, codes, scales):
            for rows, columns, start, stop in _row_tiles(span, codes):
                tile = codes[:, rows, columns].float()
                part = gradient[start:stop].view(tile.shape[1:])
                total += (torch.einsum("krc,rc->kr", tile, part) * scales[:, rows]).sum(1)
        case FactorStack():
            span, width, inner = _factor_rows(stack, span)
            part = gradient[slice(*span)].view(-1, width)
            terms = ((stack.up[inner].float().T @ part) * stack.down.float()).sum(1)
            total.index_add_(0, stack.owner, terms.double())
    return total


def _tiles(span: Range) -> Iterator[Range]:
    """Pieces of a range that a cache holds."""
    start, stop = span
    for first in range(start, stop, _TILE):
        yield first, min(first + _TILE, stop)


def _row_tiles(span: Range, codes: torch.Tensor) -> Iterator[tuple[slice, slice, int, int]]:
    """Rows, columns and element range of the pieces of a range of an 8-bit stack."""
    start, stop = span
    _, rows, columns = codes.shape
    if rows == 1:
        for first, last in _tiles(span):
            yield slice(0, 1), slice(first, last), first, last
        return
    step = max(1, _TILE // columns)
    for first in range(start // columns, stop // columns, step):
        last = min(first + step, stop // columns)
        yield slice(first, last), slice(None), first * columns, last * columns


def _factor_rows(stack: FactorStack, span: Range) -> tuple[Range, int, slice]:
    """What a range and the stack share: elements, columns of the block, rows of `up`."""
    width = stack.down.shape[1]
    first = max(span[0] // width, stack.start)
    last = max(first, min(span[1] // width, stack.start + len(stack.up)))
    inner = slice(first - stack.start, last - stack.start)
    return (first * width, last * width), width, inner


# One stack, a coefficient for each of many scattered subsets -----------------------------------


def _scatter_add(
    total: torch.Tensor, stack: Stack, placement: Scattered, coefficients: torch.Tensor
) -> None:
    """total += sum over i of coefficients[i, part(e)] * T_i, tile by tile."""
    part_of = indices(placement, len(total)).to(total.device)
    own = coefficients[:, placement.first : placement.first + placement.parts]
    for start, stop, tile in _dense_tiles(stack, len(total)):
        total[start:stop] += (own[:, part_of[start:stop].long()] * tile).sum(0)


def _scattered_dot(gradient: torch.Tensor, stack: Stack, placement: Scattered) -> torch.Tensor:
    """Per vector and part, the sum of T_i * gradient over the elements of the part."""
    part_of = indices(placement, len(gradient)).to(gradient.device)
    shape = len(stack.members), placement.parts
    total = torch.zeros(shape, dtype=torch.float64, device=gradient.device)
    for start, stop, tile in _dense_tiles(stack, len(gradient)):
        products = (tile * gradient[start:stop]).double()
        total.index_add_(1, part_of[start:stop].long(), products)
    return total


def _dense_tiles(stack: Stack, size: int) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Ranges of elements and the float32 values of every vector in them, (k, tile)."""
    match stack:
        case DenseStack(_, values):
            for start, stop in _tiles((0, size)):
                yield start, stop, values[:, start:stop].float()
        case QuantisedStack(_, codes, scales):
            for rows, columns, start, stop in _row_tiles((0, size), codes):
                tile = codes[:, rows, columns].float() * scales[:, rows, None]
                yield start, stop, tile.flatten(1)
        case FactorStack(members, first, up, down, owner):
            width = down.shape[1]
            step = max(1, _TILE // width)
            terms = [owner == i for i in range(len(members))]
            for row in range(0, len(up), step):
                some = up[row : row + step].float()
                values = torch.stack([(some[:, t] @ down[t].float()).flatten() for t in terms])
                start = (first + row) * width
                yield start, start + values.shape[1], values
