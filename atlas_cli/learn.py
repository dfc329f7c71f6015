"""The loop that every learning command shares: compose, differentiate, step, tell."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from atlas_cli.core.descent import Descender
from atlas_cli.errors import AtlasError
from atlas_cli.towers import LossOf, Tower


@dataclass(frozen=True)
class Step:
    """One step of descent. `number` counts from 1; accuracy is on the batch it was taken with."""

    number: int
    epoch: int
    loss: float
    accuracy: float
    rate: float


class Problem(Protocol):
    """What is to be learned: batches, each with the loss of its features."""

    epoch_steps: int
    steps: int

    def batches(self, step: int) -> Iterable[tuple[torch.Tensor, LossOf]]:
        """The parts of one step's batch; their losses add up to the step's loss."""

    def accuracy(self) -> float:
        """The share of the last step's images that were classified rightly."""


def descend(tower: Tower, descender: Descender, problem: Problem) -> Iterator[Step]:
    """Take the steps that remain and yield after each. The caller decides when to stop.

    The vectors are composed once per step, however many parts its batch has.
    """
    scaler = descender.scaler
    while descender.number < problem.steps:
        number, rate = descender.number, descender.rate
        tower.load(descender.values)
        loss = 0.0
        for images, loss_of in problem.batches(number):
            loss += tower.backward(images, _scaled(loss_of, scaler)).item() / scaler.get_scale()
        if not math.isfinite(loss):
            raise AtlasError(
                f"the loss became {loss} at step {number + 1}; a lower learning rate may help "
                f"(it is {rate:g} there)"
            )
        descender.step(tower.gradient())
        epoch = number // problem.epoch_steps + 1
        yield Step(number + 1, epoch, loss, problem.accuracy(), rate)


def _scaled(loss_of: LossOf, scaler: torch.amp.GradScaler) -> LossOf:
    return lambda features: scaler.scale(loss_of(features))


def generator_of(seed: int, *what: object) -> torch.Generator:
    """A random generator of its own for every purpose: what it gives depends on no other use."""
    text = ":".join(map(str, (seed, *what)))
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    return torch.Generator().manual_seed(number)
