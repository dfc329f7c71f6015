"""What can be wrong with the recipe of a merge, told before anything is opened."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atlas_cli.errors import UsageError, nearest
from atlas_cli.recipes.coefficients import learned_problems
from atlas_cli.recipes.merge_parameters import METHODS, OTHERS, parameter_problems
from atlas_cli.sources.references import parse_reference

if TYPE_CHECKING:
    from atlas_cli.merge_methods.method import MergeMethod

DTYPES = ("float32", "float16", "bfloat16", "float64")
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
    source = found.get("tokenizer_source")
    if isinstance(source, str) and source != "base":
        yield (
            f"{where}.tokenizer_source: '{source}' is not supported; atlas copies the tokenizer "
            "of the base (tokenizer_source: base)"
        )


def semantic_problems(found: Mapping[str, Any], where: str) -> Iterator[str]:
    """What is wrong beyond types. Parts of the wrong type are left to those who check types."""
    method = found.get("merge_method")
    row = METHODS.get(method) if isinstance(method, str) else None
    if isinstance(method, str) and row is None:
        yield _unknown(method, where)
    for key in ("dtype", "out_dtype"):
        name = found.get(key)
        if isinstance(name, str) and name.removeprefix("torch.") not in DTYPES:
            hint = nearest(name, DTYPES)
            yield f"{where}.{key}: expected {', '.join(DTYPES)}, found '{name}'{hint}"
    seed = found.get("seed")
    if isinstance(seed, int) and seed < 0:
        yield f"{where}.seed: expected 0 or more, found {seed}"
    yield from _reference_problems(found.get("base_model"), f"{where}.base_model")
    if method == "atlas":
        yield from learned_problems(found, where)
    else:
        yield from _model_problems(found, row, where)


def _unknown(method: str, where: str) -> str:
    if method in OTHERS:
        return f"{where}.merge_method: mergekit's '{method}' is not supported"
    return (
        f"{where}.merge_method: unknown method '{method}'{nearest(method, METHODS)} "
        f"(there are: {', '.join(METHODS)})"
    )


def _reference_problems(text: object, where: str) -> Iterator[str]:
    if not isinstance(text, str):
        return
    # As merge_recipe.split_adapter: a path may have a + in it.
    parts = [text] if Path(text).exists() else text.rsplit("+", 1)
    for part in parts:
        try:
            parse_reference(part)
        except UsageError as problem:
            yield f"{where}: {problem}"


# Models ---------------------------------------------------------------------------------------


def _model_problems(found: Mapping[str, Any], row: MergeMethod | None, where: str) -> Iterator[str]:
    for key in _OURS:
        if key in found:
            yield f"{where}: '{key}' belongs to merge_method atlas"
    if ("models" in found) == ("slices" in found):
        yield f"{where}: expected either 'models' or 'slices'"
    entries = found.get("models")
    place, levels = f"{where}.models", [(found.get("parameters"), f"{where}.parameters")]
    base = found.get("base_model")
    if "models" not in found and isinstance(found.get("slices"), list):
        yield from _slice_problems(found["slices"], f"{where}.slices")
        first = found["slices"][0] if found["slices"] else None
        if isinstance(first, dict):
            place, entries = f"{where}.slices[0].sources", first.get("sources")
            levels.insert(0, (first.get("parameters"), f"{where}.slices[0].parameters"))
            base = first.get("base_model") or base
            yield from _reference_problems(first.get("base_model"), f"{where}.slices[0].base_model")
    listed = [e for e in entries if isinstance(e, dict)] if isinstance(entries, list) else []
    for number, entry in enumerate(listed):
        yield from _reference_problems(entry.get("model"), f"{place}[{number}].model")
    if row is not None and isinstance(entries, list):
        yield from _number_problems(listed, base, row, f"{place}")
        yield from _value_problems(listed, base, row, place, levels)
    if row is not None and row.base == "must" and base is None:
        yield f"{where}: key 'base_model' is missing; {found['merge_method']} needs it"


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
