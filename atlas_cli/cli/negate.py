"""atlas negate: forget tasks, and keep a control task."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer

from atlas_cli.cli.console import given_recipe, learning_options, run_learning
from atlas_cli.cli.options import learning_command

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
    **shared: Any,
) -> None:
    """Learn coefficients that forget the targets while a control task keeps its accuracy.

    \b
    Example:
      atlas negate builtin:letters --control builtin:everything --shots 2 \\
        --model builtin:tiny --vectors builtin:letters --epochs 2 -o forget
    """
    from atlas_cli.learning.negate import negate as run
    from atlas_cli.recipes.learning import NegateRecipe

    own = {"control": control, "keep": keep, "forget": forget}
    flags, options, output = learning_options(shared, own)
    recipe = given_recipe(NegateRecipe, data, flags)
    run_learning(partial(run, recipe, options, compare=compare or ()), output)
