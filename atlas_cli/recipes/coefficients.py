"""What can be wrong with learned coefficients in the recipe of a merge."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atlas_cli.errors import UsageError
from atlas_cli.sources.references import vector_file

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


def problems_of(table: Mapping[str, Mapping[str, float]], where: str) -> list[str]:
    """What is wrong with a table that someone else may have written."""
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


def learned_problems(found: Mapping[str, Any], where: str) -> Iterator[str]:
    """What is wrong beyond types with keys of the method atlas."""
    for key in ("base_model", "vectors", "coefficients"):
        if found.get(key) is None:
            yield f"{where}: key '{key}' is missing; merge_method atlas needs it"
    for key in ("models", "slices", "parameters"):
        if key in found:
            yield f"{where}: '{key}' has no meaning with merge_method atlas; it has vectors"
    if found.get("vectors") == []:
        yield f"{where}.vectors: names no task vector"
    if found.get("linearised") is True:
        yield (
            f"{where}.linearised: these coefficients were learned for the first-order expansion of "
            "the model, and no merged weights compute that; learn them without --linearised"
        )
    if found.get("scope", "visual") not in ("visual", "text", "all"):
        yield f"{where}.scope: expected visual, text or all, found {found['scope']!r}"
    kind = found.get("granularity", "block")
    if isinstance(kind, str) and not re.fullmatch(r"block|vector|qkv|partition:[1-9]\d{0,4}", kind):
        yield f"{where}.granularity: expected block, vector, qkv or partition:K, found {kind!r}"
    yield from _file_problems(found, where)


def _problem_of(file: str) -> str | None:
    try:
        return None if vector_file(file).is_file() else f"no such task vector: {file}"
    except UsageError as problem:
        return str(problem)


def _file_problems(found: Mapping[str, Any], where: str) -> Iterator[str]:
    for entry in found.get("vectors") or []:
        file = entry.get("file") if isinstance(entry, dict) else entry
        if isinstance(file, str) and (problem := _problem_of(file)):
            yield f"{where}.vectors: {problem}"
    table = found.get("coefficients")
    if isinstance(table, str) and not Path(table).expanduser().is_file():
        yield f"{where}.coefficients: no such file: {table}"
    if isinstance(table, dict):
        numbers = {
            vector: {label: value for label, value in row.items() if isinstance(value, float)}
            for vector, row in table.items()
            if isinstance(row, dict)
        }
        yield from problems_of(numbers, f"{where}.coefficients")
