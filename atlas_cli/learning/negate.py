"""negate: tasks to forget and a control task to keep -> coefficients of the tasks' own vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from atlas_cli.datasets.dataset import Dataset
from atlas_cli.learning.events import Listener, ignore, never
from atlas_cli.learning.results import Cell, LearningResult, Report
from atlas_cli.learning.run import LearningVerb, RunOptions, learn, open_tasks
from atlas_cli.recipes.merge_parameters import check_compared, parse_merge

if TYPE_CHECKING:
    from atlas_cli.learning.batches import LabelledObjective, TaskScore
    from atlas_cli.learning.selection import Policy, Score, Selection
    from atlas_cli.learning.setup import PreparedRun, Setup
    from atlas_cli.recipes.learning import NegateRecipe

_BACKTRACK = tuple(tenths / 10 for tenths in range(9, 0, -1))
_FAILED = (
    "nothing lowered the accuracy on the target while the control kept {:g} % of its zero-shot "
    "accuracy: all coefficients are 0; a lower --keep may help"
)


def negate(
    recipe: NegateRecipe,
    options: RunOptions | None = None,
    *,
    compare: Sequence[str] = (),
    on_event: Listener = ignore,
    stop: Callable[[], bool] = never,
) -> LearningResult:
    """Learn coefficients that forget some tasks while a control task stays.

    `compare` names merges to report beside them, such as task_arithmetic:weight=-0.5.
    """
    verb = Negating(recipe, tuple(compare))
    return learn(verb, options or RunOptions(), on_event, stop)


@dataclass(frozen=True)
class Negating(LearningVerb):
    """Forget some tasks and keep another. `compare` names merges to report beside it."""

    recipe: NegateRecipe
    compare: tuple[str, ...] = ()
    name = "negate"
    farthest = -1.0

    def open_data(self) -> tuple[tuple[Dataset, ...], tuple[Dataset, ...]]:
        """The targets, and the control last."""
        for text in self.compare:
            parse_merge(text)
        return open_tasks(self.recipe, [*self.recipe.data, self.recipe.control])

    def objective(self, setup: Setup) -> tuple[LabelledObjective, Policy]:
        """forget(targets) + cross-entropy(control). Half of a batch is the control's."""
        from atlas_cli.learning.batches import LabelledObjective, TaskData, labelled_loss
        from atlas_cli.learning.selection import policy_for
        from atlas_cli.learning.setup import training_of

        recipe = self.recipe
        check_compared(self.compare, len(setup.pool.members))
        *targets, control = zip(setup.tasks, setup.heads, strict=True)
        loss, share = labelled_loss(recipe.forget, "negate"), 0.5 / len(targets)
        tasks = [TaskData(pixels, head, loss, share) for pixels, head in targets]
        objective = LabelledObjective(
            setup.model,
            (*tasks, TaskData(*control, share=0.5)),
            training_of(recipe),
            partial(forget, recipe.keep),
            setup.table(),
            references=(setup.table(),) * len(setup.tasks),
            judges=setup.judges,
            scaled=setup.scaled,
            backtrack=_BACKTRACK,
        )
        return objective, policy_for(recipe.select, setup.tasks, recipe.seed)

    def report(self, ready: PreparedRun, selection: Selection, *, brief: bool) -> Report:
        """Targets and control: before, with the best uniform scale, learned, and as merged."""
        from atlas_cli.learning.baselines import accuracies, heading

        others = ((), ()) if brief else (self.scales(ready), self.compare)
        scores = accuracies(ready, selection.coefficients, *others)
        before, after = scores["zero-shot"], scores[self.recipe.method]
        names = [f"target {dataset.name}" for dataset in ready.inputs.datasets[:-1]]
        names.append(f"control {ready.inputs.datasets[-1].name}")
        changes = ", ".join(
            f"{name} {old:.2f} -> {new:.2f}"
            for name, old, new in zip(names, before, after, strict=True)
        )
        facts = {
            "tasks": [dataset.name for dataset in ready.inputs.datasets],
            "accuracy": scores,
        }
        failed = None if selection.improved else _FAILED.format(100 * self.recipe.keep)
        comment = f"{ready.source}\nAccuracy on these images: {changes}."
        rows: list[dict[str, Cell]] = [
            {heading(ready): method, **dict(zip(names, found, strict=True))}
            for method, found in scores.items()
        ]
        return Report(comment, (), facts, rows, failed)


def forget(keep: float, scores: Sequence[TaskScore], zero_shot: Sequence[TaskScore]) -> Score:
    """The lower the mean accuracy on the targets the better, if the control keeps its share.

    Valid are coefficients that lower the targets and whose accuracy on the control, the last task,
    is at least `keep` times that of zero-shot. Where the targets are equal, the control decides.
    """
    from atlas_cli.learning.selection import Score

    target, control = _mean_accuracy(scores[:-1]), scores[-1].accuracy
    holds = control >= keep * zero_shot[-1].accuracy
    lower = target < _mean_accuracy(zero_shot[:-1])
    values = {"target": target, "control": control}
    return Score((float(holds), -target, control), values, holds and lower)


def _mean_accuracy(scores: Sequence[TaskScore]) -> float:
    return sum(score.accuracy for score in scores) / len(scores)
