"""atlas inspect: what is in task vectors and models, and how vectors relate."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atlas_cli import __version__
from atlas_cli.cli import console
from atlas_cli.cli.console import read_text, spooled_stdin
from atlas_cli.cli.options import Architecture, AsJson, PlotFile, Quiet
from atlas_cli.errors import AtlasError, UsageError
from atlas_cli.io.files import write_text
from atlas_cli.reports import tables
from atlas_cli.reports.charts import (
    Words,
    check_charts,
    class_chart,
    curves,
    draw_charts,
    heat_maps,
)
from atlas_cli.reports.grids import coefficient_grids, cosine_grid, norm_grids
from atlas_cli.reports.learned import is_text, record_in, show_record
from atlas_cli.reports.plots import check_matplotlib, check_plot, draw
from atlas_cli.reports.runs import Record, read_coefficients
from atlas_cli.sources.locate import WEIGHT_SUFFIXES, Source, locate
from atlas_cli.sources.references import Reference, check_architecture, parse_reference

if TYPE_CHECKING:
    from atlas_cli.models.folders import ModelFacts
    from atlas_cli.reports.runs import Record
    from atlas_cli.vectors.describe import Comparison, VectorFacts
    from atlas_cli.vectors.format import TaskVector


@dataclasses.dataclass(frozen=True)
class Report:
    """Everything that was found; the keys of --json."""

    atlas: str
    vectors: tuple[VectorFacts, ...]
    models: tuple[ModelFacts, ...]
    comparison: Comparison | None


def run(
    subjects: list[str],
    arch: str | None,
    plot: Path | None,
    *,
    blocks: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Check everything, then measure, draw and show."""
    if plot:
        check_plot(plot)
    check_architecture(arch)
    if (record := record_in(subjects[0])) is not None:
        _check_alone(subjects[0], subjects)
        _show_run(record, plot, as_json)
        return
    if plot and "-" not in subjects:
        check_drawing(plot)
    references = {text: _parse(text) for text in subjects if text != "-"}
    if subjects.count("-") > 1:
        raise UsageError("- can be given once: stdin has one task vector")
    with ExitStack() as stack:
        sources = [
            locate(references[text]) if text in references else _from_stdin(stack)
            for text in subjects
        ]
        piped = next((s.weights[0] for s in sources if s.reference.text == "-"), None)
        if piped and is_text(piped):
            _check_alone("stdin", subjects)
            _show_run(read_coefficients(read_text(str(piped))[0], "stdin"), plot, as_json)
            return
        if plot:
            check_drawing(plot)
        report = _measure(sources, arch, quiet)
        if plot:
            _draw(plot, report)
    _show(report, blocks, as_json)


def _check_alone(name: str, subjects: Sequence[str]) -> None:
    if len(subjects) > 1:
        raise UsageError(f"{name}: a run, or its coefficients, is shown alone")


def _show_run(record: Record, plot: Path | None, as_json: bool) -> None:
    if plot:
        draw_record(plot, record)
    show_record(record, as_json=as_json, drawn=plot is not None)


def _parse(text: str) -> Reference:
    """A reference; a file that is not there is a typing mistake, not a name on the Hub."""
    path = Path(text)
    is_file = path.suffix in WEIGHT_SUFFIXES and (text.count("/") < 2 or path.parent.is_dir())
    if is_file and ":" not in text and not path.expanduser().exists():
        raise UsageError(f"no such file: {text}")
    return parse_reference(text)


def _from_stdin(stack: ExitStack) -> Source:
    path = stack.enter_context(spooled_stdin(".safetensors"))
    return Source(Reference("-", "path", str(path)), path.parent, (path,))


def _measure(sources: Sequence[Source], arch: str | None, quiet: bool) -> Report:
    from atlas_cli.models.folders import describe_model  # torch is slow: only with good inputs
    from atlas_cli.vectors.describe import block_count, compare, describe_vector, is_vector
    from atlas_cli.vectors.format import open_checked

    given = [source for source in sources if source.reference.text == "-" or is_vector(source)]
    models = tuple(describe_model(source, arch) for source in sources if source not in given)
    opened = [open_checked(source.weights[0]) for source in given]
    vectors = dict(zip(_labels(given, opened), opened, strict=True))
    several = len(vectors) > 1
    total = sum(len(vector.names) for vector in opened) + several * block_count(vectors)
    with console.progress("measuring", total, quiet=quiet) as advance:
        comparison = compare(vectors, advance) if several else None
        facts = tuple(
            describe_vector(label, source, vector, advance)
            for source, (label, vector) in zip(given, vectors.items(), strict=True)
        )
    return Report(__version__, facts, models, comparison)


def _labels(sources: Sequence[Source], vectors: Sequence[TaskVector]) -> list[str]:
    """A name for each vector: its own, or its file where two have the same."""
    names = [vector.header.name for vector in vectors]
    labels: list[str] = []
    for source, name in zip(sources, names, strict=True):
        label = name if names.count(name) == 1 and name else source.reference.text
        same = sum(other == label or other.startswith(f"{label} (") for other in labels)
        labels.append(f"{label} ({same + 1})" if same else label)
    return labels


def _draw(path: Path, report: Report) -> None:
    if not report.vectors:
        raise UsageError(f"--plot draws task vectors; {report.models[0].model} is a model")
    draw_vectors(path, report.vectors, report.comparison)


# Showing --------------------------------------------------------------------------------------


def _show(report: Report, blocks: bool, as_json: bool) -> None:
    if as_json:
        console.emit(report, as_json=True)
    elif console.is_terminal():
        for rows, caption in _tables(report, blocks):
            console.emit_table(rows, caption)
    elif report.vectors and report.models:
        raise UsageError("models and task vectors make different tables; add --json")
    elif report.models:
        console.emit_rows(tables.TENSOR_COLUMNS, tables.tensor_rows(report.models))
    elif report.comparison and not blocks:
        columns = ["kind", "vector", *report.comparison.vectors]
        console.emit_rows(columns, tables.cosine_rows(report.comparison))
    else:
        console.emit_rows(tables.BLOCK_COLUMNS, tables.block_rows(report.vectors))


def _tables(report: Report, blocks: bool) -> list[tuple[list[tables.Row], str]]:
    found = [(tables.model_card(model), "") for model in report.models]
    if report.comparison:
        found.append((tables.vector_table(report.vectors), tables.VECTOR_CAPTION))
        found += tables.comparison_tables(report.comparison)
    for vector in report.vectors:
        if not report.comparison:
            found.append((tables.vector_card(vector), ""))
        if blocks or not report.comparison:
            rows = tables.block_table(vector) if blocks else tables.kind_table(vector)
            found.append((rows, tables.RANK_CAPTION))
    return found


def check_drawing(path: Path) -> None:
    """Raise unless task vectors can be drawn in the format of a file."""
    if _is_page(path):
        check_charts("--plot")
    else:
        check_matplotlib()


def draw_vectors(path: Path, vectors: Sequence[VectorFacts], comparison: Comparison | None) -> None:
    """The norms of task vectors and, of several, the cosines."""
    if not (norms := norm_grids(vectors)):
        raise AtlasError("--plot: no block has a norm relative to the base")
    cosines = cosine_grid(comparison) if comparison else None
    if not _is_page(path):
        draw(path, norms, cosines)
        return
    from atlas_cli.reports.page import heat_map, page

    parts = [heat_map(norms, Words("kind", "layer", "norm in %"))]
    if cosines:
        parts.append(heat_map([cosines], Words("vector", "other", "cosine")))
    write_text(path, page("Task vectors", *parts))


def draw_record(path: Path, record: Record) -> None:
    """The coefficients, and of a whole run its learning curves and its classes."""
    if path.suffix.lower() == ".pdf":  # Vega's would be other bytes each time
        raise UsageError(f"--plot {path}: coefficients are drawn as .png, .svg or .html")
    check_charts("--plot")
    if not record.table and not record.metrics:
        raise AtlasError(f"{record.name}: has nothing to draw yet; --resume goes on with it")
    if _is_page(path):
        from atlas_cli.reports.page import page, pictures

        write_text(path, page("Coefficients", pictures(record)))
        return
    heat = heat_maps(coefficient_grids(record.table), Words()) if record.table else []
    draw_charts(path, [heat, curves(record), [class_chart(found) for found in record.classes]])


def _is_page(path: Path) -> bool:
    return path.suffix.lower() == ".html"


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

    run(subjects, arch, plot, blocks=blocks, as_json=as_json, quiet=quiet)
