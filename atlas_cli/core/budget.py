"""Which blocks of which task vectors are kept within a budget of bytes.

The slope of the loss along tau at the base is <G, tau>, with G the gradient of the block. A step
along tau alone lowers the loss by up to <G, tau>^2 / |tau|^2 times a constant that is the same for
all, so this is what a block is worth.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from atlas_cli.core.packed import FEW, packed_bytes
from atlas_cli.core.storage import is_matrix

# The share of |tau|^2 that is left in few bits, of values with a normal distribution.
KEPT = {"int2": 0.88, "int4": 0.99}
STORED = "stored"  # as the vector's file has it
_LEVELS = (*KEPT, STORED)
_TINY = 1e-300


@dataclass(frozen=True)
class Slopes:
    """What is known of a pool after one pass over it; tensors are (vectors, blocks).

    `slopes` are <G, tau>, `squares` |tau|^2, `bytes` what a block takes as it is stored; they are 0
    where a vector lacks a block. `samples` are values of some elements of every block, the same
    ones of all vectors: angles are estimated from them. `similarities`, (vectors,), tell how alike
    the images of a vector and those that are learned from look to the base.
    """

    names: tuple[str, ...]
    shapes: dict[str, tuple[int, ...]]
    slopes: torch.Tensor
    squares: torch.Tensor
    bytes: torch.Tensor
    samples: Sequence[dict[str, torch.Tensor]]
    similarities: torch.Tensor | None = None

    def cosines(self, block: int) -> torch.Tensor:
        """The angles between the vectors in one block, (vectors, vectors)."""
        name, count = self.names[block], len(self.samples)
        there = [n for n in range(count) if name in self.samples[n]]
        found = torch.zeros(count, count, dtype=torch.float64)
        stacked = torch.stack([self.samples[n][name].float() for n in there])
        stacked = torch.nn.functional.normalize(stacked, dim=1)
        places = torch.tensor(there)
        found[places[:, None], places] = (stacked @ stacked.T).double()
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
    # The best offer of every block. Only a pick changes what its block offers, and what is left
    # only shrinks: an offer that no longer fits is replaced when its turn comes.
    offers = [block.offer(left) for block in blocks]
    heapq.heapify(offers)
    picks: dict[tuple[int, int], Pick] = {}
    while offers:
        offer = heapq.heappop(offers)
        if offer.worth <= 0:
            break
        block = blocks[offer.block]
        if offer.bytes <= left:
            left -= offer.bytes
            picks[offer.vector, offer.block] = block.take(offer.vector)
        heapq.heappush(offers, block.offer(left))
    return list(picks.values())


@dataclass(frozen=True)
class _Offer:
    """The best next step of a block: how many bytes it takes, and its gain per byte."""

    worth: float
    vector: int
    block: int
    bytes: int

    def __lt__(self, other: _Offer) -> bool:
        """Whether it comes first."""
        return (self.worth, self.vector, self.block) > (other.worth, other.vector, other.block)


class _Block:
    """One block of all vectors, while blocks are being picked. Arrays have one item per vector."""

    def __init__(self, pool: Slopes, number: int, budget: Budget) -> None:
        self.number, self._most, self._pool = number, budget.vectors, pool
        self._slopes = pool.slopes[:, number].numpy().copy()
        self._squares = pool.squares[:, number].numpy()
        stored = pool.bytes[:, number].numpy()[:, None]
        shape = pool.shapes[pool.names[number]]
        few = np.array([packed_bytes(shape, FEW[word]) for word in KEPT])
        sizes = np.broadcast_to(few, (len(stored), len(few)))
        shares = np.broadcast_to([*KEPT.values()], sizes.shape)
        # Few bits are for matrices that have more, and only bytes need saving.
        plain = sizes >= stored
        if not is_matrix(shape) or budget.bytes is None:
            plain = np.ones_like(plain)
        # What a vector takes and keeps of |tau|^2 at every level of bits.
        self._bytes = np.hstack([np.where(plain, stored, sizes), stored])
        self._shares = np.hstack([np.where(plain, 1.0, shares), np.ones_like(stored)])
        self._level = np.full(len(stored), -1)
        self._gain = self._gains()
        self._more_bytes, self._more_share = self._bytes[:, 0].copy(), self._shares[:, 0].copy()

    def _gains(self) -> np.ndarray:
        found: np.ndarray = self._slopes**2 / np.maximum(self._squares, _TINY)
        return found

    @cached_property
    def _angles(self) -> np.ndarray:
        return self._pool.cosines(self.number).numpy()

    def offer(self, left: int) -> _Offer:
        """The best gain per byte of a next step that fits; 0 if there is none."""
        worth = self._gain * self._more_share / np.maximum(self._more_bytes, 1.0)
        usable = (self._squares > 0) & (self._more_bytes > 0) & (self._more_bytes <= left)
        if self._most is not None and (kept := self._level >= 0).sum() >= self._most:
            usable &= kept
        worth = np.where(usable, worth, 0.0)
        vector = int(worth.argmax())
        return _Offer(float(worth[vector]), vector, self.number, int(self._more_bytes[vector]))

    def take(self, vector: int) -> Pick:
        """Keep a vector here, or give it more bits."""
        if self._level[vector] < 0:
            self._deflate(vector)
        sizes, shares = self._bytes[vector], self._shares[vector]
        level = int(self._level[vector]) + 1
        while level + 1 < len(_LEVELS) and sizes[level + 1] == sizes[level]:
            level += 1  # not in fewer bits than it is stored in
        self._level[vector] = level
        last = level + 1 == len(_LEVELS)
        self._more_bytes[vector] = 0 if last else sizes[level + 1] - sizes[level]
        self._more_share[vector] = 0 if last else shares[level + 1] - shares[level]
        gain = float(self._gain[vector] * shares[level])
        return Pick(vector, self.number, _LEVELS[level], int(sizes[level]), gain)

    def _deflate(self, vector: int) -> None:
        """Take the component along a vector out of the gradient; what is kept has its gain."""
        slope, square = self._slopes[vector], self._squares[vector]
        lengths = np.sqrt(self._squares * square)
        self._slopes = self._slopes - slope / square * self._angles[vector] * lengths
        fresh = self._level < 0
        fresh[vector] = False
        self._gain = np.where(fresh, self._gains(), self._gain)


def by_gradient(pool: Slopes, budget: Budget) -> list[Pick]:
    """The largest |<G, tau>| first, as stored: of all blocks, or so many vectors of each."""
    order = pool.slopes.abs().flatten().argsort(descending=True).tolist()
    pairs = [divmod(place, len(pool.names)) for place in order]
    return _until_full(pool, pairs, budget)


def by_chance(pool: Slopes, budget: Budget) -> list[Pick]:
    """Whole vectors in a random order, as stored."""
    random = torch.Generator().manual_seed(budget.seed)
    return _whole(pool, torch.randperm(len(pool.slopes), generator=random), budget)


def by_features(pool: Slopes, budget: Budget) -> list[Pick]:
    """Whole vectors whose images look most like those that are learned from, as stored."""
    if pool.similarities is None:
        raise ValueError("the images of the vectors are not known")
    return _whole(pool, pool.similarities.argsort(descending=True, stable=True), budget)


def _whole(pool: Slopes, order: torch.Tensor, budget: Budget) -> list[Pick]:
    """Whole vectors in an order, for as long as their blocks fit."""
    chosen = order.tolist()[: budget.vectors]
    pairs = [(vector, block) for vector in chosen for block in range(len(pool.names))]
    return _until_full(pool, pairs, replace(budget, vectors=None))


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
    "features": by_features,
    "random": by_chance,
}
