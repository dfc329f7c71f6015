"""Which blocks of which task vectors are kept within a budget of bytes.

The slope of the loss along tau at the base is <G, tau>, with G the gradient of the block. A step
along tau alone lowers the loss by up to <G, tau>^2 / |tau|^2 times a constant that is the same for
all, so this is what a block is worth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from atlas_cli.core.packed import FEW, packed_bytes
from atlas_cli.core.storage import is_matrix

# The share of |tau|^2 that is left in few bits, of values with a normal distribution.
KEPT = {"int2": 0.88, "int4": 0.99}
STORED = "stored"  # as the vector's file has it
_LEVELS = (*KEPT, STORED)


@dataclass(frozen=True)
class Slopes:
    """What is known of a pool after one pass over it; tensors are (vectors, blocks).

    `slopes` are <G, tau>, `squares` |tau|^2, `bytes` what a block takes as it is stored; they are 0
    where a vector lacks a block. `samples` are values of some elements of every block, the same
    ones of all vectors: angles are estimated from them.
    """

    names: tuple[str, ...]
    shapes: dict[str, tuple[int, ...]]
    slopes: torch.Tensor
    squares: torch.Tensor
    bytes: torch.Tensor
    samples: Sequence[dict[str, torch.Tensor]]

    def cosines(self, block: int) -> torch.Tensor:
        """The angles between the vectors in one block, (vectors, vectors)."""
        name, count = self.names[block], len(self.samples)
        there = [n for n in range(count) if name in self.samples[n]]
        found = torch.zeros(count, count, dtype=torch.float64)
        stacked = torch.stack([self.samples[n][name].double() for n in there])
        stacked = torch.nn.functional.normalize(stacked, dim=1)
        places = torch.tensor(there)
        found[places[:, None], places] = stacked @ stacked.T
        return found

    @property
    def gains(self) -> torch.Tensor:
        """<G, tau>^2 / |tau|^2, and 0 where there is no block."""
        return torch.where(self.squares > 0, self.slopes**2 / self.squares, 0.0)


@dataclass(frozen=True)
class Pick:
    """A block of a vector that is kept: in which storage, what that takes and what it is worth."""

    vector: int
    block: int
    storage: str
    bytes: int
    gain: float


@dataclass(frozen=True)
class Budget:
    """How much may be kept: bytes in all, or vectors of each block. `seed` is for chance."""

    bytes: int | None = None
    vectors: int | None = None
    seed: int = 0


def by_greed(pool: Slopes, budget: Budget) -> list[Pick]:
    """The best gain per byte, again and again, over vectors, blocks and bits.

    Once a vector is kept in a block, the gradient there loses its component along it (matching
    pursuit), so that its like are worth less. A block that is kept may get more bits later.
    """
    blocks = [_Block(pool, number, budget) for number in range(len(pool.names))]
    left = budget.bytes if budget.bytes is not None else int(pool.bytes.sum().item())
    picks: dict[tuple[int, int], Pick] = {}
    while True:
        offers = [(block.best(left), number) for number, block in enumerate(blocks)]
        (worth, vector), number = max(offers)
        if worth <= 0:
            return list(picks.values())
        found = blocks[number].take(vector)
        before = picks.get((vector, number))
        left -= found.bytes - (before.bytes if before else 0)
        picks[vector, number] = found


class _Block:
    """One block of all vectors, while blocks are being picked."""

    def __init__(self, pool: Slopes, number: int, budget: Budget) -> None:
        self.number, self._most = number, budget.vectors
        self._slopes = pool.slopes[:, number].clone()
        self._squares = pool.squares[:, number]
        self._angles = pool.cosines(number)
        self._level = torch.full((len(self._slopes),), -1)
        self._gain = torch.zeros_like(self._slopes)
        stored = pool.bytes[:, number]
        shape = pool.shapes[pool.names[number]]
        few = [packed_bytes(shape, FEW[word]) for word in KEPT]
        columns = [torch.full_like(stored, size) for size in few]
        self._bytes = torch.stack([*columns, stored], dim=1)
        self._kept = torch.tensor([*KEPT.values(), 1.0], dtype=torch.float64).repeat(len(stored), 1)
        # Few bits are for matrices that have more, and only bytes need saving.
        plain = self._bytes >= stored[:, None]
        if not is_matrix(shape) or budget.bytes is None:
            plain[:] = True
        self._bytes = torch.where(plain, stored[:, None], self._bytes)
        self._kept = torch.where(plain, 1.0, self._kept)
        self._offer: tuple[float, int] | None = None
        self._offer_bytes = 0

    def best(self, left: int) -> tuple[float, int]:
        """The gain per byte of the best next step that fits, and the vector it is for."""
        if self._offer is None or self._offer_bytes > left:
            self._offer = self._find(left)
        return self._offer

    def _find(self, left: int) -> tuple[float, int]:
        fresh = self._level < 0
        following = (self._level + 1).clamp(max=len(_LEVELS) - 1)[:, None]
        size = self._bytes.gather(1, following)[:, 0]
        kept = self._kept.gather(1, following)[:, 0]
        now = self._level.clamp(min=0)[:, None]
        size = torch.where(fresh, size, size - self._bytes.gather(1, now)[:, 0])
        kept = torch.where(fresh, kept, kept - self._kept.gather(1, now)[:, 0])
        gain = torch.where(fresh, self._slopes**2 / self._squares.clamp(min=1e-300), self._gain)
        usable = (self._squares > 0) & (size > 0) & (size <= left)
        if self._most is not None and int((~fresh).sum()) >= self._most:
            usable &= ~fresh
        worth = torch.where(usable, gain * kept / size.clamp(min=1), 0.0)
        vector = int(worth.argmax().item())
        self._offer_bytes = int(size[vector].item())
        return worth[vector].item(), vector

    def take(self, vector: int) -> Pick:
        """Keep a vector here, or give it more bits."""
        self._offer = None
        if self._level[vector] < 0:
            slope, square = self._slopes[vector].clone(), self._squares[vector]
            self._gain[vector] = slope**2 / square
            lengths = (self._squares * square).sqrt()
            self._slopes = self._slopes - slope / square * self._angles[vector] * lengths
        self._level[vector] += 1
        level = int(self._level[vector])
        size = int(self._bytes[vector, level].item())
        while level + 1 < len(_LEVELS) and self._bytes[vector, level + 1] == size:
            level += 1  # not in fewer bits than it is stored in
        self._level[vector] = level
        gain = (self._gain[vector] * self._kept[vector, level]).item()
        return Pick(vector, self.number, _LEVELS[level], size, gain)


def by_gradient(pool: Slopes, budget: Budget) -> list[Pick]:
    """The largest |<G, tau>| first, as stored: of all blocks, or so many vectors of each."""
    order = pool.slopes.abs().flatten().argsort(descending=True).tolist()
    pairs = [divmod(place, len(pool.names)) for place in order]
    return _until_full(pool, pairs, budget)


def by_chance(pool: Slopes, budget: Budget) -> list[Pick]:
    """Whole vectors in a random order, as stored."""
    random = torch.Generator().manual_seed(budget.seed)
    order = torch.randperm(len(pool.slopes), generator=random).tolist()
    pairs = [(vector, block) for vector in order for block in range(len(pool.names))]
    chosen = order[: budget.vectors] if budget.vectors is not None else order
    within = replace(budget, vectors=None)
    return _until_full(pool, [pair for pair in pairs if pair[0] in chosen], within)


def _until_full(pool: Slopes, pairs: Sequence[tuple[int, int]], budget: Budget) -> list[Pick]:
    gains, picks = pool.gains, []
    left = budget.bytes if budget.bytes is not None else int(pool.bytes.sum().item())
    taken = dict.fromkeys(range(len(pool.names)), 0)
    for vector, block in pairs:
        size = int(pool.bytes[vector, block].item())
        full = budget.vectors is not None and taken[block] >= budget.vectors
        if size and size <= left and not full:
            left -= size
            taken[block] += 1
            picks.append(Pick(vector, block, STORED, size, gains[vector, block].item()))
    return picks


RANKINGS: dict[str, Callable[[Slopes, Budget], list[Pick]]] = {
    "greedy": by_greed,
    "gradient": by_gradient,
    "random": by_chance,
}
