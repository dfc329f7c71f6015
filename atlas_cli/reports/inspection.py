"""What `atlas inspect` measures of task vectors and models, and the tables that show it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from atlas_cli import __version__
from atlas_cli.errors import UsageError
from atlas_cli.models.facts import ModelFacts, describe_model
from atlas_cli.reports import tables
from atlas_cli.sources.locate import Source
from atlas_cli.vectors.describe import (
    Comparison,
    VectorFacts,
    block_count,
    compare,
    describe_vector,
    is_vector,
)
from atlas_cli.vectors.format import StoredVector, open_checked


@dataclass(frozen=True)
class Inspection:
    """Everything that was measured; its fields are the keys of --json."""

    atlas: str
    vectors: tuple[VectorFacts, ...]
    models: tuple[ModelFacts, ...]
    comparison: Comparison | None


@dataclass(frozen=True)
class OpenedSources:
    """Task vectors by label, each with the source it comes from, and the models beside them."""

    vectors: dict[str, StoredVector]
    vector_sources: tuple[Source, ...]
    models: tuple[ModelFacts, ...]

    @property
    def steps(self) -> int:
        """How often `measure` reports progress."""
        blocks = sum(len(vector.names) for vector in self.vectors.values())
        return blocks + (block_count(self.vectors) if len(self.vectors) > 1 else 0)


def open_sources(sources: Sequence[Source], arch: str | None) -> OpenedSources:
    """Open task vectors and describe models; what comes from stdin must be a vector."""
    given = tuple(s for s in sources if s.reference.text == "-" or is_vector(s))
    models = tuple(describe_model(source, arch) for source in sources if source not in given)
    opened = [open_checked(source.weights[0]) for source in given]
    return OpenedSources(dict(zip(_labels(given, opened), opened, strict=True)), given, models)


def _labels(sources: Sequence[Source], vectors: Sequence[StoredVector]) -> list[str]:
    """A name for each vector: its own, or its file where two have the same."""
    names = [vector.header.name for vector in vectors]
    labels: list[str] = []
    for source, name in zip(sources, names, strict=True):
        label = name if names.count(name) == 1 and name else source.reference.text
        same = sum(other == label or other.startswith(f"{label} (") for other in labels)
        labels.append(f"{label} ({same + 1})" if same else label)
    return labels


def measure(opened: OpenedSources, advance: Callable[[int], None]) -> Inspection:
    """Measure every block of every vector and, of several vectors, the angles between them.

    Raises MismatchError for vectors of different bases.
    """
    comparison = compare(opened.vectors, advance) if len(opened.vectors) > 1 else None
    pairs = zip(opened.vector_sources, opened.vectors.items(), strict=True)
    facts = tuple(
        describe_vector(label, source, vector, advance) for source, (label, vector) in pairs
    )
    return Inspection(__version__, facts, opened.models, comparison)


def as_csv(found: Inspection, *, blocks: bool) -> tuple[Sequence[str], list[list[str]]]:
    """Columns and rows of the one table that fits in a pipe.

    Raises UsageError for models together with vectors, which make two.
    """
    if found.vectors and found.models:
        raise UsageError("models and task vectors make different tables; add --json")
    if found.models:
        return tables.TENSOR_COLUMNS, tables.tensor_rows(found.models)
    if found.comparison and not blocks:
        columns = ["kind", "vector", *found.comparison.vectors]
        return columns, tables.cosine_rows(found.comparison)
    return tables.BLOCK_COLUMNS, tables.block_rows(found.vectors)


def as_tables(found: Inspection, *, blocks: bool) -> list[tables.Captioned]:
    """The tables for a terminal, with a row per block or per kind of block."""
    shown = [(tables.model_card(model), "") for model in found.models]
    if found.comparison:
        shown.append((tables.vector_table(found.vectors), tables.VECTOR_CAPTION))
        shown += tables.comparison_tables(found.comparison)
    for vector in found.vectors:
        if not found.comparison:
            shown.append((tables.vector_card(vector), ""))
        if blocks or not found.comparison:
            rows = tables.block_table(vector) if blocks else tables.kind_table(vector)
            shown.append((rows, tables.RANK_CAPTION))
    return shown
