"""atlas add: one set of coefficients for several tasks."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer

from atlas_cli.cli.console import given_recipe, learning_options, run_learning
from atlas_cli.cli.options import learning_command

Tasks = Annotated[
    list[str], typer.Argument(metavar="DATA...", help="Images of every task, or a recipe.")
]
Objective = Annotated[
    str | None,
    typer.Option(metavar="WHAT", help="labels (default), or entropy: AdaMerging, without labels."),
]
Init = Annotated[float | None, typer.Option(help="Coefficients at the start; 0, AdaMerging 0.3.")]
Clamp = Annotated[
    str | None, typer.Option(metavar="LOW:HIGH", help="Bounds of coefficients; AdaMerging 0:1.")
]
Ties = Annotated[
    float | None,
    typer.Option(metavar="SHARE", help="Trim vectors as TIES does first; AdaMerging++ 0.2."),
]
Individual = Annotated[
    list[str] | None,
    typer.Option(metavar="DATA=PERCENT", help="Accuracy of a fine-tuned model, to normalise by."),
]
Compare = Annotated[
    list[str] | None,
    typer.Option(metavar="METHOD", help="Merges to show beside it: ties, tsv, iso_c:lambda=1.5"),
]
Pairs = Annotated[
    bool, typer.Option("--disentanglement", help="How much each vector disturbs each other task.")
]


@learning_command
def add(
    data: Tasks,
    objective: Objective = None,
    init: Init = None,
    clamp: Clamp = None,
    ties: Ties = None,
    individual: Individual = None,
    compare: Compare = None,
    disentanglement: Pairs = False,
    **shared: Any,
) -> None:
    """Learn one set of coefficients for several tasks.

    \b
    Example:
      atlas add builtin:digits builtin:signs --shots 2 --model builtin:tiny \\
        --vectors builtin:digits builtin:signs --epochs 2 -o both
    """
    from atlas_cli.learning.add import add as run
    from atlas_cli.recipes.learning import AddRecipe

    own: dict[str, Any] = {"objective": objective, "init": init, "clamp": clamp}
    own |= {"ties": ties, "individual": individual}
    flags, options, output = learning_options(shared, own)
    recipe = given_recipe(AddRecipe, data, flags)
    verb = partial(run, recipe, options, compare=compare or (), disentanglement=disentanglement)
    run_learning(verb, output)
