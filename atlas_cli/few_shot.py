"""Learning from labelled images: batches of crops, cross-entropy, and checks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from atlas_cli.core.descent import Descent
from atlas_cli.core.objectives import cross_entropy, logits_of
from atlas_cli.learn import generator_of
from atlas_cli.pixels import Pixels
from atlas_cli.towers import LossOf, Tower

_CHECKED_AT_ONCE = 256


@dataclass(frozen=True)
class Training:
    """How images are shown: passes over them, and how many at once."""

    epochs: int = 10
    batch_size: int = 128
    accumulate: int = 1
    min_steps: int = 10
    augment: str = "flip"
    seed: int = 0
    descent: Descent = field(default_factory=Descent)


class FewShot:
    """Cross-entropy on some of the images, shown again and again in random crops."""

    def __init__(
        self, pixels: Pixels, indices: Sequence[int], head: torch.Tensor, training: Training
    ) -> None:
        self._pixels, self._indices, self._head = pixels, list(indices), head
        self._training = training
        self._labels = pixels.labels
        self._hits = self._seen = 0
        self._shown = max(len(self._indices), training.min_steps * training.batch_size)
        self._epoch: tuple[int, list[int]] = (-1, [])
        self.epoch_steps = math.ceil(self._shown / training.batch_size)
        self.steps = training.epochs * self.epoch_steps

    def batches(self, step: int) -> Iterator[tuple[torch.Tensor, LossOf]]:
        """The batch of a step, in `accumulate` parts."""
        self._hits = self._seen = 0
        start = step % self.epoch_steps * self._training.batch_size
        chosen = self._order(step // self.epoch_steps)[start : start + self._training.batch_size]
        random = generator_of(self._training.seed, "crops", step)
        size = math.ceil(len(chosen) / self._training.accumulate)
        for start in range(0, len(chosen), size):
            part = chosen[start : start + size]
            images = self._show(part, random)
            yield images, self._loss_of(part, len(part) / len(chosen))

    def _show(self, part: Sequence[int], random: torch.Generator) -> torch.Tensor:
        if self._training.augment == "none":
            return self._pixels.fixed(part)
        return self._pixels.cropped(part, random, mirror=self._training.augment == "flip")

    def _loss_of(self, part: Sequence[int], share: float) -> LossOf:
        labels = self._labels[part].to(self._head.device)

        def loss_of(features: torch.Tensor) -> torch.Tensor:
            logits = logits_of(features, self._head)
            self._hits += int((logits.argmax(dim=1) == labels).sum().item())
            self._seen += len(labels)
            return share * cross_entropy(logits, labels)

        return loss_of

    def _order(self, epoch: int) -> list[int]:
        """The images of an epoch: shuffled passes over them until there are enough."""
        if self._epoch[0] != epoch:
            random = generator_of(self._training.seed, "order", epoch)
            order: list[int] = []
            while len(order) < self._shown:
                places = torch.randperm(len(self._indices), generator=random).tolist()
                order += [self._indices[place] for place in places]
            self._epoch = epoch, order[: self._shown]
        return self._epoch[1]

    def accuracy(self) -> float:
        """The share of the last step's crops that were classified rightly."""
        return self._hits / max(self._seen, 1)


@dataclass(frozen=True, order=True)
class Check:
    """How well images were classified that chose nothing before; ordered from worse to better."""

    accuracy: float
    gain: float  # minus the mean cross-entropy


def check(tower: Tower, pixels: Pixels, indices: Sequence[int], head: torch.Tensor) -> Check:
    """Classify images as evaluation would, with the coefficients that the tower has loaded.

    Logits that are not finite classify nothing, though the largest of several NaNs has an index.
    """
    logits = predict(tower, pixels, indices, head)
    labels = pixels.labels[list(indices)]
    finite = logits.isfinite().all(dim=1)
    hits = ((logits.argmax(dim=1) == labels) & finite).sum().item()
    loss = F.cross_entropy(logits.double(), labels).item() if finite.all() else math.inf
    return Check(hits / len(labels), -loss)


def predict(
    tower: Tower, pixels: Pixels, indices: Sequence[int], head: torch.Tensor
) -> torch.Tensor:
    """The logits of images as evaluation sees them, (images, classes)."""
    found = []
    for start in range(0, len(indices), _CHECKED_AT_ONCE):
        images = pixels.fixed(indices[start : start + _CHECKED_AT_ONCE])
        found.append(logits_of(tower.features(images), head).cpu())
    return torch.cat(found)
