"""Which coefficients of a run are kept, by a policy and scores, and how good they are."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from atlas_cli.datasets.dataset import Dataset, draw_samples, has_split, open_dataset
from atlas_cli.datasets.pixels import Pixels
from atlas_cli.errors import AtlasError
from atlas_cli.learning.batches import hits, predict
from atlas_cli.learning.splits import check_divisible, hold_out_folds, hold_out_quarter
from atlas_cli.recipes.model import as_percent

if TYPE_CHECKING:
    from atlas_cli.core.adapters import Head
    from atlas_cli.learning.results import ClassAccuracy, TaskClasses
    from atlas_cli.learning.setup import PreparedRun

_FOLDS = 4
_TESTED = 500  # test images of a task: more would take longer than learning from a few
_PIXELS = 2**28  # bytes of decoded test images that are kept

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

    def after_pass(self, number: int, values: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
        """What is kept after a training pass that ended with these values."""
        return values if self.folds[number].scoring is Scoring.NEVER else best

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
    check_divisible(tasks, select)
    if select == "holdout":
        held = hold_out_quarter(tasks, seed)
        return BestEpoch(_held_fold("holdout", everything, held, Scoring.EVERY_EPOCH))
    found = validation_folds(tasks, seed, _FOLDS, Scoring.EVERY_EPOCH)
    return KFold(found, Fold("all", everything, None, Scoring.NEVER))


def validation_folds(
    tasks: Sequence[Pixels], seed: int, most: int, scoring: Scoring
) -> tuple[Fold, ...]:
    """Folds for cross-validation, not more than `most`; none if a class has one image."""
    everything = tuple(tuple(range(len(pixels.dataset.samples))) for pixels in tasks)
    return tuple(
        _held_fold(f"fold {number}", everything, held, scoring)
        for number, held in enumerate(hold_out_folds(tasks, seed, most), start=1)
    )


def _held_fold(
    name: str, everything: Indices, held: Sequence[Sequence[int]], scoring: Scoring
) -> Fold:
    """Train on all images but those held out, which score it."""
    rest = tuple(
        tuple(index for index in every if index not in some)
        for every, some in zip(everything, map(set, held), strict=True)
    )
    return Fold(name, rest, tuple(tuple(sorted(some)) for some in held), scoring)


def keep_last(tasks: Sequence[Pixels], scoring: Scoring) -> Last:
    """Train on everything and keep the last step; no image of the tasks scores it."""
    everything = tuple(tuple(range(len(pixels.dataset.samples))) for pixels in tasks)
    return Last(Fold("all", everything, None, scoring))


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


def mean_scores(scores: Scores) -> list[Score]:
    """The scores of every epoch, averaged over the folds."""
    return [_mean(row) for row in zip(*scores.values(), strict=False)]


def _mean(row: Sequence[Score]) -> Score:
    rank = tuple(sum(parts) / len(row) for parts in zip(*(s.rank for s in row), strict=True))
    values = {key: sum(s.values[key] for s in row) / len(row) for key in row[0].values}
    return Score(rank, values, all(score.valid for score in row))


# How good it is: on test images, and class by class -------------------------------------------


@dataclass(frozen=True)
class TestScore:
    """Top-1 in percent on `images` of all `of` test images of a task."""

    __test__ = False  # for pytest: no class of tests

    task: str
    images: int
    of: int
    zero_shot: float
    learned: float

    @property
    def on(self) -> str:
        """The images, in words."""
        return f"{self.images} of {self.of}" if self.images < self.of else f"all {self.images}"

    def __str__(self) -> str:
        changed = f"{self.zero_shot:.2f} -> {self.learned:.2f}"
        return f"{self.task}: test top-1 {changed} on {self.on} test images"


@dataclass(frozen=True)
class Tested:
    """A task's test images, what is predicted for them before and after, and the scores."""

    dataset: Dataset
    before: Sequence[int]
    after: Sequence[int]
    score: TestScore


def score_test_images(
    ready: PreparedRun, selection: Selection, warn: Callable[[str], None]
) -> list[Tested]:
    """Score the test split of every task that has one and was not learned from it."""
    found = []
    options = ready.inputs.options
    heads = (selection.head,) if selection.head else ready.setup.heads
    for task, dataset in enumerate(ready.inputs.datasets):
        whole = _test_split(dataset)
        if whole is None:
            continue
        drawn = replace(whole, samples=draw_samples(whole.samples, _TESTED))
        if options.skip_broken:
            from atlas_cli.datasets.broken import without_broken

            (drawn,) = without_broken([drawn], options.workers, warn)
        view, device = ready.setup.tasks[task].view, ready.setup.clip.device
        pixels = Pixels(drawn, view, _PIXELS, device, options.workers)
        before = _predicted(ready, ready.setup.table(), ready.setup.heads[task], pixels)
        after = _predicted(ready, selection.coefficients, heads[task], pixels)
        labels = pixels.labels
        top1 = [as_percent((some == labels).double().mean().item()) for some in (before, after)]
        score = TestScore(dataset.name, len(drawn.samples), len(whole.samples), *top1)
        found.append(Tested(drawn, before.tolist(), after.tolist(), score))
    return found


def _test_split(dataset: Dataset) -> Dataset | None:
    if dataset.split == "test" or not has_split(dataset.name, "test"):
        return None
    found = open_dataset(dataset.name, split="test", templates=dataset.templates)
    usable = found.labelled and found.samples and found.classes == dataset.classes
    return found if usable else None


def _predicted(
    ready: PreparedRun, coefficients: torch.Tensor, head: object, pixels: Pixels
) -> torch.Tensor:
    model = ready.setup.model
    model.load(coefficients)
    with model.features_for(head):  # type: ignore[arg-type]
        every = range(len(pixels.dataset.samples))
        return predict(model, pixels, every, head).argmax(dim=1).cpu()  # type: ignore[arg-type]


def by_class(ready: PreparedRun, selection: Selection) -> list[TaskClasses]:
    """Zero-shot and with what was learned, for every class of every task that has images."""
    setup = ready.setup
    chosen = [_images(ready, task) for task in range(len(setup.tasks))]
    before = _hits(ready, setup.table(), setup.heads, chosen)
    heads = (selection.head,) if selection.head else setup.heads
    after = _hits(ready, selection.coefficients, heads, chosen)
    return [
        {
            "task": ready.inputs.datasets[task].name,
            "on": words,
            "classes": _classes(pixels, indices, before[task], after[task]),
        }
        for task, (pixels, indices, words) in enumerate(chosen)
    ]


_Chosen = tuple[Pixels, Sequence[int], str]


def _images(ready: PreparedRun, task: int) -> _Chosen:
    """The images that score a task; where only folds are scored, those that it learned from."""
    setup = ready.setup
    if setup.judges:
        pixels = setup.judges[task]
        count = len(pixels.dataset.samples)
        return pixels, range(count), f"{count} images of {pixels.dataset.name} to select on"
    pixels, fold = setup.tasks[task], ready.policy.folds[-1]
    everything = range(len(pixels.dataset.samples))
    indices = everything if fold.scored_on is None else fold.scored_on[task]
    held = set(indices).isdisjoint(fold.train[task])
    words = "images held out" if held else "images that it learned from"
    return pixels, indices, f"{len(indices)} {words}"


def _hits(
    ready: PreparedRun,
    coefficients: torch.Tensor,
    heads: Sequence[torch.Tensor | Head],
    chosen: Sequence[_Chosen],
) -> list[torch.Tensor]:
    model = ready.setup.model
    model.load(coefficients)
    found = []
    for (pixels, indices, _), head in zip(chosen, heads, strict=True):
        with model.features_for(head):
            found.append(hits(predict(model, pixels, indices, head), pixels.labels[list(indices)]))
    return found


def _classes(
    pixels: Pixels, indices: Sequence[int], before: torch.Tensor, after: torch.Tensor
) -> dict[str, ClassAccuracy]:
    labels = pixels.labels[list(indices)]
    found: dict[str, ClassAccuracy] = {}
    for number, name in enumerate(pixels.dataset.classes):
        members = labels == number
        if count := int(members.sum().item()):
            found[name] = {
                "images": count,
                "zero_shot": as_percent(before[members].sum().item() / count),
                "learned": as_percent(after[members].sum().item() / count),
            }
    return found
