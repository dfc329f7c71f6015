"""Tables of coefficients: one number for each block of each task vector."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Table = dict[str, dict[str, float]]
MANY = 20_000  # numbers beyond which a table is kept as tensors rather than as text


def to_table(
    vectors: Sequence[str], labels: Sequence[str], rows: Sequence[Sequence[float]]
) -> Table:
    """Name the rows and columns of a table. Nine digits tell any two float32 numbers apart."""
    return {
        vector: {label: float(f"{value:.9g}") for label, value in zip(labels, row, strict=True)}
        for vector, row in zip(vectors, rows, strict=True)
    }


def table_problems(table: Mapping[str, Mapping[str, float]], where: str) -> list[str]:
    """A line for every number that is not finite."""
    return [
        f"{where}.{vector}.{label}: {value} is not a finite number"
        for vector, row in table.items()
        for label, value in row.items()
        if not math.isfinite(value)
    ]


@dataclass(frozen=True)
class Summary:
    """The coefficients of one vector in a few numbers."""

    vector: str
    blocks: int
    mean: float
    mean_size: float
    lowest: float
    highest: float
    largest: str


def summarise(table: Table) -> list[Summary]:
    """A row for each vector, in the order of the table."""
    return [
        Summary(
            vector,
            len(row),
            statistics.fmean(row.values()),
            statistics.fmean(abs(value) for value in row.values()),
            min(row.values()),
            max(row.values()),
            max(row, key=lambda label: abs(row[label])),
        )
        for vector, row in table.items()
        if row
    ]
