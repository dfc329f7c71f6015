"""Learning from labelled images: batches of crops, cross-entropy, and choosing without a test."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from atlas_cli.core.descent import Descender, Descent
from atlas_cli.core.objectives import cross_entropy, logits_of
from atlas_cli.errors import DataError
from atlas_cli.learn import Step, descend, generator_of
from atlas_cli.pixels import Pixels
from atlas_cli.towers import LossOf, Tower

_HELD_OUT = 4  # one image in so many of a class
_FOLDS = 4
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
            yield images.to(self._head.device), self._loss_of(part, len(part) / len(chosen))

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
        images = pixels.fixed(indices[start : start + _CHECKED_AT_ONCE]).to(head.device)
        found.append(logits_of(tower.features(images), head).cpu())
    return torch.cat(found)


# Choosing -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """One descent: the images it learns from, those that judge it, and how often they do."""

    name: str
    train: tuple[int, ...]
    judged_by: tuple[int, ...]
    every_epoch: bool


def stages(select: str, pixels: Pixels, seed: int) -> list[Stage]:
    """The descents that a way to select needs. Raises DataError if there are too few images."""
    everything = tuple(range(len(pixels.dataset.samples)))
    if select.startswith("val:"):
        return [Stage("val", everything, (), True)]
    if select == "last":
        return [Stage("all", everything, everything, False)]
    by_class = _by_class(pixels, seed)
    fewest = min(map(len, by_class))
    if fewest < 2:
        raise DataError(
            f"{pixels.dataset.name}: --select {select} needs two images of every class or more; "
            "use --select last, or val:DATA"
        )
    if select == "holdout":
        held = {i for members in by_class for i in members[: max(1, len(members) // _HELD_OUT)]}
        rest = tuple(index for index in everything if index not in held)
        return [Stage("holdout", rest, tuple(sorted(held)), True)]
    found = []
    folds = min(_FOLDS, fewest)
    for fold in range(folds):
        held = {index for members in by_class for index in members[fold::folds]}
        rest = tuple(index for index in everything if index not in held)
        found.append(Stage(f"fold {fold + 1}", rest, tuple(sorted(held)), True))
    return [*found, Stage("all", everything, (), False)]


def _by_class(pixels: Pixels, seed: int) -> list[list[int]]:
    """The images of every class, shuffled."""
    found: dict[int, list[int]] = {}
    for index, label in enumerate(pixels.labels.tolist()):
        found.setdefault(label, []).append(index)
    random = generator_of(seed, "folds")
    return [
        [members[place] for place in torch.randperm(len(members), generator=random).tolist()]
        for _, members in sorted(found.items())
    ]


@dataclass(frozen=True)
class Moment:
    """Where a run stands after a step: all that going on depends on, and the best so far."""

    stage: int
    step: Step | None
    checks: dict[str, list[Check]]
    best: torch.Tensor
    state: dict[str, torch.Tensor] = field(repr=False)


@dataclass(frozen=True)
class Material:
    """All that few-shot learning works with. `judges` are other images to select on, if any."""

    tower: Tower
    pixels: Pixels
    head: torch.Tensor
    training: Training
    judges: Pixels | None = None
    scaled: bool = False

    def judge(self, stage: Stage, coefficients: torch.Tensor) -> Check:
        """Classify the images that judge a stage."""
        self.tower.load(coefficients)
        if self.judges is not None:
            every = range(len(self.judges.dataset.samples))
            return check(self.tower, self.judges, every, self.head)
        return check(self.tower, self.pixels, stage.judged_by, self.head)

    def problem(self, stage: Stage) -> FewShot:
        """What a stage learns."""
        return FewShot(self.pixels, stage.train, self.head, self.training)


def begin(material: Material, plan: Sequence[Stage]) -> Moment:
    """Before the first step: zero-shot, the floor of every stage that is judged."""
    zero = torch.zeros(material.tower.composition.shape, device=material.head.device)
    judged = [stage for stage in plan if stage.judged_by or material.judges]
    checks = {stage.name: [material.judge(stage, zero)] for stage in judged}
    return Moment(0, None, checks, zero, {})


def learn(material: Material, plan: Sequence[Stage], moment: Moment) -> Iterator[Moment]:
    """Go through the stages that remain and yield after every step. The last has the result."""
    for number in range(moment.stage, len(plan)):
        for found in _descend_stage(material, plan, number, moment):
            moment = found
            yield moment


def _descend_stage(
    material: Material, plan: Sequence[Stage], number: int, moment: Moment
) -> Iterator[Moment]:
    stage, problem = plan[number], material.problem(plan[number])
    zero = torch.zeros_like(moment.best)
    descender = Descender(zero, problem.steps, material.training.descent, scaled=material.scaled)
    if moment.state:
        descender.restore(moment.state)
    limit = problem.steps
    if len(plan) > 1 and number == len(plan) - 1:  # after the folds: as long as they did best
        limit = _best_epoch(moment.checks) * problem.epoch_steps
    if descender.number >= limit:
        return
    checks, best = dict(moment.checks), moment.best
    for step in descend(material.tower, descender, problem):
        last = step.number == limit
        ends = stage.every_epoch and step.number % problem.epoch_steps == 0
        if stage.name in checks and (last or ends):
            found = material.judge(stage, descender.coefficients)
            if len(plan) == 1 and found > max(checks[stage.name]):
                best = descender.coefficients.detach().clone()
            checks = {**checks, stage.name: [*checks[stage.name], found]}
        elif last:
            best = descender.coefficients.detach().clone()
        state = {} if last else descender.state()
        yield Moment(number + last, step, checks, best, state)
        if last:
            return


def _means(checks: dict[str, list[Check]]) -> list[Check]:
    """The checks of every epoch, averaged over the stages."""
    return [
        Check(sum(c.accuracy for c in row) / len(row), sum(c.gain for c in row) / len(row))
        for row in zip(*checks.values(), strict=False)
    ]


def _best_epoch(checks: dict[str, list[Check]]) -> int:
    """The number of epochs that did best on the folds; none if that was zero-shot."""
    means = _means(checks)
    return max(range(len(means)), key=lambda epoch: means[epoch])


@dataclass(frozen=True)
class Verdict:
    """The coefficients that were chosen, and the checks of zero-shot and of them."""

    coefficients: torch.Tensor
    before: Check
    after: Check

    @property
    def improved(self) -> bool:
        """Whether anything beat zero-shot; if not, the coefficients are zero."""
        return bool(self.coefficients.any())


def settle(material: Material, plan: Sequence[Stage], moment: Moment) -> Verdict:
    """What a run comes to, finished or not; unfinished, the coefficients it had are judged."""
    checks = dict(moment.checks)
    best = moment.best
    if len(plan) == 1 and moment.state and not plan[0].every_epoch:
        current = moment.state["coefficients"]
        found = material.judge(plan[0], current)
        if found > checks[plan[0].name][0]:
            best = current
        checks[plan[0].name] = [*checks[plan[0].name], found]
    means = _means(checks)
    after = max(means) if best.any() else means[0]
    return Verdict(best, means[0], after)
