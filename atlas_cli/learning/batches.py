"""Labelled images of one task or of several: batches, their losses, and scores."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from atlas_cli.core.losses import Loss, cross_entropy
from atlas_cli.core.optimizers import OptimizerConfig
from atlas_cli.datasets.pixels import MILD, Pixels
from atlas_cli.errors import UsageError
from atlas_cli.models.clip import Classifier, logits_of
from atlas_cli.models.composed import ComposedModel, FunctionalModel, LossOf
from atlas_cli.recipes.model import as_percent
from atlas_cli.registry import find_objective

if TYPE_CHECKING:
    from atlas_cli.learning.selection import Fold, Score

_SCORED_AT_ONCE = 256


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
class Step:
    """One step of training. `number` counts from 1; accuracy is on the batch it was taken with.

    `back_to` is told of a step whose loss sent the values back to what they were after that step.
    """

    number: int
    epoch: int
    loss: float
    accuracy: float
    rate: float
    back_to: int | None = None

    def __str__(self) -> str:
        """What may surprise; nothing if it is a step like others."""
        if self.back_to is None:
            return ""
        where = f"as after step {self.back_to}" if self.back_to else "as at the start"
        rate = f"goes on {where} at half the rate, {self.rate / 2:g}"
        return f"step {self.number}: the loss rose to {self.loss:.3g}; {rate}"

    def row(self, measure: str) -> dict[str, object]:
        """The step as a row of metrics.jsonl, where `measure` is what the accuracy is called.

        A file of rows has no head that could name the unit, so the key does.
        """
        found = dataclasses.asdict(self)
        share = found.pop("accuracy")
        if found["back_to"] is None:
            del found["back_to"]
        loss = self.loss if math.isfinite(self.loss) else None
        return {**found, "loss": loss, f"{measure}_percent": as_percent(share)}


def generator_of(seed: int, *what: object) -> torch.Generator:
    """A random generator of its own for every purpose: what it gives depends on no other use."""
    text = ":".join(map(str, (seed, *what)))
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    return torch.Generator().manual_seed(number)


class StatelessData:
    """Training data whose next batch depends on nothing but the number of the step.

    `hits` of the `seen` images of the last step were classified as they should be.
    """

    hits = seen = 0

    def diverged(self) -> bool:
        return False

    def state(self) -> dict[str, torch.Tensor]:
        return {}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        pass


@dataclass(frozen=True)
class TaskData:
    """The images of one task, its head, its loss, and its share of a batch."""

    pixels: Pixels
    head: Classifier
    loss: Loss = cross_entropy
    share: float = 1.0


class LabelledData(StatelessData):
    """The sum of the tasks' losses. Every batch has images of each; short tasks come again.

    An epoch is one pass over the task that takes longest.
    """

    def __init__(
        self,
        tasks: Sequence[TaskData],
        indices: Sequence[Sequence[int]],
        training: TrainingConfig,
    ) -> None:
        self._tasks, self._training = tuple(tasks), training
        self._labels = [task.pixels.labels for task in tasks]
        self.hits = self.seen = 0
        sizes = [max(1, round(training.batch_size * task.share)) for task in tasks]
        shown = [
            max(len(some), training.min_steps * size)
            for some, size in zip(indices, sizes, strict=True)
        ]
        passes = [math.ceil(count / size) for count, size in zip(shown, sizes, strict=True)]
        self.epoch_steps = max(passes)
        self.steps = training.steps or training.epochs * self.epoch_steps
        self._samplers = []
        for number, (some, size) in enumerate(zip(indices, sizes, strict=True)):
            longest = passes[number] == self.epoch_steps
            count = shown[number] if longest else self.epoch_steps * size
            what = (number,) if number else ()
            self._samplers.append(Sampler(list(some), size, count, training.seed, what))

    def batches(self, step: int) -> Iterator[tuple[torch.Tensor, LossOf]]:
        """The batch of a step, in `accumulate` parts."""
        self.hits = self.seen = 0
        epoch, place = divmod(step, self.epoch_steps)
        chosen = [sampler.batch(epoch, place) for sampler in self._samplers]
        random = generator_of(self._training.seed, "crops", step)
        sizes = [math.ceil(len(batch) / self._training.accumulate) for batch in chosen]
        parts = max(math.ceil(len(b) / size) for b, size in zip(chosen, sizes, strict=True))
        for part in range(parts):
            some = [
                batch[part * size : (part + 1) * size]
                for batch, size in zip(chosen, sizes, strict=True)
            ]
            images = [
                show(task.pixels, few, random, self._training.augment)
                for task, few in zip(self._tasks, some, strict=True)
                if few
            ]
            shares = [len(few) / len(batch) for few, batch in zip(some, chosen, strict=True)]
            yield torch.cat(images), BatchLoss(self, some, shares)

    def loss_of(
        self, features: torch.Tensor, some: Sequence[Sequence[int]], shares: Sequence[float]
    ) -> torch.Tensor:
        """sum over tasks of share * loss(logits of its images), from the features of all."""
        pieces = features.split([len(few) for few in some])
        total = features.new_zeros(())
        for number, (piece, few, share) in enumerate(zip(pieces, some, shares, strict=True)):
            if few:
                task = self._tasks[number]
                labels = self._labels[number][few].to(features.device)
                logits = logits_of(piece, task.head)
                self.hits += int((logits.argmax(dim=1) == labels).sum().item())
                self.seen += len(few)
                total = total + share * task.loss(logits, labels)
        return total

    def accuracy(self) -> float:
        """The share of the last step's images that were classified correctly."""
        return self.hits / max(self.seen, 1)


@dataclass(frozen=True)
class BatchLoss:
    """The loss of images of several tasks; the losses of rows that make up a batch add up to it."""

    data: LabelledData
    some: Sequence[Sequence[int]]
    shares: Sequence[float]

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        return self.data.loss_of(features, self.some, self.shares)

    def of_rows(self, rows: Sequence[int]) -> BatchLoss:
        """The part of the loss that some rows of the batch have, since it is a mean of images."""
        some, shares, first = [], [], 0
        for few, share in zip(self.some, self.shares, strict=True):
            own = [few[row - first] for row in rows if first <= row < first + len(few)]
            some.append(own)
            shares.append(share * len(own) / max(len(few), 1))
            first += len(few)
        return BatchLoss(self.data, some, shares)


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
    """Shuffles images anew for every epoch, and deals them in batches of one size."""

    def __init__(
        self, indices: list[int], size: int, shown: int, seed: int, what: tuple[object, ...]
    ) -> None:
        self._indices, self._size, self._shown = indices, size, shown
        self._seed, self._what = seed, what
        self._epoch: tuple[int, list[int]] = (-1, [])

    def batch(self, epoch: int, place: int) -> list[int]:
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
    model: FunctionalModel, pixels: Pixels, indices: Sequence[int], head: Classifier
) -> TaskScore:
    """Classify images as evaluation does, with the weights that the model has loaded."""
    return score_of(predict(model, pixels, indices, head), pixels.labels[list(indices)])


def score_of(logits: torch.Tensor, labels: torch.Tensor) -> TaskScore:
    """How well logits classify images."""
    finite = bool(logits.isfinite().all())
    loss = F.cross_entropy(logits.double(), labels).item() if finite else math.inf
    return TaskScore(hits(logits, labels).sum().item() / len(labels), -loss)


def hits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Which images are classified correctly, as booleans.

    Logits that are not finite classify nothing, though the largest of several NaNs has an index.
    """
    return (logits.argmax(dim=1) == labels) & logits.isfinite().all(dim=1)


def predict(
    model: FunctionalModel, pixels: Pixels, indices: Sequence[int], head: Classifier
) -> torch.Tensor:
    """The logits of images as evaluation sees them, (images, classes)."""
    with torch.no_grad():
        return logits_of(features_of(model, pixels, indices), head).cpu()


def features_of(model: FunctionalModel, pixels: Pixels, indices: Sequence[int]) -> torch.Tensor:
    """The features of images as evaluation sees them, (images, width), not of length 1."""
    found = [
        model.features(pixels.fixed(indices[start : start + _SCORED_AT_ONCE]))
        for start in range(0, len(indices), _SCORED_AT_ONCE)
    ]
    return torch.cat(found)


def labelled_loss(name: str, command: str) -> Loss:
    """The loss that a command knows by a name. Raises UsageError if it cannot be taken here."""
    entry = find_objective(name, command)
    if not set(entry.needs) <= {"labels"}:
        raise UsageError(f"objective '{name}' needs more than {command} has: logits and labels")
    if "labels" in entry.needs:
        return lambda logits, labels: entry.function(logits, labels=labels)
    return lambda logits, labels: entry.function(logits)


# Objectives -----------------------------------------------------------------------------------

Rule = Callable[[Sequence[TaskScore], Sequence[TaskScore]], "Score"]


@dataclass(frozen=True)
class LabelledObjective:
    """Tasks with labels that coefficients are trained on together.

    `rule` makes one score of the scores of all tasks and of those they are compared with, which
    `references` gives: a table of coefficients for each task. `judges` are other images to score
    on, if any, as many as there are tasks.
    """

    model: ComposedModel
    tasks: tuple[TaskData, ...]
    training: TrainingConfig
    rule: Rule
    start: torch.Tensor
    references: tuple[torch.Tensor, ...] = ()
    judges: tuple[Pixels, ...] = ()
    scaled: bool = False
    backtrack: tuple[float, ...] = ()
    _known: dict[str, tuple[TaskScore, ...]] = field(default_factory=dict, repr=False)

    def judge(self, fold: Fold, coefficients: torch.Tensor) -> Score:
        """Classify the images that score a fold."""
        return self.rule(self.scores(fold, coefficients), self.reference(fold))

    def scores(self, fold: Fold, coefficients: torch.Tensor) -> tuple[TaskScore, ...]:
        """How well the images of every task are classified."""
        self.model.load(coefficients)
        return tuple(self._score(fold, number) for number in range(len(self.tasks)))

    def reference(self, fold: Fold) -> tuple[TaskScore, ...]:
        """The scores that those of learned coefficients are compared with."""
        if fold.name not in self._known and self.references:
            found = []
            for number, table in enumerate(self.references):
                self.model.load(table)
                found.append(self._score(fold, number))
            self._known[fold.name] = tuple(found)
        return self._known.get(fold.name, ())

    def _score(self, fold: Fold, number: int) -> TaskScore:
        pixels, head = self.tasks[number].pixels, self.tasks[number].head
        if self.judges:
            pixels = self.judges[number]
            return score(self.model, pixels, range(len(pixels.dataset.samples)), head)
        if fold.scored_on is None:
            raise ValueError(f"nothing scores {fold.name}")
        return score(self.model, pixels, fold.scored_on[number], head)

    def training_data(self, fold: Fold) -> LabelledData:
        return LabelledData(self.tasks, fold.train, self.training)
