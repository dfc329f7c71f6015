"""Which coefficients of a run are kept: the images that score them, and the policy that decides."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from atlas_cli.datasets.pixels import Pixels
from atlas_cli.errors import AtlasError, DataError
from atlas_cli.learning.batches import generator_of

if TYPE_CHECKING:
    from atlas_cli.core.adapters import Head
    from atlas_cli.learning.loop import Objective

_HELD_OUT = 4  # one image in so many of a class
_TENTH, _MOST = 0.1, 5000  # of all images, where there are many of them
_FOLDS = 4

Indices = tuple[tuple[int, ...], ...]  # of the images of every task


class Scoring(enum.Enum):
    """When the coefficients of a fold are scored."""

    NEVER = enum.auto()
    AT_END = enum.auto()
    EVERY_EPOCH = enum.auto()


@dataclass(frozen=True)
class Fold:
    """One training pass from the start: the images it learns from, and when it is scored.

    `scored_on` are the images that score it, or None if other datasets do, or nothing.
    """

    name: str
    train: Indices
    scored_on: Indices | None
    scoring: Scoring


@dataclass(frozen=True, order=True)
class Score:
    """How good coefficients are, ordered by `rank` from worse to better.

    `values` are the numbers to report. Coefficients that are not `valid` break a rule and are
    never kept.
    """

    rank: tuple[float, ...]
    values: Mapping[str, float] = field(default_factory=dict, compare=False)
    valid: bool = field(default=True, compare=False)


Scores = Mapping[str, Sequence[Score]]  # of every fold that is scored, by name; zero-shot first


# Policies -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Policy(ABC):
    """Which training passes a run takes, and which coefficients it keeps."""

    @property
    @abstractmethod
    def folds(self) -> tuple[Fold, ...]:
        """The training passes, in order."""

    def steps(self, fold: Fold, scores: Scores, steps: int, epoch_steps: int) -> int:
        """How many steps of a fold are taken; `steps` is what its data has."""
        return steps

    def keeps(self, found: Score, before: Sequence[Score]) -> bool:
        """Whether coefficients with this score replace the best so far of their fold."""
        return found.valid and found > max(before)

    @property
    def backtracks(self) -> bool:
        """Whether smaller tables are tried where nothing valid was found."""
        return True


@dataclass(frozen=True)
class Last(Policy):
    """Keep the last step. If it is scored, zero-shot is kept where the last step is no better."""

    fold: Fold

    @property
    def folds(self) -> tuple[Fold, ...]:
        return (self.fold,)


@dataclass(frozen=True)
class BestEpoch(Policy):
    """Keep the epoch with the best valid score, or zero-shot if none beats it.

    The fold says what scores an epoch: the training images themselves (`same`), images held out
    (`holdout`), other datasets (`val`), or predictions without labels (`guard`).
    """

    fold: Fold

    @property
    def folds(self) -> tuple[Fold, ...]:
        return (self.fold,)


@dataclass(frozen=True)
class KFold(Policy):
    """Find the best number of epochs by cross-validation, then train on everything as long."""

    validation: tuple[Fold, ...]
    final: Fold

    @property
    def folds(self) -> tuple[Fold, ...]:
        return (*self.validation, self.final)

    def steps(self, fold: Fold, scores: Scores, steps: int, epoch_steps: int) -> int:
        if fold is not self.final:
            return steps
        means = mean_scores(scores)
        return max(range(len(means)), key=lambda epoch: means[epoch]) * epoch_steps

    def keeps(self, found: Score, before: Sequence[Score]) -> bool:
        """Never: the folds only count epochs."""
        return False

    @property
    def backtracks(self) -> bool:
        return False


@dataclass(frozen=True)
class Validated(Policy):
    """Score what a training pass comes to on folds, then train on everything as long."""

    validation: tuple[Fold, ...]
    final: Fold

    @property
    def folds(self) -> tuple[Fold, ...]:
        return (*self.validation, self.final)

    def keeps(self, found: Score, before: Sequence[Score]) -> bool:
        """Never: the folds only tell how well it goes."""
        return False

    @property
    def backtracks(self) -> bool:
        return False


def validated(tasks: Sequence[Pixels], seed: int, most: int) -> Validated:
    """Folds, up to so many, that are scored at their end; none if a class has one image."""
    everything = tuple(tuple(range(len(pixels.dataset.samples))) for pixels in tasks)
    classes = [_by_class(pixels, seed) for pixels in tasks]
    folds = min(most, min(len(some) for each in classes for some in each))
    found = []
    for fold in range(folds if folds > 1 else 0):
        held = [[i for some in each for i in some[fold::folds]] for each in classes]
        one = _held_fold(f"fold {fold + 1}", everything, held)
        found.append(replace(one, scoring=Scoring.AT_END))
    return Validated(tuple(found), Fold("all", everything, None, Scoring.NEVER))


def policy_for(select: str, tasks: Sequence[Pixels], seed: int) -> Policy:
    """The policy that `--select` names. Raises DataError if there are too few images for it."""
    everything = tuple(tuple(range(len(pixels.dataset.samples))) for pixels in tasks)
    if select == "last":
        return Last(Fold("all", everything, everything, Scoring.AT_END))
    if select == "same":
        return BestEpoch(Fold("all", everything, everything, Scoring.EVERY_EPOCH))
    if select == "val" or select.startswith("val:"):
        return BestEpoch(Fold("val", everything, None, Scoring.EVERY_EPOCH))
    if select not in ("holdout", "kfold"):
        raise ValueError(f"no policy is called {select!r}")
    classes = [_by_class(pixels, seed) for pixels in tasks]
    for pixels, members in zip(tasks, classes, strict=True):
        if min(map(len, members)) < 2:
            raise DataError(
                f"{pixels.dataset.name}: --select {select} needs two images of every class or "
                "more; use --select last, or val:DATA"
            )
    if select == "holdout":
        held = [[i for some in each for i in some[: _held_of(some)]] for each in classes]
        return BestEpoch(_held_fold("holdout", everything, held))
    folds = min(_FOLDS, min(len(some) for each in classes for some in each))
    found = []
    for fold in range(folds):
        held = [[i for some in each for i in some[fold::folds]] for each in classes]
        found.append(_held_fold(f"fold {fold + 1}", everything, held))
    return KFold(tuple(found), Fold("all", everything, None, Scoring.NEVER))


def keep_last(tasks: Sequence[Pixels], scoring: Scoring) -> Last:
    """Train on everything and keep the last step; no image of the tasks scores it."""
    everything = tuple(tuple(range(len(pixels.dataset.samples))) for pixels in tasks)
    return Last(Fold("all", everything, None, scoring))


# Splits ---------------------------------------------------------------------------------------


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


def _held_fold(name: str, everything: Indices, held: Sequence[Sequence[int]]) -> Fold:
    """Train on all images but those held out, which score every epoch."""
    rest = tuple(
        tuple(index for index in every if index not in some)
        for every, some in zip(everything, map(set, held), strict=True)
    )
    return Fold(name, rest, tuple(tuple(sorted(some)) for some in held), Scoring.EVERY_EPOCH)


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


# The result -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Selection:
    """The coefficients that are kept, and the scores of zero-shot and of them, if anything scored.

    `scores` are those of all candidates, zero-shot first; a search keeps none of them. `head` is
    what was learned on top of the features, if anything was, and `choice` what folds decided.
    """

    coefficients: torch.Tensor
    before: Score | None
    after: Score | None
    scores: tuple[Score, ...] = ()
    head: Head | None = None
    choice: str | None = None

    @property
    def improved(self) -> bool:
        """Whether anything beat zero-shot; if not, the coefficients are zero, with no head."""
        return bool(self.coefficients.any()) or self.head is not None


def select(best: torch.Tensor, scores: Scores) -> Selection:
    """The selection of a run whose best coefficients are known.

    Raises AtlasError if they are not finite.
    """
    if not best.isfinite().all():
        raise AtlasError("the coefficients are no longer finite; a lower learning rate may help")
    means = mean_scores(scores)
    if not means:
        return Selection(best, None, None)
    after = max(score for score in means if score.valid) if best.any() else means[0]
    return Selection(best, means[0], after, tuple(means))


def search_tables(objective: Objective, fold: Fold, tables: Iterable[torch.Tensor]) -> Selection:
    """The best of some tables by what scores a fold; zero if none of them is better."""
    zero = torch.zeros_like(objective.start)
    before = objective.judge(fold, zero)
    best, after = zero, before
    for table in tables:
        found = objective.judge(fold, table)
        if found.valid and found > after:
            best, after = table, found
    return Selection(best, before, after)


def mean_scores(scores: Scores) -> list[Score]:
    """The scores of every epoch, averaged over the folds."""
    return [_mean(row) for row in zip(*scores.values(), strict=False)]


def _mean(row: Sequence[Score]) -> Score:
    rank = tuple(sum(parts) / len(row) for parts in zip(*(s.rank for s in row), strict=True))
    values = {key: sum(s.values[key] for s in row) / len(row) for key in row[0].values}
    return Score(rank, values, all(score.valid for score in row))
