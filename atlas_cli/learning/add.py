"""add: tasks and the vectors of each -> one set of coefficients that serves all of them."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from atlas_cli.datasets.dataset import Dataset
from atlas_cli.errors import UsageError
from atlas_cli.learning.events import Listener, ignore, never
from atlas_cli.learning.results import Cell, LearningResult, Report
from atlas_cli.learning.run import (
    LearningVerb,
    RunInputs,
    RunOptions,
    learn,
    open_tasks,
)
from atlas_cli.recipes.learning import parse_clamp, parse_individual
from atlas_cli.recipes.merge_parameters import check_compared, parse_merge
from atlas_cli.recipes.model import as_percent
from atlas_cli.registry import find_objective

if TYPE_CHECKING:
    from atlas_cli.learning.batches import LabelledObjective, TaskScore
    from atlas_cli.learning.selection import Policy, Score, Selection
    from atlas_cli.learning.setup import PreparedRun, Setup
    from atlas_cli.recipes.learning import AddRecipe


def add(
    recipe: AddRecipe,
    options: RunOptions | None = None,
    *,
    compare: Sequence[str] = (),
    disentanglement: bool = False,
    on_event: Listener = ignore,
    stop: Callable[[], bool] = never,
) -> LearningResult:
    """Learn one set of coefficients for several tasks.

    `compare` names merges to report beside them, such as ties. With `disentanglement`, the result
    says how much each task's vector disturbs each other task.
    """
    verb = Adding(recipe, tuple(compare), disentanglement)
    return learn(verb, options or RunOptions(), on_event, stop)


@dataclass(frozen=True)
class Adding(LearningVerb):
    """Combine tasks. `compare` names merges to report beside it."""

    recipe: AddRecipe
    compare: tuple[str, ...] = ()
    disentanglement: bool = False
    name = "add"

    def open_data(self) -> tuple[tuple[Dataset, ...], tuple[Dataset, ...]]:
        """The tasks. Raises UsageError if an accuracy is given for another."""
        for text in self.compare:
            parse_merge(text)
        found = open_tasks(self.recipe, self.recipe.data)
        names = [dataset.name for dataset in found[0]]
        if len(set(names)) < len(names):
            raise UsageError(f"a task is given twice: {', '.join(names)}")
        for text in self.recipe.individual:
            name, _ = parse_individual(text) or ("", 0)
            if name not in names:
                raise UsageError(f"--individual {text}: there is no task {name}")
        return found

    @contextmanager
    def vectors_made(self, inputs: RunInputs, folder: Path | None) -> Iterator[RunInputs]:
        """Trimmed vectors, if that is asked for."""
        if self.recipe.ties is None:
            yield inputs
            return
        if folder is None:
            raise UsageError("--ties writes the trimmed vectors into the run's folder; use -o DIR")

        from atlas_cli.vectors.trim import trim
        from atlas_cli.vectors.writer import made_vectors

        with made_vectors(folder) as target:
            paths = trim(inputs.files, self.recipe.ties, target)
            yield dataclasses.replace(inputs, files=tuple(paths))

    def check(self, ready: PreparedRun) -> None:
        """For the disentanglement, every task needs a vector of its own."""
        if self.disentanglement:
            _own_vectors(ready)

    def objective(self, setup: Setup) -> tuple[LabelledObjective, Policy]:
        """The sum over tasks of cross-entropy or, without labels, of entropy."""
        import torch

        from atlas_cli.learning.baselines import own_tables
        from atlas_cli.learning.batches import LabelledObjective, TaskData, labelled_loss
        from atlas_cli.learning.selection import Scoring, keep_last, policy_for
        from atlas_cli.learning.setup import training_of

        recipe = self.recipe
        check_compared(self.compare, len(setup.pool.members))
        loss = labelled_loss(recipe.objective, "add")
        share = 1 / len(setup.tasks)
        pairs = zip(setup.tasks, setup.heads, strict=True)
        start = setup.table(recipe.init)
        own = [torch.zeros_like(start) if t is None else t for t in own_tables(setup)]
        given = dict(filter(None, map(parse_individual, recipe.individual)))
        known = [given.get(dataset.name) for dataset in setup.inputs.datasets]
        objective = LabelledObjective(
            setup.model,
            tuple(TaskData(pixels, head, loss, share) for pixels, head in pairs),
            training_of(recipe, parse_clamp(recipe.clamp) if recipe.clamp else None),
            partial(combine, known),
            start,
            references=tuple(own),
            judges=setup.judges,
            scaled=setup.scaled,
        )
        if "labels" in find_objective(recipe.objective, "add").needs:
            return objective, policy_for(recipe.select, setup.tasks, recipe.seed)
        # Labels of the images that are learned from may not be looked at, those of others may.
        if recipe.method == "search" and not setup.judges:
            raise UsageError(
                f"--method search compares accuracies, but --objective {recipe.objective} looks "
                "at no labels; --select val has others"
            )
        return objective, keep_last(setup.tasks, Scoring.AT_END if setup.judges else Scoring.NEVER)

    def report(self, ready: PreparedRun, selection: Selection, *, brief: bool) -> Report:
        """Every task: zero-shot, the best uniform scale, learned, merges, and its own model."""
        from atlas_cli.learning.baselines import accuracies, heading, individual

        method = self.recipe.method
        names = [dataset.name for dataset in ready.inputs.datasets]
        others = ((), ()) if brief else (self.scales(ready), self.compare)
        scores = accuracies(ready, selection.coefficients, *others)
        own = individual(ready)
        methods = scores | ({"individual": own} if any(own) else {})
        rows = [
            {heading(ready): name, **_row(names, found, own)} for name, found in methods.items()
        ]
        before, after = (statistics.fmean(scores[key]) for key in ("zero-shot", method))
        comment = (
            f"{ready.source}\nMean accuracy on these images: zero-shot {before:.2f}, "
            f"{method} {after:.2f}."
        )
        facts: dict[str, object] = {
            "tasks": names,
            "accuracy": scores,
            "individual": own,
            "normalised": {key: _relative(found, own) for key, found in scores.items()},
        }
        notes = []
        if not selection.improved:
            notes.append("nothing beat zero-shot: all coefficients are 0")
        if self.disentanglement and not brief:
            facts["disentanglement"], note = _pairs(ready, selection)
            notes.append(note)
        return Report(comment, tuple(notes), facts, rows)


def combine(
    known: Sequence[float | None], scores: Sequence[TaskScore], individual: Sequence[TaskScore]
) -> Score:
    """The higher the mean accuracy, each relative to the task's own model, the better.

    `known` are accuracies of fine-tuned models that were given; else a task's own model is the
    base and its own vector. Where they are equal, the mean logarithm of the right class decides.
    """
    from atlas_cli.learning.selection import Score

    count = len(scores)
    ceilings = [given or own.accuracy or 1.0 for given, own in zip(known, individual, strict=True)]
    relative = sum(s.accuracy / top for s, top in zip(scores, ceilings, strict=True)) / count
    accuracy = sum(score.accuracy for score in scores) / count
    gain = sum(score.gain for score in scores) / count
    return Score((relative, gain), {"accuracy": accuracy, "normalised": relative})


# The report -----------------------------------------------------------------------------------


def _relative(found: Sequence[float], own: Sequence[float | None]) -> float | None:
    """The mean of accuracies, each relative to the task's own model, if all of these are known."""
    pairs = [(value, top) for value, top in zip(found, own, strict=True) if top]
    if len(pairs) < len(found):
        return None
    return as_percent(statistics.fmean(value / top for value, top in pairs))


def _row(
    names: Sequence[str], found: Sequence[float | None], own: Sequence[float | None]
) -> dict[str, Cell]:
    row: dict[str, Cell] = dict(zip(names, found, strict=True))
    known = [value for value in found if value is not None]
    whole = len(known) == len(found)
    row["mean"] = statistics.fmean(known) if whole else None
    row["normalised"] = _relative(known, own) if whole else None
    return row


def _pairs(
    ready: PreparedRun, selection: Selection
) -> tuple[Mapping[str, Mapping[str, float]], str]:
    from atlas_cli.learning.baselines import disentanglement

    found = disentanglement(ready.setup, selection.coefficients, _own_vectors(ready))
    names = [dataset.name for dataset in ready.inputs.datasets]
    table = {
        name: dict(zip(names, map(as_percent, row), strict=True))
        for name, row in zip(names, found, strict=True)
    }
    others = [value for a, row in table.items() for b, value in row.items() if a != b]
    mean = statistics.fmean(others) if others else 0.0
    return table, f"disentanglement error, mean over pairs of tasks: {mean:.2f} %"


def _own_vectors(ready: PreparedRun) -> list[int]:
    """The number of each task's own vector. Raises UsageError if one has none."""
    from atlas_cli.learning.setup import own_vector

    found = []
    for dataset in ready.inputs.datasets:
        number = own_vector(ready.pool, dataset)
        if number is None:
            raise UsageError(f"--disentanglement: no vector has the name of {dataset.name}")
        found.append(number)
    return found
