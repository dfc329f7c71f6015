"""atlas inspect: what is in task vectors, models and runs, and how vectors relate."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atlas_cli.cli import console
from atlas_cli.cli.console import progress, read_text
from atlas_cli.cli.options import Architecture, AsJson, PlotFile, Quiet
from atlas_cli.errors import AtlasError, UsageError

if TYPE_CHECKING:
    from atlas_cli.reports.runs import (
        Run,
    )
    from atlas_cli.sources.locate import Source
    from atlas_cli.sources.reference import Reference

_TEXTS = (".yaml", ".yml", ".json")
Subjects = Annotated[
    list[str],
    typer.Argument(
        metavar="FILE|MODEL|RUN...", help="Vectors, zoo:SET, models, or a run; - for stdin."
    ),
]
Blocks = Annotated[bool, typer.Option("--blocks", help="One row per block, not per kind.")]


BaseModel = Annotated[
    str | None,
    typer.Option("--base", metavar="MODEL", help="Show models as task vectors of this base."),
]


def inspect(
    subjects: Subjects,
    blocks: Blocks = False,
    plot: PlotFile = None,
    base: BaseModel = None,
    arch: Architecture = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Show what task vectors, models and runs hold, and the angles between vectors.

    A run is its folder, its recipe or its coefficients.json. In a pipe: CSV with a row per block of
    one vector, the cosines of several, the tensors of models, the coefficients, or the epochs.
    --plot draws vectors, or coefficients with the curves and classes of their run.

    \b
    Example:
      atlas inspect builtin:digits builtin:letters
    """

    from atlas_cli.reports.plots import check_libraries, check_plot
    from atlas_cli.reports.runs import read_coefficients
    from atlas_cli.sources.locate import check_architecture, locate

    if plot:
        check_plot(plot)
    check_architecture(arch)
    if (run := _find_run(subjects[0])) is not None:
        _check_alone(subjects[0], subjects)
        _show_run(run, plot, as_json)
        return
    if plot:
        check_libraries("--plot")
    subjects = [name for text in subjects for name in _spelt_out(text)]
    gathered = [text for text in subjects if _is_gathered(text, base)]
    references = {text: _parse(text) for text in subjects if text not in ("-", *gathered)}
    if subjects.count("-") > 1:
        raise UsageError("- can be given once: stdin has one task vector")
    with ExitStack() as stack:
        sources = [
            locate(references[text]) if text in references else _from_stdin(stack)
            for text in subjects
            if text not in gathered
        ]
        sources += _gather(gathered, base, quiet=quiet) if gathered else []
        piped = next((s.weights[0] for s in sources if s.reference.text == "-"), None)
        if piped and _is_text(piped):
            _check_alone("stdin", subjects)
            _show_run(read_coefficients(read_text(str(piped))[0], "stdin"), plot, as_json)
        else:
            _show_sources(sources, arch, plot, blocks=blocks, as_json=as_json, quiet=quiet)


# Task vectors and models ----------------------------------------------------------------------


def _spelt_out(text: str) -> list[str]:
    """The task vectors that builtin:all stands for; any other subject is itself."""
    from atlas_cli.sources.locate import name_vectors

    return [one.text for one in name_vectors([text])] if text == "builtin:all" else [text]


def _parse(text: str) -> Reference:
    """A reference; a file that is not there is a typing mistake, not a name on the Hub."""

    from atlas_cli.sources.locate import parse_reference
    from atlas_cli.sources.model_files import WEIGHT_SUFFIXES

    path = Path(text)
    is_file = path.suffix in WEIGHT_SUFFIXES and (text.count("/") < 2 or path.parent.is_dir())
    if is_file and ":" not in text and not path.expanduser().exists():
        raise UsageError(f"no such file: {text}")
    return parse_reference(text)


def _is_gathered(text: str, base: str | None) -> bool:
    """Whether a subject has to be made a task vector first, or stands for several."""
    from atlas_cli.sources.locate import is_collection, is_of_zoo

    return text != "-" and (base is not None or is_of_zoo(text) or is_collection(text))


def _gather(texts: Sequence[str], base: str | None, *, quiet: bool) -> list[Source]:
    """Task vectors by reference; those of the zoo know their base."""
    from atlas_cli.sources.locate import Source, check_vectors
    from atlas_cli.sources.reference import Reference

    check_vectors(texts)

    from atlas_cli.vectors.gather import gather_by_name
    from atlas_cli.vectors.pool import Gathering

    tell = (lambda text: None) if quiet else console.note
    found = gather_by_name(texts, base, Gathering(tell=tell, warn=console.warner(quiet=quiet)))
    return [
        Source(Reference(one.text, "path", str(one.file)), one.file.parent, (one.file,), one.commit)
        for one in found
    ]


def _from_stdin(stack: ExitStack) -> Source:
    from atlas_cli.cli.stdin import spooled_stdin
    from atlas_cli.sources.locate import Source
    from atlas_cli.sources.reference import Reference

    path = stack.enter_context(spooled_stdin(".safetensors"))
    return Source(Reference("-", "path", str(path)), path.parent, (path,))


def _show_sources(
    sources: Sequence[Source],
    arch: str | None,
    plot: Path | None,
    *,
    blocks: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    from atlas_cli.reports import inspection  # torch is slow to import: only with good inputs
    from atlas_cli.reports.plots import plot_vectors

    opened = inspection.open_sources(sources, arch)
    with progress("measuring", opened.steps, quiet=quiet) as advance:
        found = inspection.measure(opened, advance)
    if plot:
        if not found.vectors:
            raise UsageError(f"--plot draws task vectors; {found.models[0].model} is a model")
        plot_vectors(plot, found.vectors, found.comparison)
    if as_json:
        console.emit(found, as_json=True)
    elif console.is_terminal():
        for rows, caption in inspection.as_tables(found, blocks=blocks):
            console.emit_table(rows, caption)
    else:
        console.emit_rows(*inspection.as_csv(found, blocks=blocks))


# Runs and coefficients ------------------------------------------------------------------------


def _find_run(subject: str) -> Run | None:
    """The run or the coefficients that a subject names; None if it is a vector or a model."""

    from atlas_cli.reports.runs import (
        Run,
        is_run,
        is_table,
        read_coefficients,
        read_numbers,
        read_run,
    )

    path = Path(subject)
    if path.suffix in _TEXTS:
        return read_coefficients(*read_text(subject))
    if path.is_dir() and is_run(path):
        return read_run(path)
    if (inside := path / "recipe.yaml").is_file():
        return read_coefficients(*read_text(str(inside)))
    if path.suffix == ".safetensors" and path.is_file() and is_table(path):
        return Run(subject, read_numbers(path))
    return None


def _is_text(path: Path) -> bool:
    """Whether a file starts as a learned recipe or a table in JSON does."""
    from atlas_cli.io.files import open_regular

    with open_regular(path) as file:
        start = file.read(4096)
    return b"\0" not in start and (b"merge_method:" in start or start.lstrip().startswith(b"{"))


def _check_alone(name: str, subjects: Sequence[str]) -> None:
    if len(subjects) > 1:
        raise UsageError(f"{name}: a run, or its coefficients, is shown alone")


def _show_run(run: Run, plot: Path | None, as_json: bool) -> None:
    from atlas_cli.reports import tables
    from atlas_cli.reports.plots import check_libraries, plot_run

    if plot:
        check_libraries("--plot")
        plot_run(plot, run)
    if run.command == "finetune" and run.finished:
        _show_finetuned(run, as_json)
    elif not run.table:
        if not plot:  # the curves of a run that has not ended can be drawn
            raise AtlasError(f"{run.name}: has no coefficients yet; --resume goes on with it")
    elif as_json:
        console.emit(tables.coefficient_facts(run), as_json=True)
    elif console.is_terminal():
        console.emit_table(*tables.coefficient_table(run))
    else:
        console.emit_rows(tables.COEFFICIENT_COLUMNS, tables.coefficient_rows(run.table))


def _show_finetuned(run: Run, as_json: bool) -> None:
    from atlas_cli.reports import tables

    if as_json:
        console.emit(tables.finetuned_facts(run), as_json=True)
    elif console.is_terminal():
        console.emit_table(*tables.finetuned_table(run))
    else:
        console.emit_rows(tables.EPOCH_COLUMNS, tables.epoch_rows(run))
