"""atlas report: learning runs on one page of HTML."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atlas_cli.cli import console
from atlas_cli.cli.options import Force

Runs = Annotated[
    list[Path],
    typer.Argument(metavar="RUN...", help="Folders of runs, and files of atlas eval --json."),
]
OutputFile = Annotated[
    str, typer.Option("--output", "-o", metavar="FILE", help="Page to write, or - for stdout.")
]


def report(runs: Runs, path: OutputFile, force: Force = False) -> None:
    """Show runs on one page that needs no network (extra: plot).

    It has the coefficients as heat maps, learning curves, classes before and after, pictures of
    images that were learned from and of test images whose prediction changed, the learned recipe,
    the configuration, and tables that can be sorted. Several runs are compared side by side.

    \b
    Example:
      atlas report run both -o report.html
    """

    from atlas_cli.io.files import write_text
    from atlas_cli.reports.plots import check_libraries
    from atlas_cli.reports.runs import read_evaluations, read_run
    from atlas_cli.vectors.targets import VectorTarget, check_targets

    target = VectorTarget("report", None if path == "-" else Path(path))
    check_targets([target], force=force)
    check_libraries("atlas report")
    evaluations = [read_evaluations(path) for path in runs if path.suffix == ".json"]
    found = [read_run(folder) for folder in runs if folder.suffix != ".json"]

    from atlas_cli.reports.page import report_page

    page = report_page(found, evaluations)
    if target.path is None:
        console.write(page)
        return
    with target.folder():
        write_text(target.path, page)
    console.emit(target.path)
