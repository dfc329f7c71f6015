"""A few labelled images -> coefficients that recognise them."""

from __future__ import annotations

from collections.abc import Sequence

from atlas_cli.learning.batches import TaskData, TaskScore
from atlas_cli.learning.labelled import LabelledObjective
from atlas_cli.learning.selection import Fold, Score, folds_for
from atlas_cli.learning.setup import Setting, training_of


def fit(setting: Setting) -> tuple[LabelledObjective, list[Fold]]:
    """Cross-entropy on the images of one task."""
    recipe = setting.inputs.recipe
    objective = LabelledObjective(
        setting.tower,
        (TaskData(setting.tasks[0], setting.heads[0]),),
        training_of(recipe),
        recognise,
        setting.table(),
        judges=setting.judges,
        scaled=setting.scaled,
    )
    return objective, folds_for(recipe.select, setting.tasks, recipe.seed)


def recognise(scores: Sequence[TaskScore], references: Sequence[TaskScore]) -> Score:
    """The higher the accuracy the better, and then the mean logarithm of the right class."""
    (found,) = scores
    return Score((found.accuracy, found.gain), {"accuracy": found.accuracy})
