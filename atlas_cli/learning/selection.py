"""Choosing coefficients without a test: stages of learning, judged by images held out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from atlas_cli.core.optimizers import CoefficientOptimizer, SharpnessAwareOptimizer
from atlas_cli.datasets.pixels import Pixels
from atlas_cli.errors import AtlasError, DataError
from atlas_cli.learning.batches import TrainingConfig
from atlas_cli.learning.loop import Optimizer, Step, TrainingData, descend, generator_of
from atlas_cli.models.composed import ComposedModel

_HELD_OUT = 4  # one image in so many of a class
_TENTH, _MOST = 0.1, 5000  # of all images, where there are many of them
_FOLDS = 4

Indices = tuple[tuple[int, ...], ...]  # of the images of every task


@dataclass(frozen=True)
class Fold:
    """One descent: the images it learns from, those that judge it, and how often they do."""

    name: str
    train: Indices
    judged_by: Indices
    every_epoch: bool


def folds_for(select: str, tasks: Sequence[Pixels], seed: int) -> list[Fold]:
    """The descents that a way to select needs. Raises DataError if there are too few images."""
    everything = tuple(tuple(range(len(pixels.dataset.samples))) for pixels in tasks)
    if select == "val" or select.startswith("val:"):
        return [Fold("val", everything, (), True)]
    if select in ("last", "same"):
        return [Fold("all", everything, everything, select == "same")]
    if select == "blind":
        return [Fold("all", everything, (), False)]
    classes = [_by_class(pixels, seed) for pixels in tasks]
    for pixels, members in zip(tasks, classes, strict=True):
        if min(map(len, members)) < 2:
            raise DataError(
                f"{pixels.dataset.name}: --select {select} needs two images of every class or "
                "more; use --select last, or val:DATA"
            )
    if select == "holdout":
        held = [[i for some in each for i in some[: _held_of(some)]] for each in classes]
        return [Fold("holdout", _rest(everything, held), _sorted(held), True)]
    folds = min(_FOLDS, min(len(some) for each in classes for some in each))
    found = []
    for fold in range(folds):
        held = [[i for some in each for i in some[fold::folds]] for each in classes]
        found.append(Fold(f"fold {fold + 1}", _rest(everything, held), _sorted(held), True))
    return [*found, Fold("all", everything, (), False)]


def hold_out(pixels: Pixels, seed: int) -> tuple[int, ...]:
    """A tenth of every class, but one image at least of every class that has two, and 5000 in all.

    None if every class has one image only.
    """
    classes = _by_class(pixels, seed)
    share = min(_TENTH, _MOST / len(pixels.dataset.samples))
    held = [some[: max(1, int(share * len(some)))] for some in classes if len(some) > 1]
    return tuple(sorted(index for some in held for index in some))


def _held_of(members: Sequence[int]) -> int:
    return max(1, len(members) // _HELD_OUT)


def _sorted(held: Iterable[Sequence[int]]) -> Indices:
    return tuple(tuple(sorted(some)) for some in held)


def _rest(everything: Indices, held: Sequence[Sequence[int]]) -> Indices:
    return tuple(
        tuple(index for index in every if index not in some)
        for every, some in zip(everything, map(set, held), strict=True)
    )


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


@dataclass(frozen=True, order=True)
class Score:
    """How good coefficients are, ordered by `rank` from worse to better.

    `values` are the numbers that people are told. Coefficients that are not `valid` break a rule
    and are never chosen.
    """

    rank: tuple[float, ...]
    values: Mapping[str, float] = field(default_factory=dict, compare=False)
    valid: bool = field(default=True, compare=False)


@dataclass(frozen=True)
class Checkpoint:
    """Where a run stands after a step: all that going on depends on, and the best so far."""

    fold: int
    step: Step | None
    checks: dict[str, list[Score]]
    best: torch.Tensor
    state: dict[str, torch.Tensor] = field(repr=False)


class Objective(Protocol):
    """All that learning works with. Coefficients descend from `start`; zero-shot is the floor."""

    @property
    def tower(self) -> ComposedModel:
        """The model that is composed."""

    @property
    def training(self) -> TrainingConfig:
        """How coefficients descend."""

    @property
    def start(self) -> torch.Tensor:
        """The coefficients before the first step."""

    @property
    def backtrack(self) -> tuple[float, ...]:
        """Shares of the last coefficients that are tried if no epoch is valid."""

    @property
    def scaled(self) -> bool:
        """Whether losses are scaled, as half precision needs."""

    def is_judged(self, fold: Fold) -> bool:
        """Whether there is anything to judge a stage by."""

    def judge(self, fold: Fold, coefficients: torch.Tensor) -> Score:
        """How good coefficients are on what judges a stage."""

    def problem(self, fold: Fold) -> TrainingData:
        """What a stage learns."""


def begin(objective: Objective, plan: Sequence[Fold]) -> Checkpoint:
    """Before the first step: zero-shot, the floor of every stage that is judged."""
    zero = torch.zeros_like(objective.start)
    judged = [fold for fold in plan if objective.is_judged(fold)]
    checks = {fold.name: [objective.judge(fold, zero)] for fold in judged}
    return Checkpoint(0, None, checks, zero, {})


def learn(
    objective: Objective, plan: Sequence[Fold], checkpoint: Checkpoint
) -> Iterator[Checkpoint]:
    """Go through the stages that remain and yield after every step. The last has the result."""
    for number in range(checkpoint.fold, len(plan)):
        for found in _train_fold(objective, plan, number, checkpoint):
            checkpoint = found
            yield checkpoint


def _train_fold(
    objective: Objective, plan: Sequence[Fold], number: int, checkpoint: Checkpoint
) -> Iterator[Checkpoint]:
    fold, problem = plan[number], objective.problem(plan[number])
    optimizer = make_optimizer(objective, problem.steps)
    if checkpoint.state:
        optimizer.restore(checkpoint.state)
        problem.restore(checkpoint.state)
    limit = problem.steps
    if len(plan) > 1 and number == len(plan) - 1:  # after the folds: as long as they did best
        limit = _best_epoch(checkpoint.checks) * problem.epoch_steps
    if optimizer.number >= limit:
        return
    checks, best = dict(checkpoint.checks), checkpoint.best
    for step in descend(objective.tower, optimizer, problem):
        last = step.number == limit
        ends = fold.every_epoch and step.number % problem.epoch_steps == 0
        if fold.name in checks and (last or ends):
            found = objective.judge(fold, optimizer.values)
            if len(plan) == 1 and found.valid and found > max(checks[fold.name]):
                best = optimizer.values
            checks = {**checks, fold.name: [*checks[fold.name], found]}
            if last and len(plan) == 1 and not best.any():
                best, tried = _backtrack(objective, fold, optimizer.values)
                checks = {**checks, fold.name: [*checks[fold.name], *tried]}
        elif last:
            best = optimizer.values
        state = {} if last else {**problem.state(), **optimizer.state()}
        yield Checkpoint(number + last, step, checks, best, state)
        if last:
            return


def _backtrack(
    objective: Objective, fold: Fold, last: torch.Tensor
) -> tuple[torch.Tensor, list[Score]]:
    """The best of the last coefficients scaled down, where no epoch was valid; zero if none is."""
    tables = [share * last for share in objective.backtrack]
    tried = [objective.judge(fold, table) for table in tables]
    valid = [number for number, check in enumerate(tried) if check.valid]
    if not valid:
        return torch.zeros_like(last), tried
    return tables[max(valid, key=lambda number: tried[number])], tried


def make_optimizer(objective: Objective, steps: int) -> Optimizer[torch.Tensor]:
    """Coefficients at their start, with the descent that is wanted."""
    optimizer_config = objective.training.optimizer_config
    if optimizer_config.sharp:
        return SharpnessAwareOptimizer(objective.start, steps, optimizer_config)
    return CoefficientOptimizer(objective.start, steps, optimizer_config, scaled=objective.scaled)


def _means(checks: dict[str, list[Score]]) -> list[Score]:
    """The checks of every epoch, averaged over the stages."""
    return [_mean(row) for row in zip(*checks.values(), strict=False)]


def _mean(row: Sequence[Score]) -> Score:
    rank = tuple(sum(parts) / len(row) for parts in zip(*(c.rank for c in row), strict=True))
    values = {key: sum(c.values[key] for c in row) / len(row) for key in row[0].values}
    return Score(rank, values, all(check.valid for check in row))


def _best_epoch(checks: dict[str, list[Score]]) -> int:
    """The number of epochs that did best on the folds; none if that was zero-shot."""
    means = _means(checks)
    return max(range(len(means)), key=lambda epoch: means[epoch])


@dataclass(frozen=True)
class Selection:
    """The coefficients that were chosen, and the checks of zero-shot and of them, if any.

    `checks` are those of all that was to choose from, zero-shot first.
    """

    coefficients: torch.Tensor
    before: Score | None
    after: Score | None
    checks: tuple[Score, ...] = ()

    @property
    def improved(self) -> bool:
        """Whether anything beat zero-shot; if not, the coefficients are zero."""
        return bool(self.coefficients.any())


def select_coefficients(
    objective: Objective, plan: Sequence[Fold], checkpoint: Checkpoint
) -> Selection:
    """What a run comes to, finished or not; unfinished, the coefficients it had are judged."""
    checks = dict(checkpoint.checks)
    best = checkpoint.best
    if len(plan) == 1 and checkpoint.state and not plan[0].every_epoch:
        current = objective.training.optimizer_config.bounded(checkpoint.state["coefficients"])
        if not checks:
            best = current
        else:
            found = objective.judge(plan[0], current)
            if found.valid and found > checks[plan[0].name][0]:
                best = current
            checks[plan[0].name] = [*checks[plan[0].name], found]
    if not best.isfinite().all():
        raise AtlasError("the coefficients are no longer finite; a lower learning rate may help")
    means = _means(checks)
    if not means:
        return Selection(best, None, None)
    after = max(check for check in means if check.valid) if best.any() else means[0]
    return Selection(best, means[0], after, tuple(means))


def search_tables(objective: Objective, fold: Fold, tables: Iterable[torch.Tensor]) -> Selection:
    """The best of some tables by what judges a stage; zero if none of them is better."""
    zero = torch.zeros_like(objective.start)
    before = objective.judge(fold, zero)
    best, after = zero, before
    for table in tables:
        found = objective.judge(fold, table)
        if found.valid and found > after:
            best, after = table, found
    return Selection(best, before, after)
