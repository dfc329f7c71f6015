"""atlas data: what data can be named, what is on this machine, and what its classes are called."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from atlas_cli import __version__
from atlas_cli.cli import console
from atlas_cli.cli.options import AsJson, DataRoot, Download
from atlas_cli.errors import UsageError

DataName = Annotated[
    str | None,
    typer.Argument(metavar="DATA", help="A well-known dataset, or any data: print its classes."),
]
Prompts = Annotated[bool, typer.Option("--prompts", help="Print the prompts instead.")]


def data(
    name: DataName = None,
    prompts: Prompts = False,
    data_root: DataRoot = None,
    download: Download = False,
    as_json: AsJson = False,
) -> None:
    """List the data that can be named and where it is, or print the class names of one dataset.

    Beside these, data is a folder, csv:FILE, hf:OWNER/NAME[:CONFIG][@SPLIT] of the Hub (extra:
    data), wds:SHARDS.tar and what plugins add. An empty place: not on this machine.

    Example: atlas data eurosat > photos/classnames.txt
    """
    from atlas_cli.datasets.listing import names_of

    if name is None:
        if prompts:
            raise UsageError("--prompts of which data? For example: atlas data eurosat --prompts")
        _show(as_json=as_json)
        return
    classes, templates = names_of(name)
    if as_json:
        facts = {"atlas": __version__, "data": name, "classes": classes, "prompts": templates}
        console.emit(facts, as_json=True)
    else:
        console.write("".join(f"{line}\n" for line in (templates if prompts else classes)))


def _show(*, as_json: bool) -> None:
    from atlas_cli.datasets.from_torchvision import data_root
    from atlas_cli.datasets.listing import list_data

    rows = [dataclasses.asdict(entry) for entry in list_data()]
    if as_json:
        facts = {"atlas": __version__, "data_root": str(data_root()), "data": rows}
        console.emit(facts, as_json=True)
        return
    cells = [{k: "" if v is None else str(v) for k, v in row.items()} for row in rows]
    if console.is_terminal():
        console.emit_table(cells, f"torchvision: looks below {data_root()}")
    else:
        console.emit_rows(tuple(cells[0]), [list(row.values()) for row in cells])
