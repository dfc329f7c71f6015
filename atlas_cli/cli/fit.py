"""atlas fit: learn block coefficients from a few images per class."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer

from atlas_cli.cli.console import given_recipe, learning_options, run_learning
from atlas_cli.cli.options import learning_command

Data = Annotated[
    str, typer.Argument(metavar="DATA", help="Images, or a recipe (.yaml, - for stdin).")
]
AllowTarget = Annotated[
    bool, typer.Option("--allow-target", help="Take vectors learned on the target itself, too.")
]


Basis = Annotated[
    str | None,
    typer.Option("--basis", metavar="NAME", help="svd:K, pca:K or random instead of the vectors."),
]
Preset = Annotated[
    str | None,
    typer.Option("--preset", metavar="NAME", help="paper (default), fast, or best: folds decide."),
]
Adapter = Annotated[
    str | None,
    typer.Option(
        "--adapter",
        metavar="NAME",
        help="A head on top: tip, tip-f, lpp, probe, prolip or auto; without vectors on the base.",
    ),
]
AdapterStage = Annotated[
    str | None,
    typer.Option("--adapter-stage", metavar="WHEN", help="joint with the coefficients, or after."),
]


@learning_command
def fit(
    data: Data,
    allow_target: AllowTarget = False,
    basis: Basis = None,
    preset: Preset = None,
    adapter: Adapter = None,
    adapter_stage: AdapterStage = None,
    **shared: Any,
) -> None:
    """Learn a coefficient for every block of every task vector from a few labelled images.

    On a terminal with -o, a summary is shown; otherwise the learned recipe is printed.

    \b
    Example:
      atlas fit builtin:house_numbers --shots 4 --model builtin:tiny \\
        --vectors builtin:digits builtin:letters --epochs 2 -o run
    """
    from atlas_cli.learning.fit import fit as run
    from atlas_cli.recipes.fit import FitRecipe

    own = {
        "allow_target": allow_target,
        "basis": basis,
        "preset": preset,
        "adapter": adapter,
        "adapter_stage": adapter_stage,
    }
    needed = () if adapter else ("vectors",)
    flags, options, output = learning_options(shared, own)
    recipe = given_recipe(FitRecipe, data, flags, needed)
    run_learning(partial(run, recipe, options), output)
