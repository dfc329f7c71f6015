"""What `atlas inspect` does with its arguments: checks, measurements, tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from atlas_cli import __version__
from atlas_cli.commands import cards, measures, output
from atlas_cli.commands.drawing import check_drawing, draw_record, draw_vectors
from atlas_cli.commands.input import read_text, spooled_stdin
from atlas_cli.commands.learned import is_text, record_in, show_record
from atlas_cli.errors import UsageError
from atlas_cli.plots import check_plot
from atlas_cli.records import Record, read_coefficients
from atlas_cli.sources import (
    WEIGHT_SUFFIXES,
    Reference,
    Source,
    check_architecture,
    locate,
    parse_reference,
)

if TYPE_CHECKING:
    from atlas_cli.census import ModelFacts
    from atlas_cli.compare import Comparison
    from atlas_cli.describe import VectorFacts
    from atlas_cli.vectors import TaskVector


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
    from atlas_cli.census import describe_model  # torch is slow: only with good inputs
    from atlas_cli.compare import block_count, compare
    from atlas_cli.describe import describe_vector, is_vector
    from atlas_cli.vectors import open_checked

    given = [source for source in sources if source.reference.text == "-" or is_vector(source)]
    models = tuple(describe_model(source, arch) for source in sources if source not in given)
    opened = [open_checked(source.weights[0]) for source in given]
    vectors = dict(zip(_labels(given, opened), opened, strict=True))
    several = len(vectors) > 1
    total = sum(len(vector.names) for vector in opened) + several * block_count(vectors)
    with output.progress("measuring", total, quiet=quiet) as advance:
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
        output.emit(report, as_json=True)
    elif output.is_terminal():
        for rows, caption in _tables(report, blocks):
            output.emit_table(rows, caption)
    elif report.vectors and report.models:
        raise UsageError("models and task vectors make different tables; add --json")
    elif report.models:
        output.emit_rows(measures.TENSOR_COLUMNS, measures.tensor_rows(report.models))
    elif report.comparison and not blocks:
        columns = ["kind", "vector", *report.comparison.vectors]
        output.emit_rows(columns, measures.cosine_rows(report.comparison))
    else:
        output.emit_rows(measures.BLOCK_COLUMNS, measures.block_rows(report.vectors))


def _tables(report: Report, blocks: bool) -> list[tuple[list[cards.Row], str]]:
    tables = [(cards.model_card(model), "") for model in report.models]
    if report.comparison:
        tables.append((measures.vector_table(report.vectors), measures.VECTOR_CAPTION))
        tables += measures.comparison_tables(report.comparison)
    for vector in report.vectors:
        if not report.comparison:
            tables.append((cards.vector_card(vector), ""))
        if blocks or not report.comparison:
            rows = measures.block_table(vector) if blocks else measures.kind_table(vector)
            tables.append((rows, measures.RANK_CAPTION))
    return tables
