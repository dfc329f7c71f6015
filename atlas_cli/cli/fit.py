"""atlas fit: learn block coefficients from a few images per class."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atlas_cli.cli.console import (
    ConsoleListener,
    OutputOptions,
    emit,
    emit_rows,
    given_recipe,
    learning_options,
    run_learning,
)
from atlas_cli.cli.options import learning_command

if TYPE_CHECKING:
    from atlas_cli.learning.run import RunOptions
    from atlas_cli.recipes.fit import FitRecipe

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


Budget = Annotated[
    str | None,
    typer.Option("--budget", metavar="SIZE", help="Bytes of vectors to keep, such as 500MB."),
]
KeepVectors = Annotated[
    int | None, typer.Option("--keep-vectors", metavar="B", help="Vectors to keep in every block.")
]
Init = Annotated[
    str | None,
    typer.Option("--init", metavar="RUN", help="Start from the coefficients of another run."),
]
RankBy = Annotated[
    str | None,
    typer.Option(
        "--rank-by", metavar="HOW", help="greedy (default), gradient, features or random."
    ),
]
ImagesOf = Annotated[
    list[str] | None,
    typer.Option(metavar="VECTOR=DATA", help="What a vector was learned from, for features."),
]
RankOnly = Annotated[
    bool, typer.Option("--rank-only", help="Show what would be kept, and learn nothing.")
]


@learning_command
def fit(
    data: Data,
    allow_target: AllowTarget = False,
    basis: Basis = None,
    preset: Preset = None,
    adapter: Adapter = None,
    adapter_stage: AdapterStage = None,
    init: Init = None,
    budget: Budget = None,
    keep_vectors: KeepVectors = None,
    rank_by: RankBy = None,
    images_of: ImagesOf = None,
    rank_only: RankOnly = False,
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
        "init": init,
        "budget": budget,
        "keep_vectors": keep_vectors,
        "rank_by": rank_by,
        "images_of": images_of,
    }
    needed = () if adapter else ("vectors",)
    flags, options, output = learning_options(shared, own)
    recipe = given_recipe(FitRecipe, data, flags, needed)
    if rank_only:
        _show_ranking(recipe, options, output)
        return
    run_learning(partial(run, recipe, options), output)


def _show_ranking(recipe: FitRecipe, options: RunOptions, output: OutputOptions) -> None:
    """Blocks that would be kept, best first: as JSON, or as rows of CSV."""
    from atlas_cli.learning.fit import rank_vectors

    with ConsoleListener(output) as listener:
        found = rank_vectors(recipe, options, on_event=listener)
    if output.as_json:
        emit(asdict(found), as_json=True)
        return
    columns = ("vector", "block", "storage", "bytes", "gain")
    emit_rows(columns, [[str(pick[column]) for column in columns] for pick in found.picks])
