"""Random numbers that belong to an element: any tile gives the same ones, in any order."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

_BLOCK = 1 << 16  # elements that share a generator
LEVELS = 1 << 15  # a draw has 15 bits, and one more that is independent of them


@dataclass(frozen=True)
class Dice:
    """What the random numbers of one tensor of one model depend on."""

    seed: int
    name: str
    model: int

    def generator(self, block: int) -> torch.Generator:
        """The generator of a block of elements."""
        text = f"{self.seed}/{self.model}/{block}/{self.name}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def draw(dice: Dice, start: int, count: int) -> torch.Tensor:
    """16 random bits for each of `count` elements from position `start` on, as int16."""
    result = torch.empty(count, dtype=torch.int16)
    done = 0
    while done < count:
        block, skipped = divmod(start + done, _BLOCK)
        some = min(_BLOCK - skipped, count - done)
        words = torch.empty(-(-(skipped + some) // 4), dtype=torch.int64)
        words.random_(-(1 << 63), None, generator=dice.generator(block))
        result[done : done + some] = words.view(torch.int16)[skipped : skipped + some]
        done += some
    return result


def offset(dice: Dice) -> float:
    """A number in [0, 1) for the whole tensor.

    A draw r of 15 bits stands for u = (r + offset) / LEVELS. The offset makes the probability of
    u < p exactly p for every element, whatever p is.
    """
    return float(torch.rand((), generator=dice.generator(-1), dtype=torch.float64))
