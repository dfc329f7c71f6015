"""atlas push: publish a run, task vectors or a model on the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atlas_cli import __version__
from atlas_cli.cli import console
from atlas_cli.cli.options import AsJson, Quiet
from atlas_cli.errors import AtlasError

if TYPE_CHECKING:
    from atlas_cli.publishing.publication import Publication

What = Annotated[
    Path,
    typer.Argument(
        metavar="WHAT",
        help="The folder of a run or of a model, a task vector, or a folder of them.",
    ),
]
Repository = Annotated[
    str, typer.Argument(metavar="OWNER/NAME", help="The repository; it is made if need be.")
]
Licence = Annotated[
    str | None,
    typer.Option("--license", metavar="ID", help="Licence, in the Hub's words, such as mit."),
]
EvaluationFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="What atlas eval --json found, for the card.")
]
Private = Annotated[bool, typer.Option("--private", help="Make a private repository.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the card and upload nothing.")]


def push(
    what: What,
    repository: Repository,
    licence: Licence = None,
    evaluation: EvaluationFile = None,
    private: Private = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Publish a run, task vectors or a model on the Hub, with a card; print its address.

    The card says what it is made of, how good it is and how it is used. HF_TOKEN, or `hf auth
    login`, says who you are. Of a run, vectors that are files on this machine go with it. Links out
    of a folder are refused.

    \b
    Example:
      atlas push run owner/name --license mit
    """
    from atlas_cli.publishing.publication import PublishOptions, prepare, read_evaluation_file

    shown = read_evaluation_file(evaluation) if evaluation else None
    found = prepare([what], repository, PublishOptions(licence, shown))
    if not quiet:
        for line in found.notes:
            console.note(line)
    if dry_run:
        if not quiet:
            _show_files(found)
        console.write(found.card)
        return
    if not quiet:
        console.note(f"uploading {len(found.files)} files, {found.bytes / 1e6:,.1f} MB")
    address = upload(found, f"atlas push {what} {repository}", private=private)
    facts = {"atlas": __version__, "address": address, "kind": found.kind}
    console.emit({**facts, "files": sorted(found.files)} if as_json else address, as_json=as_json)


def upload(found: Publication, again: str, *, private: bool = False) -> str:
    """Upload and give the address. What fails says how it is tried again."""
    try:
        return found.push(private=private)
    except AtlasError as problem:
        raise type(problem)(f"{problem}; nothing is lost: {again}") from problem


def _show_files(found: Publication) -> None:
    for name, content in found.files.items():
        size = len(content) if isinstance(content, bytes) else content.stat().st_size
        console.note(f"{name} ({size / 1e6:,.1f} MB)")
