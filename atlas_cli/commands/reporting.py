"""What `atlas report` does with its arguments: checks, and a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from atlas_cli.charts import check_charts
from atlas_cli.commands import output
from atlas_cli.commands.targets import Target, check_targets
from atlas_cli.files import write_text
from atlas_cli.records import read_run


def run(runs: Sequence[Path], path: str, *, force: bool) -> None:
    """Read all runs, then write the page and print its path, or the page itself."""
    target = Target("report", None if path == "-" else Path(path))
    check_targets([target], force=force)
    check_charts("atlas report")
    records = [read_run(folder) for folder in runs]

    from atlas_cli.pages.page import report

    page = report(records)
    if target.path is None:
        output.write(page)
        return
    with target.folder():
        write_text(target.path, page)
    output.emit(target.path)
