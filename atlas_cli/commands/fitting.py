"""What `atlas fit` learns from, and what it says of the result."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atlas_cli.commands.learning import Command, Result, facts_of, open_labelled, source_of
from atlas_cli.data import Dataset, open_dataset
from atlas_cli.errors import DataError
from atlas_cli.learning_recipe import FitRecipe

if TYPE_CHECKING:
    from atlas_cli.learning import Lesson, Prepared
    from atlas_cli.selection import Verdict

_JUDGED = {
    "last": "on the images it learned from",
    "holdout": "on images held out",
    "kfold": "over the folds",
}


class Fitting(Command):
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

    def lesson(self) -> Lesson:
        """Cross-entropy."""
        from atlas_cli.fit import fit

        return fit

    def result(self, ready: Prepared, verdict: Verdict, *, brief: bool) -> Result:
        """The accuracy before and after."""
        assert verdict.before is not None
        assert verdict.after is not None
        before, after = (check.values["accuracy"] for check in (verdict.before, verdict.after))
        select = ready.inputs.recipe.select
        judged = _JUDGED.get(select, f"on {select[4:]}")
        method = ready.inputs.recipe.method
        note = f"zero-shot {100 * before:.2f} -> {method} {100 * after:.2f} {judged}"
        if not verdict.improved:
            note = f"nothing beat zero-shot ({100 * before:.2f} {judged}): all coefficients are 0"
        comment = (
            f"{source_of(ready)}\n"
            f"Accuracy {judged}: zero-shot {100 * before:.2f}, {method} {100 * after:.2f}."
        )
        facts = {"zero_shot": before, "learned": after, **facts_of(ready, verdict)}
        return Result(comment, (note,), facts)
