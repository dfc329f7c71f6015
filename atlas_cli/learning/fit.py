"""fit: a few labelled images of one task -> coefficients that recognise them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atlas_cli.datasets.dataset import Dataset, open_dataset
from atlas_cli.errors import DataError
from atlas_cli.learning.events import Listener, ignore, never
from atlas_cli.learning.run import (
    LearningResult,
    LearningVerb,
    Report,
    RunOptions,
    learn,
    open_labelled,
    source_of,
)

if TYPE_CHECKING:
    from atlas_cli.learning.batches import LabelledObjective, TaskScore
    from atlas_cli.learning.selection import Policy, Score, Selection
    from atlas_cli.learning.setup import PreparedRun, Setup
    from atlas_cli.recipes.learning import FitRecipe

_SCORED = {
    "last": "on the images it learned from",
    "holdout": "on images held out",
    "kfold": "over the folds",
}


def fit(
    recipe: FitRecipe,
    options: RunOptions | None = None,
    *,
    on_event: Listener = ignore,
    stop: Callable[[], bool] = never,
) -> LearningResult:
    """Learn a coefficient for every block of every task vector from labelled images."""
    return learn(Fitting(recipe), options or RunOptions(), on_event, stop)


@dataclass(frozen=True)
class Fitting(LearningVerb):
    """Recognise a few images of one task."""

    recipe: FitRecipe
    name = "fit"

    def open_data(self) -> tuple[tuple[Dataset, ...], tuple[Dataset, ...]]:
        """The labelled images, and those of val:DATA."""
        recipe = self.recipe
        dataset = open_labelled(recipe, recipe.data)
        if not recipe.select.startswith("val:"):
            return (dataset,), ()
        name = recipe.select.removeprefix("val:")
        judges = open_dataset(name, templates=dataset.templates, preferred=("val", "valid"))
        if judges.classes != dataset.classes:
            raise DataError(f"{name}: its classes are not those of {dataset.name}")
        return (dataset,), (judges,)

    def objective(self, setup: Setup) -> tuple[LabelledObjective, Policy]:
        """Cross-entropy on the images of one task."""
        from atlas_cli.learning.batches import LabelledObjective, TaskData
        from atlas_cli.learning.selection import policy_for
        from atlas_cli.learning.setup import training_of

        objective = LabelledObjective(
            setup.model,
            (TaskData(setup.tasks[0], setup.heads[0]),),
            training_of(self.recipe),
            recognise,
            setup.table(),
            judges=setup.judges,
            scaled=setup.scaled,
        )
        return objective, policy_for(self.recipe.select, setup.tasks, self.recipe.seed)

    def report(self, ready: PreparedRun, selection: Selection, *, brief: bool) -> Report:
        """The accuracy before and after."""
        assert selection.before is not None
        assert selection.after is not None
        before, after = (score.values["accuracy"] for score in (selection.before, selection.after))
        select, method = self.recipe.select, self.recipe.method
        scored = _SCORED.get(select, f"on {select[4:]}")
        note = f"zero-shot {100 * before:.2f} -> {method} {100 * after:.2f} {scored}"
        if not selection.improved:
            note = f"nothing beat zero-shot ({100 * before:.2f} {scored}): all coefficients are 0"
        comment = (
            f"{source_of(ready)}\n"
            f"Accuracy {scored}: zero-shot {100 * before:.2f}, {method} {100 * after:.2f}."
        )
        return Report(comment, (note,), {"zero_shot": before, "learned": after})


def recognise(scores: Sequence[TaskScore], references: Sequence[TaskScore]) -> Score:
    """The higher the accuracy the better, and then the mean logarithm of the right class."""
    from atlas_cli.learning.selection import Score

    (found,) = scores
    return Score((found.accuracy, found.gain), {"accuracy": found.accuracy})
