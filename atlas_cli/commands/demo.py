"""atlas demo: the whole story on the built-in model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atlas_cli.commands.options import AsJson, Force

Folder = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="DIR", help="Folder to work in, which is kept."),
]
Keep = Annotated[bool, typer.Option("--keep", help="Leave every file in place to play with.")]


def demo(
    folder: Folder = None, keep: Keep = False, force: Force = False, as_json: AsJson = False
) -> None:
    """Tell the whole story on the built-in model, with no download, and print a table of results.

    Each command line is printed before it runs. It works in ./atlas-demo, which is removed at the
    end unless --keep or -o is given; after a kill, the same command goes on where it stopped.

    Example: atlas demo --keep
    """
    from atlas_cli.commands.demonstrating import run

    run(folder, keep=keep, force=force, as_json=as_json)
