"""The loop that every learning command shares: compose, differentiate, step, tell."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from atlas_cli.errors import AtlasError
from atlas_cli.models.composed import LossOf

Values = TypeVar("Values")  # what is learned: a table of coefficients, or named weights


@dataclass(frozen=True)
class Step:
    """One step of descent. `number` counts from 1; accuracy is on the batch it was taken with."""

    number: int
    epoch: int
    loss: float
    accuracy: float
    rate: float


class Engine(Protocol[Values]):
    """What takes gradients: a module with something in it that is learned."""

    def load(self, values: Values, /) -> object:
        """From now on the module runs with these values."""

    def backward(self, images: torch.Tensor, loss_of: LossOf) -> torch.Tensor:
        """Add the gradients of a batch to those kept; gives the loss."""

    def gradient(self) -> Values:
        """The gradient of everything since the last call."""


class Optimizer(Protocol[Values]):
    """Values on their way: AdamW's, or those that take two gradients per step."""

    number: int

    @property
    def scaler(self) -> torch.amp.GradScaler:
        """What scales losses."""

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""

    @property
    def values(self) -> Values:
        """Where the next gradient is taken."""

    def step(self, gradient: Values, /) -> None:
        """Take a gradient; `number` grows once there were enough for a step."""

    def skip(self) -> None:
        """Count a step that moves nothing."""

    def reset(self) -> None:
        """Back to the start."""

    def state(self) -> dict[str, torch.Tensor]:
        """All that the next step depends on."""

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from a state."""


class TrainingData(Protocol):
    """What is to be learned: batches, each with the loss of its features."""

    epoch_steps: int
    steps: int

    def batches(self, step: int) -> Iterable[tuple[torch.Tensor, LossOf]]:
        """The parts of one step's batch; their losses add up to the step's loss."""

    def accuracy(self) -> float:
        """The share of the last step's images that were classified rightly."""

    def diverged(self) -> bool:
        """Whether the last step shows that learning must begin anew."""

    def state(self) -> dict[str, torch.Tensor]:
        """What the next step depends on beside the values."""

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from a state."""


class StatelessData:
    """A problem of which the number of a step tells all that comes next."""

    def diverged(self) -> bool:
        """Never."""
        return False

    def state(self) -> dict[str, torch.Tensor]:
        """Nothing."""
        return {}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Nothing to do."""


def descend(
    engine: Engine[Values], optimizer: Optimizer[Values], problem: TrainingData
) -> Iterator[Step]:
    """Take the steps that remain and yield after each. The caller decides when to stop.

    Values are loaded once per gradient, however many parts its batch has. A batch without parts
    moves nothing.
    """
    while optimizer.number < problem.steps:
        number, rate = optimizer.number, optimizer.rate
        while optimizer.number == number:
            loss = _gradient_at(engine, optimizer, problem)
        if problem.diverged():
            optimizer.reset()
        epoch = number // problem.epoch_steps + 1
        yield Step(number + 1, epoch, loss, problem.accuracy(), rate)


def _gradient_at(
    engine: Engine[Values], optimizer: Optimizer[Values], problem: TrainingData
) -> float:
    """Take one gradient where the values are, hand it on, and give the loss."""
    scaler = optimizer.scaler
    engine.load(optimizer.values)
    losses = [
        engine.backward(images, _scaled(loss_of, scaler)).item() / scaler.get_scale()
        for images, loss_of in problem.batches(optimizer.number)
    ]
    loss = sum(losses)
    if not math.isfinite(loss):
        raise AtlasError(
            f"the loss became {loss} at step {optimizer.number + 1}; a lower learning rate may "
            f"help (it is {optimizer.rate:g} there)"
        )
    if losses:
        optimizer.step(engine.gradient())
    else:
        optimizer.skip()
    return loss


def _scaled(loss_of: LossOf, scaler: torch.amp.GradScaler) -> LossOf:
    return lambda features: scaler.scale(loss_of(features))


def generator_of(seed: int, *what: object) -> torch.Generator:
    """A random generator of its own for every purpose: what it gives depends on no other use."""
    text = ":".join(map(str, (seed, *what)))
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    return torch.Generator().manual_seed(number)
