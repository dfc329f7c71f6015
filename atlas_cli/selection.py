"""Choosing coefficients without a test: stages of learning, judged by images held out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from atlas_cli.core.descent import Descender
from atlas_cli.errors import AtlasError, DataError
from atlas_cli.few_shot import Check, FewShot, Training, check
from atlas_cli.learn import Step, descend, generator_of
from atlas_cli.pixels import Pixels
from atlas_cli.towers import Tower

_HELD_OUT = 4  # one image in so many of a class
_FOLDS = 4


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
    if not best.isfinite().all():
        raise AtlasError("the coefficients are no longer finite; a lower learning rate may help")
    means = _means(checks)
    after = max(means) if best.any() else means[0]
    return Verdict(best, means[0], after)
