"""atlas inspect: what is in task vectors and models, and how vectors relate."""

from __future__ import annotations

from typing import Annotated

import typer

from atlas_cli.commands.options import Architecture, AsJson, PlotFile, Quiet

Subjects = Annotated[
    list[str],
    typer.Argument(metavar="FILE|MODEL|RUN...", help="Vectors, models, or one run; - for stdin."),
]
Blocks = Annotated[bool, typer.Option("--blocks", help="One row per block, not per kind.")]


def inspect(
    subjects: Subjects,
    blocks: Blocks = False,
    plot: PlotFile = None,
    arch: Architecture = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Show what task vectors and models hold, the angles between vectors, and coefficients.

    Coefficients are those of a run's folder, a learned recipe, or coefficients.json. In a pipe:
    CSV with a row per block of one vector, the cosines of several, the tensors of models, or the
    coefficients. --plot draws vectors, or coefficients with the curves and classes of their run.

    Example: atlas inspect digits.safetensors letters.safetensors --plot vectors.png
    """
    from atlas_cli.commands.inspecting import run

    run(subjects, arch, plot, blocks=blocks, as_json=as_json, quiet=quiet)
