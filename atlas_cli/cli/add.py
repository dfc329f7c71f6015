"""atlas add: one set of coefficients for several tasks."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atlas_cli.cli.console import percent
from atlas_cli.cli.learning import LearningCommand, RunResult, facts_of, open_tasks, source_of
from atlas_cli.cli.options import RunOptions, given_flags, learning_command
from atlas_cli.datasets.dataset import Dataset
from atlas_cli.errors import UsageError
from atlas_cli.recipes.learning import AddRecipe, parse_individual
from atlas_cli.recipes.merge_parameters import parse_merge

if TYPE_CHECKING:
    from atlas_cli.learning.selection import Selection
    from atlas_cli.learning.setup import Inputs, ObjectiveFactory, PreparedRun


@dataclass(frozen=True)
class Adding(LearningCommand):
    """Combine tasks. `compare` names merges to show beside it."""

    compare: tuple[str, ...] = ()
    disentanglement: bool = False
    name = "add"
    schema = AddRecipe

    def open_data(self, recipe: AddRecipe) -> tuple[tuple[Dataset, ...], tuple[Dataset, ...]]:
        """The tasks. Raises UsageError if an accuracy is given for another."""
        for text in self.compare:
            parse_merge(text)
        found = open_tasks(recipe, recipe.data)
        names = [dataset.name for dataset in found[0]]
        if len(set(names)) < len(names):
            raise UsageError(f"a task is given twice: {', '.join(names)}")
        for text in recipe.individual:
            name, _ = parse_individual(text) or ("", 0)
            if name not in names:
                raise UsageError(f"--individual {text}: there is no task {name}")
        return found

    def objective_factory(self) -> ObjectiveFactory:
        """The sum of the tasks' losses."""
        from atlas_cli.learning.add import add

        return add

    @contextmanager
    def vectors_made(self, inputs: Inputs, folder: Path | None) -> Iterator[Inputs]:
        """Trimmed vectors, if that is asked for."""
        if inputs.recipe.ties is None:
            yield inputs
            return
        if folder is None:
            raise UsageError("--ties writes the trimmed vectors into the run's folder; use -o DIR")

        from atlas_cli.learning.run_folder import trimmed_folder
        from atlas_cli.vectors.pool import trim

        with trimmed_folder(folder) as target:
            paths = trim(inputs.vectors, inputs.recipe.ties, target)
            yield dataclasses.replace(inputs, vectors=tuple(paths))

    def check(self, ready: PreparedRun) -> None:
        """For the disentanglement, every task needs a vector of its own."""
        if self.disentanglement:
            _own_vectors(ready)

    def result(self, ready: PreparedRun, selection: Selection, *, brief: bool) -> RunResult:
        """Every task: zero-shot, the best uniform scale, learned, merges, and its own model."""
        from atlas_cli.learning.baselines import contest, individual

        recipe = ready.inputs.recipe
        names = [dataset.name for dataset in ready.inputs.datasets]
        others = ((), ()) if brief else (self.scales(ready), self.compare)
        scores = contest(ready, selection.coefficients, *others)
        own = individual(ready)
        rows = [_row(method, names, found, own) for method, found in scores.items()]
        rows.append(_row("individual", names, own, own))
        before, after = (statistics.fmean(scores[key]) for key in ("zero-shot", recipe.method))
        comment = (
            f"{source_of(ready)}\nMean accuracy on these images: zero-shot {percent(before)}, "
            f"{recipe.method} {percent(after)}."
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
        return RunResult(comment, tuple(notes), {**facts, **facts_of(ready, selection)}, rows)


def _relative(found: Sequence[float], own: Sequence[float | None]) -> float | None:
    """The mean of accuracies, each relative to the task's own model, if all of these are known."""
    pairs = [(value, top) for value, top in zip(found, own, strict=True) if top]
    if len(pairs) < len(found):
        return None
    return statistics.fmean(value / top for value, top in pairs)


def _row(
    method: str, names: Sequence[str], found: Sequence[float | None], own: Sequence[float | None]
) -> dict[str, str]:
    row = {"": method, **dict(zip(names, map(percent, found), strict=True))}
    known = [value for value in found if value is not None]
    row["mean"] = percent(statistics.fmean(known)) if len(known) == len(found) else ""
    row["normalised"] = percent(_relative(known, own)) if len(known) == len(found) else ""
    return row


def _pairs(
    ready: PreparedRun, selection: Selection
) -> tuple[Mapping[str, Mapping[str, float]], str]:
    from atlas_cli.learning.add import disentanglement

    found = disentanglement(ready.setting, selection.coefficients, _own_vectors(ready))
    names = [dataset.name for dataset in ready.inputs.datasets]
    table = {
        name: dict(zip(names, row, strict=True)) for name, row in zip(names, found, strict=True)
    }
    others = [value for a, row in table.items() for b, value in row.items() if a != b]
    mean = statistics.fmean(others) if others else 0.0
    return table, f"disentanglement error, mean over pairs of tasks: {percent(mean)} %"


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


Tasks = Annotated[
    list[str], typer.Argument(metavar="DATA...", help="Images of every task, or a recipe.")
]
Objective = Annotated[
    str | None,
    typer.Option(metavar="WHAT", help="labels (default), or entropy: AdaMerging, without labels."),
]
Init = Annotated[float | None, typer.Option(help="Coefficients at the start; 0, AdaMerging 0.3.")]
Clamp = Annotated[
    str | None, typer.Option(metavar="LOW:HIGH", help="Bounds of coefficients; AdaMerging 0:1.")
]
Ties = Annotated[
    float | None,
    typer.Option(metavar="SHARE", help="Trim vectors as TIES does first; AdaMerging++ 0.2."),
]
Individual = Annotated[
    list[str] | None,
    typer.Option(metavar="DATA=PERCENT", help="Accuracy of a fine-tuned model, to normalise by."),
]
Compare = Annotated[
    list[str] | None,
    typer.Option(metavar="METHOD", help="Merges to show beside it: ties, tsv, iso_c:lambda=1.5"),
]
Pairs = Annotated[
    bool, typer.Option("--disentanglement", help="How much each vector disturbs each other task.")
]


@learning_command
def add(
    data: Tasks,
    objective: Objective = None,
    init: Init = None,
    clamp: Clamp = None,
    ties: Ties = None,
    individual: Individual = None,
    compare: Compare = None,
    disentanglement: Pairs = False,
    *,
    flags: dict[str, Any],
    options: RunOptions,
) -> None:
    """Learn one set of coefficients for all tasks, and print the learned recipe.

    --select is same (default: the images given judge every epoch), val, holdout, last or kfold.

    Example: atlas add cars/ signs/ --model ViT-B-32/openai --vectors v/*.safetensors -o run
    """
    from atlas_cli.cli.learning import run

    own: dict[str, Any] = {"objective": objective, "init": init, "clamp": clamp}
    own |= {"ties": ties, "individual": individual}
    objective_factory = Adding(tuple(compare or ()), disentanglement=disentanglement)
    run(objective_factory, data, {**flags, **given_flags(own)}, options)
