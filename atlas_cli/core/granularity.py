"""Which coefficient scales which elements: the granularities of a composition."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atlas_cli.core.patterns import find_pattern
from atlas_cli.errors import MismatchError, UsageError
from atlas_cli.registry import find_granularity, granularity, granularity_labels, late

if TYPE_CHECKING:
    import torch
else:
    torch = late("torch")

Shapes = Mapping[str, tuple[int, ...]]
_FUSED = re.compile(r"\.attn\.in_proj_(weight|bias)$")


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


def indices(placement: Scattered, size: int) -> torch.Tensor:
    """The part of every element, as small integers: one tensor per block instead of masks."""
    generator = torch.Generator().manual_seed(placement.seed)
    drawn = torch.randint(placement.parts, (size,), generator=generator)
    return drawn.to(torch.int16 if placement.parts <= 2**15 else torch.int32)
