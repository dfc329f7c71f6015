"""atlas demo: every command on the built-in model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atlas_cli.cli.options import AsJson, Force, Quiet

Folder = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="DIR", help="Folder to work in, which is kept."),
]
Keep = Annotated[bool, typer.Option("--keep", help="Leave every file in place to play with.")]


def demo(
    folder: Folder = None,
    keep_files: Keep = False,
    force: Force = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Run every command on the built-in model, with no download, and print a table of results.

    Each command line is printed with what it says. It works in ./atlas-demo, which is removed at
    the end unless --keep or -o is given; after a kill, the same command goes on where it stopped.

    \b
    Example:
      atlas demo --keep
    """
    from atlas_cli.cli.console import OutputOptions
    from atlas_cli.cli.demo_run import run
    from atlas_cli.cli.demo_story import PLACE

    kept = keep_files or folder is not None
    output = OutputOptions(as_json, quiet)
    run(folder or Path(PLACE), keep=kept, force=force, output=output)
