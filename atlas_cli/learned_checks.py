"""What can be wrong with learned coefficients in the recipe of a merge."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from atlas_cli.coefficients import problems_of
from atlas_cli.errors import UsageError
from atlas_cli.vector_files import vector_file


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
