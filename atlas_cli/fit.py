"""A few labelled images -> coefficients that recognise them."""

from __future__ import annotations

from collections.abc import Sequence

from atlas_cli.joint import Joint
from atlas_cli.learning import Setting, training_of
from atlas_cli.selection import Check, Stage, stages
from atlas_cli.streams import Score, Stream


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
