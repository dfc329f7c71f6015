"""base + sum of coefficient * vector, in one pass over the vectors each way.

A granularity says which coefficient scales which elements: it lays the blocks out over the columns
of the coefficient table. Recipes name granularities, so nothing here imports torch at once.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from atlas_cli.core.patterns import find_pattern
from atlas_cli.errors import MismatchError, UsageError
from atlas_cli.registry import find_granularity, granularity, granularity_labels, late

if TYPE_CHECKING:
    import torch

    from atlas_cli.core import packed, stacks, storage
    from atlas_cli.core.stacks import Stack
    from atlas_cli.core.storage import Block
else:
    torch = late("torch")
    stacks, storage = late("atlas_cli.core.stacks"), late("atlas_cli.core.storage")
    packed = late("atlas_cli.core.packed")

Tensors = Mapping[str, "torch.Tensor"]
# Applies a function to every item, in order; a caller with workers to spare spreads the blocks.
Spread = Callable[[Callable[[str], Any], Iterable[str]], Iterable[Any]]
Shapes = Mapping[str, tuple[int, ...]]
_FUSED = re.compile(r"\.attn\.in_proj_(weight|bias)$")


# Granularities --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Segments:
    """Contiguous elements share a coefficient: elements bounds[k] to bounds[k+1] use columns[k]."""

    bounds: tuple[int, ...]
    columns: tuple[int, ...]


@dataclass(frozen=True)
class Scattered:
    """Element e uses column first + k(e), where k is drawn uniformly from `parts` by the seed."""

    first: int
    parts: int
    seed: int


Placement = Segments | Scattered


@dataclass(frozen=True)
class Layout:
    """The columns of the coefficient table, and where each block finds its own."""

    labels: tuple[str, ...]
    placements: Mapping[str, Placement]


def choose_layout(shapes: Shapes, name: str, groups: Sequence[str] = (), seed: int = 0) -> Layout:
    """The layout of a granularity by its name, such as block or partition:3; or that of groups."""
    if groups:
        return by_pattern(shapes, groups)
    found = find_granularity(name)
    if found is None:
        raise UsageError(f"granularity: expected {granularity_labels()}, found {name!r}")
    parameter = (name.partition(":")[2], seed) if found.parameter else ()
    layout = found.layout(shapes, *parameter)
    if missing := [block for block in shapes if block not in layout.placements]:
        raise MismatchError(f"granularity {name}: no coefficient for {missing[0]}")
    return layout


@granularity("block")
def by_block(shapes: Shapes) -> Layout:
    """One coefficient per vector and block: the paper's choice."""
    return by_group(shapes, {name: name for name in shapes})


@granularity("vector")
def by_vector(shapes: Shapes) -> Layout:
    """One coefficient per vector, for all of its blocks."""
    return by_group(shapes, dict.fromkeys(shapes, "all"))


def by_group(shapes: Shapes, group_of: Mapping[str, str]) -> Layout:
    """One coefficient per vector and group of blocks."""
    labels = tuple(dict.fromkeys(group_of[name] for name in shapes))
    column = {label: number for number, label in enumerate(labels)}
    placements = {
        name: Segments((0, math.prod(shape)), (column[group_of[name]],))
        for name, shape in shapes.items()
    }
    return Layout(labels, placements)


def by_pattern(shapes: Shapes, patterns: Sequence[str]) -> Layout:
    """Blocks are grouped by the first regular expression that is found in their names.

    A pattern with groups makes one group of blocks for every text that its groups match. A block
    that no pattern matches has a group of its own.
    """
    group_of = {}
    for name in shapes:
        matches = ((pattern, find_pattern(pattern, name)) for pattern in patterns)
        pattern, found = next(((p, m) for p, m in matches if m), ("", None))
        group_of[name] = name if found is None else " ".join([pattern, *map(str, found.groups())])
    return by_group(shapes, group_of)


@granularity("qkv")
def by_qkv(shapes: Shapes) -> Layout:
    """As by_block, with three coefficients for the stacked query, key and value projections."""
    labels: list[str] = []
    placements: dict[str, Placement] = {}
    for name, shape in shapes.items():
        size = math.prod(shape)
        names = [f"{name}[{part}]" for part in "qkv"] if _FUSED.search(name) else [name]
        bounds = tuple(size * part // len(names) for part in range(len(names) + 1))
        columns = tuple(range(len(labels), len(labels) + len(names)))
        placements[name] = Segments(bounds, columns)
        labels += names
    return Layout(tuple(labels), placements)


@granularity("partition", parameter="K")
def _by_named_partition(shapes: Shapes, parts: str, seed: int) -> Layout:
    return by_partition(shapes, int(parts), seed)


def by_partition(shapes: Shapes, parts: int, seed: int) -> Layout:
    """Every block is split into `parts` random subsets of its elements, a coefficient for each.

    Each block has a seed of its own, so that blocks of one shape are not split alike.
    """
    if parts < 1:
        raise UsageError(f"a partition needs at least one part, not {parts}")
    placements = {
        name: Scattered(number * parts, parts, _seed_of(name, seed))
        for number, name in enumerate(shapes)
    }
    labels = tuple(f"{name}[{part}]" for name in shapes for part in range(parts))
    return Layout(labels, placements)


def _seed_of(name: str, seed: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:7], "big")


# Sums -----------------------------------------------------------------------------------------


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


def coefficient_gradient(
    composition: Composition, gradients: Tensors, spread: Spread = map
) -> torch.Tensor:
    """T vec(G) of every block, summed over the blocks that share a coefficient, in float64."""
    first = next(iter(composition.base.values()))
    total = torch.zeros(composition.shape, dtype=storage.widest(first), device=first.device)
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
    found = composition.stacks[name]
    if not found:  # no vector has the block, or another process holds those that do
        total.copy_(start_from)
    for stack in found:
        everyone = stack.members == tuple(range(composition.vectors))
        rows = coefficients if everyone else coefficients[list(stack.members)]
        if isinstance(stack, stacks.FactorStack) or isinstance(placement, Scattered):
            total.copy_(start_from)
        if isinstance(placement, Scattered):
            own = rows[:, placement.first : placement.first + placement.parts]
            stacks.scatter_add(total, stack, own, indices(placement, len(total)))
        else:
            for start, stop, column in _segments(placement):
                stacks.add(total, stack, (start, stop), rows[:, column].contiguous(), start_from)
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
            part_of = indices(placement, len(flat))
            yield members, columns, stacks.scattered_dot(flat, stack, placement.parts, part_of)
            continue
        for start, stop, column in _segments(placement):
            yield members, column, stacks.dot(flat, stack, (start, stop))


def _segments(placement: Placement) -> Iterator[tuple[int, int, int]]:
    assert isinstance(placement, Segments)
    yield from zip(placement.bounds, placement.bounds[1:], placement.columns, strict=False)


def indices(placement: Scattered, size: int) -> torch.Tensor:
    """The part of every element, as small integers: one tensor per block instead of masks."""
    generator = torch.Generator().manual_seed(placement.seed)
    drawn = torch.randint(placement.parts, (size,), generator=generator)
    return drawn.to(torch.int16 if placement.parts <= 2**15 else torch.int32)


# Stacking -------------------------------------------------------------------------------------


def map_blocks(blocks: Mapping[int, Block]) -> tuple[Stack, ...]:
    """As stack_blocks, but dense and 8-bit blocks are read anew from where they are each time."""
    plain = storage.Dense, storage.Quantised
    apart = {i: block for i, block in blocks.items() if isinstance(block, plain)}
    kept = tuple(block for block in apart.values() if isinstance(block, plain))
    rest = stack_blocks({i: block for i, block in blocks.items() if i not in apart})
    return (stacks.MappedStack(tuple(apart), kept), *rest) if apart else rest


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
        case storage.Dense(values):
            return values.dtype
        case storage.Quantised():
            return storage.Quantised
        case storage.Factors(_, parts):
            return tuple((part.start, len(part.up)) for part in parts)
        case packed.Packed():
            return packed.Packed
        case packed.Residual(_, _, key):
            return packed.Residual, key


def _stack_alike(blocks: Mapping[int, Block]) -> Iterator[Stack]:
    members, found = tuple(blocks), list(blocks.values())
    first = found[0]
    if isinstance(first, storage.Dense):
        dense = [block.values.flatten() for block in found if isinstance(block, storage.Dense)]
        yield stacks.DenseStack(members, torch.stack(dense))
    elif isinstance(first, storage.Quantised):
        eight = [block for block in found if isinstance(block, storage.Quantised)]
        rows = len(first.scales)
        codes = torch.stack([block.values.reshape(rows, -1) for block in eight])
        yield stacks.QuantisedStack(members, codes, torch.stack([block.scales for block in eight]))
    elif isinstance(first, packed.Packed):
        yield packed.PackedStack(members, tuple(found))  # type: ignore[arg-type]
    elif isinstance(first, packed.Residual):
        own = tuple(block.own for block in found if isinstance(block, packed.Residual))
        yield from (packed.PackedStack(members, own), packed.SharedStack(members, first.shared))
    else:
        factors = [block for block in found if isinstance(block, storage.Factors)]
        for number, part in enumerate(first.parts):
            ups = [block.parts[number].up for block in factors]
            downs = [block.parts[number].down for block in factors]
            owner = [i for i, up in enumerate(ups) for _ in range(up.shape[1])]
            up, down = torch.cat(ups, 1), torch.cat(downs)
            owners = torch.tensor(owner, device=part.up.device)
            yield stacks.FactorStack(members, part.start, up, down, owners)
