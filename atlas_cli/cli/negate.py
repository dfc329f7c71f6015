"""atlas negate: forget tasks, and keep a control task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atlas_cli.cli.console import percent
from atlas_cli.cli.learning import LearningCommand, RunResult, facts_of, open_tasks, source_of
from atlas_cli.cli.options import RunOptions, given_flags, learning_command
from atlas_cli.datasets.dataset import Dataset
from atlas_cli.recipes.learning import NegateRecipe
from atlas_cli.recipes.merge_parameters import parse_merge

if TYPE_CHECKING:
    from atlas_cli.learning.selection import Selection
    from atlas_cli.learning.setup import ObjectiveFactory, PreparedRun


@dataclass(frozen=True)
class Negating(LearningCommand):
    """Forget some tasks and keep another. `compare` names merges to show beside it."""

    compare: tuple[str, ...] = ()
    name = "negate"
    schema = NegateRecipe
    farthest = -1.0

    def open_data(self, recipe: NegateRecipe) -> tuple[tuple[Dataset, ...], tuple[Dataset, ...]]:
        """The targets, and the control last."""
        for text in self.compare:
            parse_merge(text)
        return open_tasks(recipe, [*recipe.data, recipe.control])

    def objective_factory(self) -> ObjectiveFactory:
        """Forgetting."""
        from atlas_cli.learning.negate import negate

        return negate

    def result(self, ready: PreparedRun, selection: Selection, *, brief: bool) -> RunResult:
        """Targets and control: before, with the best uniform scale, learned, and as merged."""
        from atlas_cli.learning.baselines import contest

        recipe = ready.inputs.recipe
        others = ((), ()) if brief else (self.scales(ready), self.compare)
        scores = contest(ready, selection.coefficients, *others)
        before, after = scores["zero-shot"], scores[recipe.method]
        names = [f"target {dataset.name}" for dataset in ready.inputs.datasets[:-1]]
        names.append(f"control {ready.inputs.datasets[-1].name}")
        changes = ", ".join(
            f"{name} {percent(old)} -> {percent(new)}"
            for name, old, new in zip(names, before, after, strict=True)
        )
        facts = {
            "tasks": [dataset.name for dataset in ready.inputs.datasets],
            "accuracy": scores,
            **facts_of(ready, selection),
        }
        failed = None if selection.improved else _FAILED.format(100 * recipe.keep)
        comment = f"{source_of(ready)}\nAccuracy on these images: {changes}."
        rows = [
            {"": method, **dict(zip(names, map(percent, found), strict=True))}
            for method, found in scores.items()
        ]
        return RunResult(comment, (), facts, rows, failed)


_FAILED = (
    "nothing lowered the accuracy on the target while the control kept {:g} % of its zero-shot "
    "accuracy: all coefficients are 0; a lower --keep may help"
)


Targets = Annotated[
    list[str],
    typer.Argument(metavar="DATA...", help="Images of the tasks to forget, or a recipe."),
]
Control = Annotated[
    str | None, typer.Option("--control", metavar="DATA", help="Images of the task to keep.")
]
Keep = Annotated[
    float | None,
    typer.Option("--keep", help="Share of its zero-shot accuracy the control keeps; 0.95."),
]
Forget = Annotated[
    str | None,
    typer.Option(metavar="LOSS", help="unlikelihood (default), ascent or uniform."),
]
Compare = Annotated[
    list[str] | None,
    typer.Option(metavar="METHOD", help="Merges to show beside it: task_arithmetic:weight=-0.5"),
]


@learning_command
def negate(
    data: Targets,
    control: Control = None,
    keep: Keep = None,
    forget: Forget = None,
    compare: Compare = None,
    *,
    flags: dict[str, Any],
    options: RunOptions,
) -> None:
    """Learn coefficients that forget the target while the control stays, and print the recipe.

    --select is same (default: the images given judge every epoch), val, holdout, last or kfold.

    Example: atlas negate cars/ --control photos/ --model ViT-B-32/openai --vector cars.safetensors
    """
    from atlas_cli.cli.learning import run

    own = {"control": control, "keep": keep, "forget": forget}
    run(Negating(tuple(compare or ())), data, {**flags, **given_flags(own)}, options)
