"""atlas report: learning runs on one page of HTML."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atlas_cli.commands.options import Force

Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of learning runs.")]
OutputFile = Annotated[
    str, typer.Option("--output", "-o", metavar="FILE", help="Page to write, or - for stdout.")
]


def report(runs: Runs, path: OutputFile, force: Force = False) -> None:
    """Show runs of fit, negate, add and tta on one page that needs no network (extra: plot).

    It has the coefficients as heat maps, learning curves, classes before and after, the learned
    recipe, the configuration, and tables that can be sorted.

    Example: atlas report run1 run2 -o report.html
    """
    from atlas_cli.commands.reporting import run

    run(runs, path, force=force)
