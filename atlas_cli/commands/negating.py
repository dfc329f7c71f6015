"""What `atlas negate` forgets, and what it says of the result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from atlas_cli.commands.learning import Command, Result, facts_of, open_tasks, source_of
from atlas_cli.commands.output import percent
from atlas_cli.data import Dataset
from atlas_cli.learning_recipe import NegateRecipe
from atlas_cli.settings import parse_merge

if TYPE_CHECKING:
    from atlas_cli.learning import Lesson, Prepared
    from atlas_cli.selection import Verdict


@dataclass(frozen=True)
class Negating(Command):
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

    def lesson(self) -> Lesson:
        """Forgetting."""
        from atlas_cli.negate import negate

        return negate

    def result(self, ready: Prepared, verdict: Verdict, *, brief: bool) -> Result:
        """Targets and control: before, with the best uniform scale, learned, and as merged."""
        from atlas_cli.contest import contest

        recipe = ready.inputs.recipe
        others = ((), ()) if brief else (self.scales(ready), self.compare)
        scores = contest(ready, verdict.coefficients, *others)
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
            **facts_of(ready, verdict),
        }
        failed = None if verdict.improved else _FAILED.format(100 * recipe.keep)
        comment = f"{source_of(ready)}\nAccuracy on these images: {changes}."
        rows = [
            {"": method, **dict(zip(names, map(percent, found), strict=True))}
            for method, found in scores.items()
        ]
        return Result(comment, (), facts, rows, failed)


_FAILED = (
    "nothing lowered the accuracy on the target while the control kept {:g} % of its zero-shot "
    "accuracy: all coefficients are 0; a lower --keep may help"
)
