"""What is wrong with the recipe of a merge beyond types: methods, parameters, models, vectors.

Nothing is opened. Lines begin with the path of the value, such as `.models[0].model: `.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from atlas_cli.errors import nearest
from atlas_cli.recipes.merge_parameters import parameter_problems
from atlas_cli.recipes.text import table_problems
from atlas_cli.registry import MERGE_METHODS, find_granularity, granularity_labels

if TYPE_CHECKING:
    from atlas_cli.merge_methods.method import MergeMethod

# What is wrong with a reference to a model or to a task vector, each problem as a sentence.
SourceCheck = Callable[[Literal["model", "vector"], str], Sequence[str]]

DTYPES = ("float32", "float16", "bfloat16", "float64")
SCOPES = ("visual", "text", "all")
_OURS = ("vectors", "coefficients", "granularity", "groups", "linearised", "scope")
_REFUSED = {
    "modules": "merges of several modules; atlas merges whole models",
    "tokenizer": "building a tokenizer; atlas copies the one of the base",
    "chat_template": "replacing the chat template; atlas copies the one of the base",
    "experts": "mixtures of experts",
    "gate_mode": "mixtures of experts",
    "experts_per_token": "mixtures of experts",
    "shared_experts": "mixtures of experts",
}
_RESIDUAL = "residual_weight"


def refused_keys(found: Mapping[Any, Any], where: str) -> Iterator[str]:
    """Keys that mergekit knows and atlas does not support, each by name."""
    for key, what in _REFUSED.items():
        if key in found:
            yield f"{where}: '{key}' is not supported: {what}"
    if is_refused("tokenizer_source", source := found.get("tokenizer_source")):
        yield (
            f"{where}.tokenizer_source: '{source}' is not supported; atlas copies the tokenizer "
            "of the base (tokenizer_source: base)"
        )


def is_refused(key: object, value: object) -> bool:
    """Whether mergekit knows a key, or this value of it, and atlas does not support it."""
    other = key == "tokenizer_source" and isinstance(value, str) and value != "base"
    return key in _REFUSED or other


def method_problem(method: str) -> str | None:
    """What is wrong with the name of a method."""
    if method in MERGE_METHODS:
        return None
    listed = f"(there are: {', '.join(MERGE_METHODS)})"
    return f"unknown method '{method}'{nearest(method, MERGE_METHODS)} {listed}"


def dtype_problem(name: str) -> str | None:
    """What is wrong with the name of a dtype."""
    if name.removeprefix("torch.") in DTYPES:
        return None
    return f"expected {', '.join(DTYPES)}, found '{name}'{nearest(name, DTYPES)}"


def semantic_problems(found: Mapping[str, Any], check_source: SourceCheck | None) -> Iterator[str]:
    """What is wrong with values together. Parts of the wrong type are left to the model."""
    check = check_source or (lambda kind, text: ())
    yield from _reference_problems(found.get("base_model"), ".base_model", check)
    method = found.get("merge_method")
    if method == "atlas":
        yield from _learned_problems(found, check)
    else:
        row = MERGE_METHODS.get(method) if isinstance(method, str) else None
        yield from _model_problems(found, row, check)


def _reference_problems(text: object, where: str, check: SourceCheck) -> Iterator[str]:
    if isinstance(text, str):
        yield from (f"{where}: {problem}" for problem in check("model", text))


# Learned coefficients -------------------------------------------------------------------------


def _learned_problems(found: Mapping[str, Any], check: SourceCheck) -> Iterator[str]:
    for key in ("base_model", "vectors", "coefficients"):
        if found.get(key) is None or (key == "base_model" and found[key] == ""):
            yield f": key '{key}' is missing; merge_method atlas needs it"
    for key in ("models", "slices", "parameters"):
        if key in found:
            yield f": '{key}' has no meaning with merge_method atlas; it has vectors"
    if found.get("vectors") == []:
        yield ".vectors: names no task vector"
    if found.get("linearised") is True:
        yield (
            ".linearised: these coefficients were learned for the first-order expansion of "
            "the model, and no merged weights compute that; learn them without --linearised"
        )
    if found.get("scope", "visual") not in SCOPES:
        yield f".scope: expected visual, text or all, found {found['scope']!r}"
    kind = found.get("granularity", "block")
    if isinstance(kind, str) and not find_granularity(kind):
        yield f".granularity: expected {granularity_labels()}, found {kind!r}"
    yield from _file_problems(found, check)


def _file_problems(found: Mapping[str, Any], check: SourceCheck) -> Iterator[str]:
    entries = found.get("vectors")
    for entry in entries if isinstance(entries, list) else []:
        file = entry.get("file") if isinstance(entry, dict) else entry
        if isinstance(file, str):
            yield from (f".vectors: {problem}" for problem in check("vector", file))
    table = found.get("coefficients")
    if isinstance(table, str) and not Path(table).expanduser().is_file():
        yield f".coefficients: no such file: {table}"
    if isinstance(table, dict):
        numbers = {
            vector: {label: value for label, value in row.items() if isinstance(value, float)}
            for vector, row in table.items()
            if isinstance(row, dict)
        }
        yield from table_problems(numbers, ".coefficients")


# Models ---------------------------------------------------------------------------------------


def _model_problems(
    found: Mapping[str, Any], row: MergeMethod | None, check: SourceCheck
) -> Iterator[str]:
    for key in _OURS:
        if key in found:
            yield f": '{key}' belongs to merge_method atlas"
    neither = found.get("models") is None and found.get("slices") is None
    if neither or ("models" in found) == ("slices" in found):
        yield ": expected either 'models' or 'slices'"
    entries = found.get("models")
    place, levels = ".models", [(found.get("parameters"), ".parameters")]
    base = found.get("base_model")
    if "models" not in found and isinstance(found.get("slices"), list):
        yield from _slice_problems(found["slices"], ".slices")
        first = found["slices"][0] if found["slices"] else None
        if isinstance(first, dict):
            place, entries = ".slices[0].sources", first.get("sources")
            levels.insert(0, (first.get("parameters"), ".slices[0].parameters"))
            base = first.get("base_model") or base
            yield from _reference_problems(first.get("base_model"), ".slices[0].base_model", check)
    listed = [e for e in entries if isinstance(e, dict)] if isinstance(entries, list) else []
    for number, entry in enumerate(listed):
        yield from _reference_problems(entry.get("model"), f"{place}[{number}].model", check)
    if row is not None and isinstance(entries, list):
        yield from _number_problems(listed, base, row, place)
        yield from _value_problems(listed, base, row, place, levels)
    if row is not None and row.base == "must" and base is None:
        yield f": key 'base_model' is missing; {found['merge_method']} needs it"


def _slice_problems(slices: list[Any], where: str) -> Iterator[str]:
    """Slices must be one, of all layers of every model."""
    if len(slices) != 1:
        yield (
            f"{where}: {len(slices)} slices are not supported: atlas merges whole models of the "
            "same shape, from the first layer to the last"
        )
    for number, part in enumerate(slices):
        if not isinstance(part, dict):
            continue
        if _RESIDUAL in part:
            yield f"{where}[{number}]: '{_RESIDUAL}' is not supported"
        ranges = [
            tuple(entry["layer_range"])
            for entry in part.get("sources") or []
            if isinstance(entry, dict) and isinstance(entry.get("layer_range"), list)
        ]
        bad = [found for found in ranges if len(found) != 2 or found[0] != 0]
        if len(slices) == 1 and (bad or len(set(ranges)) > 1):
            listed = ", ".join(str(list(found)) for found in ranges)
            yield (
                f"{where}[{number}]: layer_range {listed} is not supported: expected [0, N] for "
                "every model, with N the number of its layers"
            )


def _number_problems(
    entries: Sequence[Mapping[str, Any]], base: object, row: MergeMethod, where: str
) -> Iterator[str]:
    names = [entry.get("model") for entry in entries]
    for name in dict.fromkeys(name for name in names if names.count(name) > 1):
        yield f"{where}: {name} is given twice"
    count = len([name for name in names if row.base == "no" or name != base])
    low, high = row.models
    beside = " beside the base" if row.base != "no" else ""
    if count < low:
        yield f"{where}: expected {low} or more models{beside}, found {count}"
    elif high is not None and count > high:
        yield f"{where}: expected {high} model{'s' * (high > 1)}{beside}, found {count}"


def _value_problems(
    entries: Sequence[Mapping[str, Any]],
    base: object,
    row: MergeMethod,
    where: str,
    levels: list[tuple[Any, str]],
) -> Iterator[str]:
    """Parameters that are unknown, out of range, or missing."""
    both = {**row.per_merge, **row.per_model}
    for table, place in levels:
        if table is not None:
            yield from parameter_problems(table, both, {}, place)
    general = {key for table, _ in levels if isinstance(table, dict) for key in table}
    for number, entry in enumerate(entries):
        own = entry.get("parameters")
        if own is not None:
            place = f"{where}[{number}].parameters"
            yield from parameter_problems(own, row.per_model, row.per_merge, place)
        given = general | (set(own) if isinstance(own, dict) else set())
        if row.base == "no" or entry.get("model") != base:
            for key, parameter in row.per_model.items():
                if parameter.default is None and key not in given:
                    yield f"{where}[{number}]: parameter '{key}' is missing"
    for key, parameter in row.per_merge.items():
        if parameter.default is None and key not in general:
            yield f"{levels[-1][1]}: parameter '{key}' is missing"
    names = [entry.get("model") for entry in entries]
    if row.base == "no" and isinstance(base, str) and base not in names:
        for key, parameter in row.per_model.items():
            if parameter.default is None and key not in general:
                yield f"{where}: base_model {base} is not listed, so it has no '{key}'"
