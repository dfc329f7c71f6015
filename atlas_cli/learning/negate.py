"""Tasks to forget and a control task to keep -> coefficients of the tasks' own vectors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from atlas_cli.core.losses import FORGET
from atlas_cli.learning.batches import TaskData, TaskScore
from atlas_cli.learning.labelled import LabelledObjective
from atlas_cli.learning.selection import Fold, Score, folds_for
from atlas_cli.learning.setup import Setting, training_of
from atlas_cli.recipes.learning import NegateRecipe

_RETREAT = tuple(tenths / 10 for tenths in range(9, 0, -1))


def negate(setting: Setting) -> tuple[LabelledObjective, list[Fold]]:
    """forget(targets) + cross-entropy(control). Half of a batch is the control's."""
    recipe: NegateRecipe = setting.inputs.recipe
    *targets, control = zip(setting.tasks, setting.heads, strict=True)
    loss, share = FORGET[recipe.forget], 0.5 / len(targets)
    streams = [TaskData(pixels, head, loss, share) for pixels, head in targets]
    objective = LabelledObjective(
        setting.tower,
        (*streams, TaskData(*control, share=0.5)),
        training_of(recipe),
        partial(forget, recipe.keep),
        setting.table(),
        references=(setting.table(),) * len(setting.tasks),
        judges=setting.judges,
        scaled=setting.scaled,
        backtrack=_RETREAT,
    )
    return objective, folds_for(recipe.select, setting.tasks, recipe.seed)


def forget(keep: float, scores: Sequence[TaskScore], zero_shot: Sequence[TaskScore]) -> Score:
    """The lower the mean accuracy on the targets the better, if the control keeps its share.

    Valid are coefficients that lower the targets and whose accuracy on the control, the last task,
    is at least `keep` times that of zero-shot. Where the targets are equal, the control decides.
    """
    target, control = _mean_accuracy(scores[:-1]), scores[-1].accuracy
    holds = control >= keep * zero_shot[-1].accuracy
    lower = target < _mean_accuracy(zero_shot[:-1])
    values = {"target": target, "control": control}
    return Score((float(holds), -target, control), values, holds and lower)


def _mean_accuracy(scores: Sequence[TaskScore]) -> float:
    return sum(score.accuracy for score in scores) / len(scores)
