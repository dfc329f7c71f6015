"""atlas fit: learn block coefficients from a few images per class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from atlas_cli.cli.learning import LearningCommand, RunResult, facts_of, open_labelled, source_of
from atlas_cli.cli.options import RunOptions, given_flags, learning_command
from atlas_cli.datasets.dataset import Dataset, open_dataset
from atlas_cli.errors import DataError
from atlas_cli.recipes.learning import FitRecipe

if TYPE_CHECKING:
    from atlas_cli.learning.selection import Selection
    from atlas_cli.learning.setup import ObjectiveFactory, PreparedRun


_JUDGED = {
    "last": "on the images it learned from",
    "holdout": "on images held out",
    "kfold": "over the folds",
}


class Fitting(LearningCommand):
    """Recognise a few images of one task."""

    name = "fit"
    schema = FitRecipe
    many = False

    def open_data(self, recipe: FitRecipe) -> tuple[tuple[Dataset, ...], tuple[Dataset, ...]]:
        """The labelled images, and those of val:DATA."""
        dataset = open_labelled(recipe, recipe.data)
        if not recipe.select.startswith("val:"):
            return (dataset,), ()
        name = recipe.select.removeprefix("val:")
        judges = open_dataset(name, templates=dataset.templates, preferred=("val", "valid"))
        if judges.classes != dataset.classes:
            raise DataError(f"{name}: its classes are not those of {dataset.name}")
        return (dataset,), (judges,)

    def objective_factory(self) -> ObjectiveFactory:
        """Cross-entropy."""
        from atlas_cli.learning.fit import fit

        return fit

    def result(self, ready: PreparedRun, selection: Selection, *, brief: bool) -> RunResult:
        """The accuracy before and after."""
        assert selection.before is not None
        assert selection.after is not None
        before, after = (check.values["accuracy"] for check in (selection.before, selection.after))
        select = ready.inputs.recipe.select
        judged = _JUDGED.get(select, f"on {select[4:]}")
        method = ready.inputs.recipe.method
        note = f"zero-shot {100 * before:.2f} -> {method} {100 * after:.2f} {judged}"
        if not selection.improved:
            note = f"nothing beat zero-shot ({100 * before:.2f} {judged}): all coefficients are 0"
        comment = (
            f"{source_of(ready)}\n"
            f"Accuracy {judged}: zero-shot {100 * before:.2f}, {method} {100 * after:.2f}."
        )
        facts = {"zero_shot": before, "learned": after, **facts_of(ready, selection)}
        return RunResult(comment, (note,), facts)


Data = Annotated[
    str, typer.Argument(metavar="DATA", help="Images, or a recipe (.yaml, - for stdin).")
]
AllowTarget = Annotated[
    bool, typer.Option("--allow-target", help="Take vectors learned on the target itself, too.")
]


@learning_command
def fit(
    data: Data, allow_target: AllowTarget = False, *, flags: dict[str, Any], options: RunOptions
) -> None:
    """Learn a coefficient for every block of every task vector, and print the learned recipe.

    --select is last (default), holdout, kfold or val:DATA.

    Example: atlas fit shots/ --model ViT-B-32/openai --vectors v/*.safetensors -o run
    """
    from atlas_cli.cli.learning import run

    run(Fitting(), [data], {**flags, **given_flags({"allow_target": allow_target})}, options)
