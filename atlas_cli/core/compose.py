"""base + sum of coefficient * vector, differentiable, in one pass over the vectors each way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from atlas_cli.core.granularity import Layout, Placement, Scattered, Segments
from atlas_cli.core.stacks import (
    DenseStack,
    FactorStack,
    MappedStack,
    QuantisedStack,
    Stack,
    add,
    dot,
    scatter_add,
    scattered_dot,
)
from atlas_cli.core.storage import Block, Dense, Factors, Quantised, widest

Tensors = Mapping[str, torch.Tensor]
# Applies a function to every item, in order; a caller with workers to spare spreads the blocks.
Spread = Callable[[Callable[[str], Any], Iterable[str]], Iterable[Any]]


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


def compose(
    composition: Composition, coefficients: torch.Tensor, spread: Spread = map
) -> dict[str, torch.Tensor]:
    """The composed tensors by name, differentiable in `coefficients`, (vectors, columns).

    The backward pass reads the vectors once more, T vec(G) per block, and saves none of them.
    """
    composed = _Compose.apply(coefficients, composition, spread)  # type: ignore[no-untyped-call]
    return dict(zip(composition.stacks, composed, strict=True))


class _Compose(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, coefficients: torch.Tensor, composition: Composition, spread: Spread
    ) -> tuple[torch.Tensor, ...]:
        ctx.composition, ctx.spread, ctx.like = composition, spread, coefficients
        values = coefficients.detach().float()
        blocks = spread(lambda name: compose_block(composition, name, values), composition.stacks)
        return tuple(blocks)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor, None, None]:
        given = dict(zip(ctx.composition.stacks, gradients, strict=True))
        found = {name: gradient for name, gradient in given.items() if gradient is not None}
        table = coefficient_gradient(ctx.composition, found, ctx.spread)
        return table.to(ctx.like.dtype), None, None


def coefficient_gradient(
    composition: Composition, gradients: Tensors, spread: Spread = map
) -> torch.Tensor:
    """T vec(G) of every block, summed over the blocks that share a coefficient, in float64."""
    first = next(iter(composition.base.values()))
    total = torch.zeros(composition.shape, dtype=widest(first), device=first.device)
    parts = spread(lambda name: list(_dots(composition, name, gradients[name])), gradients)
    for part in parts:
        for members, columns, values in part:
            total[members, columns] += values
    return total


def compose_block(
    composition: Composition,
    name: str,
    coefficients: torch.Tensor,
    into: torch.Tensor | None = None,
) -> torch.Tensor:
    """theta0 + lambda^T T of one block, accumulated in float32; in `into`, if it is given."""
    base = composition.base[name].detach()
    result = into
    if result is None:
        result = torch.empty(base.shape, dtype=torch.float32, device=base.device)
    total = result.view(-1)
    start_from = base.reshape(-1)  # what the next stack adds to: the base, then the sum so far
    placement = composition.layout.placements[name]
    for stack in composition.stacks[name]:
        everyone = stack.members == tuple(range(composition.vectors))
        rows = coefficients if everyone else coefficients[list(stack.members)]
        if isinstance(stack, FactorStack) or isinstance(placement, Scattered):
            total.copy_(start_from)
        if isinstance(placement, Scattered):
            scatter_add(total, stack, placement, rows)
        else:
            for start, stop, column in _segments(placement):
                add(total, stack, (start, stop), rows[:, column].contiguous(), start_from)
        start_from = total
    return result


def _dots(
    composition: Composition, name: str, gradient: torch.Tensor
) -> Iterator[tuple[torch.Tensor, Any, torch.Tensor]]:
    """T vec(G) of one block: rows and columns of the table, and what is to be added there."""
    flat = gradient.detach().float().contiguous().flatten()
    placement = composition.layout.placements[name]
    for stack in composition.stacks[name]:
        members = torch.tensor(stack.members, device=flat.device)
        if isinstance(placement, Scattered):
            columns = slice(placement.first, placement.first + placement.parts)
            yield members, columns, scattered_dot(flat, stack, placement)
            continue
        for start, stop, column in _segments(placement):
            yield members, column, dot(flat, stack, (start, stop))


def _segments(placement: Placement) -> Iterator[tuple[int, int, int]]:
    assert isinstance(placement, Segments)
    yield from zip(placement.bounds, placement.bounds[1:], placement.columns, strict=False)


# Stacking -------------------------------------------------------------------------------------


def map_blocks(blocks: Mapping[int, Block]) -> tuple[Stack, ...]:
    """As stack_blocks, but dense and 8-bit blocks are read anew from where they are each time."""
    apart = {i: block for i, block in blocks.items() if not isinstance(block, Factors)}
    kept = tuple(block for block in apart.values() if not isinstance(block, Factors))
    rest = stack_blocks({i: block for i, block in blocks.items() if i not in apart})
    return (MappedStack(tuple(apart), kept), *rest) if apart else rest


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
            owners = torch.tensor(owner, device=part.up.device)
            yield FactorStack(members, part.start, torch.cat(ups, 1), torch.cat(downs), owners)
