"""Images of one task or of several, shown in batches, and how well they were classified."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from atlas_cli.core.augment import MILD
from atlas_cli.core.losses import Loss, cross_entropy, logits_of
from atlas_cli.core.optimizers import OptimizerConfig
from atlas_cli.datasets.pixels import Pixels
from atlas_cli.learning.loop import StatelessData, generator_of
from atlas_cli.models.composed import FunctionalModel, LossOf

_CHECKED_AT_ONCE = 256


@dataclass(frozen=True)
class TrainingConfig:
    """How images are shown: passes over them, or steps if those are given, and how many at once."""

    epochs: int = 10
    batch_size: int = 128
    accumulate: int = 1
    min_steps: int = 10
    augment: str = "flip"
    seed: int = 0
    optimizer_config: OptimizerConfig = field(default_factory=OptimizerConfig)
    steps: int | None = None


@dataclass(frozen=True)
class TaskData:
    """The images of one task, its frozen head, its loss, and its share of a batch."""

    pixels: Pixels
    head: torch.Tensor
    loss: Loss = cross_entropy
    share: float = 1.0


class LabelledData(StatelessData):
    """The sum of the streams' losses. Every batch has images of each; short streams come again.

    An epoch is one pass over the stream that takes longest.
    """

    def __init__(
        self,
        streams: Sequence[TaskData],
        indices: Sequence[Sequence[int]],
        training: TrainingConfig,
    ) -> None:
        self._streams, self._training = tuple(streams), training
        self._labels = [stream.pixels.labels for stream in streams]
        self._hits = self._seen = 0
        sizes = [max(1, round(training.batch_size * stream.share)) for stream in streams]
        shown = [
            max(len(some), training.min_steps * size)
            for some, size in zip(indices, sizes, strict=True)
        ]
        passes = [math.ceil(count / size) for count, size in zip(shown, sizes, strict=True)]
        self.epoch_steps = max(passes)
        self.steps = training.steps or training.epochs * self.epoch_steps
        self._decks = []
        for number, (some, size) in enumerate(zip(indices, sizes, strict=True)):
            longest = passes[number] == self.epoch_steps
            count = shown[number] if longest else self.epoch_steps * size
            what = (number,) if number else ()
            self._decks.append(Sampler(list(some), size, count, training.seed, what))

    def batches(self, step: int) -> Iterator[tuple[torch.Tensor, LossOf]]:
        """The batch of a step, in `accumulate` parts."""
        self._hits = self._seen = 0
        epoch, place = divmod(step, self.epoch_steps)
        chosen = [sampler.hand(epoch, place) for sampler in self._decks]
        random = generator_of(self._training.seed, "crops", step)
        sizes = [math.ceil(len(hand) / self._training.accumulate) for hand in chosen]
        parts = max(math.ceil(len(h) / size) for h, size in zip(chosen, sizes, strict=True))
        for part in range(parts):
            some = [
                hand[part * size : (part + 1) * size]
                for hand, size in zip(chosen, sizes, strict=True)
            ]
            images = [
                show(stream.pixels, few, random, self._training.augment)
                for stream, few in zip(self._streams, some, strict=True)
                if few
            ]
            shares = [len(few) / len(hand) for few, hand in zip(some, chosen, strict=True)]
            yield torch.cat(images), self._loss_of(some, shares)

    def _loss_of(self, some: Sequence[Sequence[int]], shares: Sequence[float]) -> LossOf:
        """sum over streams of share * loss(logits of its images), from the features of all."""

        def loss_of(features: torch.Tensor) -> torch.Tensor:
            pieces = features.split([len(few) for few in some])
            total = features.new_zeros(())
            for number, (piece, few, share) in enumerate(zip(pieces, some, shares, strict=True)):
                if few:
                    stream = self._streams[number]
                    labels = self._labels[number][few].to(features.device)
                    logits = logits_of(piece, stream.head)
                    self._hits += int((logits.argmax(dim=1) == labels).sum().item())
                    self._seen += len(few)
                    total = total + share * stream.loss(logits, labels)
            return total

        return loss_of

    def accuracy(self) -> float:
        """The share of the last step's images that were classified rightly."""
        return self._hits / max(self._seen, 1)


def show(
    pixels: Pixels, some: Sequence[int], random: torch.Generator, augment: str
) -> torch.Tensor:
    """Images as learning sees them: as they are, or a random view of each."""
    if augment == "none":
        return pixels.fixed(some)
    if augment == "mild":
        return pixels.mild(some, random)
    if augment == "slight":
        return pixels.cropped(some, random, mirror=False, scale=MILD)
    return pixels.cropped(some, random, mirror=augment == "flip")


class Sampler:
    """Images that are shuffled anew for every epoch and dealt in hands of one size."""

    def __init__(
        self, indices: list[int], size: int, shown: int, seed: int, what: tuple[object, ...]
    ) -> None:
        self._indices, self._size, self._shown = indices, size, shown
        self._seed, self._what = seed, what
        self._epoch: tuple[int, list[int]] = (-1, [])

    def hand(self, epoch: int, place: int) -> list[int]:
        """The images of one step of an epoch."""
        return self._order(epoch)[place * self._size : (place + 1) * self._size]

    def _order(self, epoch: int) -> list[int]:
        """The images of an epoch: shuffled passes over them until there are enough."""
        if self._epoch[0] != epoch:
            random = generator_of(self._seed, "order", epoch, *self._what)
            order: list[int] = []
            while len(order) < self._shown:
                places = torch.randperm(len(self._indices), generator=random).tolist()
                order += [self._indices[place] for place in places]
            self._epoch = epoch, order[: self._shown]
        return self._epoch[1]


@dataclass(frozen=True, order=True)
class TaskScore:
    """How well the images of a task were classified; ordered from worse to better."""

    accuracy: float
    gain: float  # minus the mean cross-entropy


def score(
    tower: FunctionalModel, pixels: Pixels, indices: Sequence[int], head: torch.Tensor
) -> TaskScore:
    """Classify images as evaluation would, with the coefficients that the tower has loaded."""
    logits = predict(tower, pixels, indices, head)
    labels = pixels.labels[list(indices)]
    finite = bool(logits.isfinite().all())
    loss = F.cross_entropy(logits.double(), labels).item() if finite else math.inf
    return TaskScore(hits(logits, labels).sum().item() / len(labels), -loss)


def hits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Which images are classified rightly, as booleans.

    Logits that are not finite classify nothing, though the largest of several NaNs has an index.
    """
    return (logits.argmax(dim=1) == labels) & logits.isfinite().all(dim=1)


def predict(
    tower: FunctionalModel, pixels: Pixels, indices: Sequence[int], head: torch.Tensor
) -> torch.Tensor:
    """The logits of images as evaluation sees them, (images, classes)."""
    found = []
    for start in range(0, len(indices), _CHECKED_AT_ONCE):
        images = pixels.fixed(indices[start : start + _CHECKED_AT_ONCE])
        found.append(logits_of(tower.features(images), head).cpu())
    return torch.cat(found)
