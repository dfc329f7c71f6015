"""atlas fit: learn block coefficients from a few images per class."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from atlas_cli.commands.learning_options import Wishes, given_flags, learning_command

Data = Annotated[
    str, typer.Argument(metavar="DATA", help="Images, or a recipe (.yaml, - for stdin).")
]
AllowTarget = Annotated[
    bool, typer.Option("--allow-target", help="Take vectors learned on the target itself, too.")
]


@learning_command
def fit(
    data: Data, allow_target: AllowTarget = False, *, flags: dict[str, Any], wishes: Wishes
) -> None:
    """Learn a coefficient for every block of every task vector, and print the learned recipe.

    --select is last (default), holdout, kfold or val:DATA.

    Example: atlas fit shots/ --model ViT-B-32/openai --vectors v/*.safetensors -o run
    """
    from atlas_cli.commands.fitting import Fitting
    from atlas_cli.commands.learning import run

    run(Fitting(), [data], {**flags, **given_flags({"allow_target": allow_target})}, wishes)
