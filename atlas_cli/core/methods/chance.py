"""Random numbers that belong to an element: any tile gives the same ones, in any order."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch

LEVELS = 1 << 15  # a draw has 15 bits, and one more that is independent of them
_DRAWS = 4  # in a word of the generator


@dataclass(frozen=True)
class Dice:
    """What the random numbers of one tensor of one model depend on."""

    seed: int
    name: str
    model: int

    def words(self, start: int, count: int) -> np.ndarray:
        """`count` words of 64 random bits, from the word `start` of an endless row on."""
        text = f"{self.seed}/{self.model}/{self.name}"
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        generator = np.random.PCG64(int.from_bytes(digest, "little"))
        found: np.ndarray = generator.advance(start).random_raw(count)
        return found.astype("<u8", copy=False)


def draw(dice: Dice, start: int, count: int) -> torch.Tensor:
    """16 random bits for each of `count` elements from position `start` on, as int16."""
    word, skipped = divmod(start + _DRAWS, _DRAWS)
    words = dice.words(word, -(-(skipped + count) // _DRAWS))
    return torch.from_numpy(words.view(np.int16))[skipped : skipped + count]


def offset(dice: Dice) -> float:
    """A number in [0, 1) for the whole tensor: the first word, which no element has.

    A draw r of 15 bits stands for u = (r + offset) / LEVELS. The offset makes the probability of
    u < p exactly p for every element, whatever p is.
    """
    return int(dice.words(0, 1)[0] >> np.uint64(11)) / (1 << 53)
