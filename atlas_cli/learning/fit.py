"""A few labelled images -> coefficients that recognise them."""

from __future__ import annotations

from collections.abc import Sequence

from atlas_cli.learning.batches import Score, Stream
from atlas_cli.learning.labelled import Joint
from atlas_cli.learning.selection import Check, Stage, stages
from atlas_cli.learning.setup import Setting, training_of


def fit(setting: Setting) -> tuple[Joint, list[Stage]]:
    """Cross-entropy on the images of one task."""
    recipe = setting.inputs.recipe
    material = Joint(
        setting.tower,
        (Stream(setting.tasks[0], setting.heads[0]),),
        training_of(recipe),
        recognise,
        setting.table(),
        judges=setting.judges,
        scaled=setting.scaled,
    )
    return material, stages(recipe.select, setting.tasks, recipe.seed)


def recognise(scores: Sequence[Score], references: Sequence[Score]) -> Check:
    """The higher the accuracy the better, and then the mean logarithm of the right class."""
    (found,) = scores
    return Check((found.accuracy, found.gain), {"accuracy": found.accuracy})
