"""Values of merge parameters: a scalar, a gradient over the layers, or values by name of tensor."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from atlas_cli.errors import UsageError, nearest
from atlas_cli.registry import MERGE_METHODS

if TYPE_CHECKING:
    from atlas_cli.merge_methods.method import Parameter

    Parameters = Mapping[str, Parameter]


# What no method of atlas takes, but recipes of mergekit have: it stores or did something else.
_ELSEWHERE = ("int8_mask", "embed_slerp", "consensus_method", "consensus_threshold", "name")
Scalar = float | bool | str
_LARGEST = sys.float_info.max
_LAYER = re.compile(r"\.(\d+)\.")


# Checking -------------------------------------------------------------------------------------


def parameter_problems(found: Any, known: Parameters, where: str) -> Iterator[str]:
    """What is wrong with a table of parameters."""
    if not isinstance(found, dict):
        yield f"{where}: expected keys and values, found {type(found).__name__}"
        return
    for name, setting in found.items():
        if name in known:
            yield from _setting_problems(setting, known[name], f"{where}.{name}")
        elif name not in _meaningful():
            listed = f" (there are: {', '.join(known)})" if known else " (there are none)"
            yield f"{where}: unknown parameter '{name}'{nearest(str(name), known)}{listed}"


def idle_parameters(found: Any, known: Parameters, where: str) -> Iterator[str]:
    """The paths of parameters that another method has and this one does not look at."""
    for name, setting in found.items() if isinstance(found, dict) else ():
        if name not in known and name in _meaningful():
            yield f"{where}.{name}"
        elif isinstance(setting, list) and len(setting) == 1 and not isinstance(setting[0], dict):
            yield f"{where}.{name} (a gradient of one value)"


def _meaningful() -> Collection[str]:
    """Parameters of any method."""
    rows = MERGE_METHODS.values()
    return {*_ELSEWHERE} | {name for row in rows for name in (*row.per_model, *row.per_merge)}


def _setting_problems(setting: Any, parameter: Parameter, where: str) -> Iterator[str]:
    entries = [setting] if isinstance(setting, dict) else setting
    if isinstance(entries, list) and any(isinstance(entry, dict) for entry in entries):
        for number, entry in enumerate(entries):
            yield from _condition_problems(entry, parameter, f"{where}[{number}]")
    elif isinstance(setting, list):
        if not setting:
            yield f"{where}: a gradient has two values or more, found 0"
        for number, value in enumerate(setting):
            yield from _scalar_problems(value, parameter, f"{where}[{number}]")
    else:
        yield from _scalar_problems(setting, parameter, where)


def _condition_problems(entry: Any, parameter: Parameter, where: str) -> Iterator[str]:
    if not isinstance(entry, dict):
        yield f"{where}: expected filter and value, found {type(entry).__name__}"
        return
    for key in entry:
        if key not in ("filter", "value"):
            yield f"{where}: unknown key '{key}'{nearest(str(key), ('filter', 'value'))}"
    if not isinstance(entry.get("filter", ""), str | None):
        yield f"{where}.filter: expected str, found {type(entry['filter']).__name__}"
    if "value" not in entry:
        yield f"{where}: key 'value' is missing"
    elif isinstance(entry["value"], dict):
        yield f"{where}.value: expected a number or a list of numbers, found dict"
    else:
        yield from _setting_problems(entry["value"], parameter, f"{where}.value")


def _scalar_problems(value: Any, parameter: Parameter, where: str) -> Iterator[str]:
    if parameter.choices:
        if value not in parameter.choices:
            hint = nearest(str(value), parameter.choices)
            yield f"{where}: expected {' or '.join(parameter.choices)}, found {value!r}{hint}"
    elif isinstance(parameter.default, bool):
        if value not in (0, 1):  # True and False are 1 and 0; mergekit takes these, too
            yield f"{where}: expected true or false, found {value!r}"
    elif isinstance(value, bool) or not isinstance(value, int | float):
        yield f"{where}: expected a number, found {type(value).__name__}"
    elif not abs(value) <= _LARGEST:
        found = value if isinstance(value, float) else f"one of {len(str(value))} digits"
        yield f"{where}: expected a finite number, found {found}"
    elif parameter.low is not None and value < parameter.low:
        yield f"{where}: expected {parameter.low:g} or more, found {value:g}"
    elif parameter.high is not None and value > parameter.high:
        yield f"{where}: expected {parameter.high:g} or less, found {value:g}"


# Resolving ------------------------------------------------------------------------------------


def resolve(levels: Iterable[Mapping[str, Any]], key: str, name: str, depth: float | None) -> Any:
    """What a parameter is for a tensor: from the first level that says so; None if none does.

    A gradient begins with the tensors outside of the layers, as it does for mergekit.
    """
    for level in levels:
        if key in level and (value := value_of(level[key], name, depth or 0.0)) is not None:
            return value
    return None


def value_of(setting: Any, name: str, depth: float) -> Scalar | None:
    """One setting for a tensor: the first filter found in its name, a gradient interpolated."""
    entries = [setting] if isinstance(setting, dict) else setting
    if not isinstance(entries, list):
        return setting  # type: ignore[no-any-return]
    if not any(isinstance(entry, dict) for entry in entries):
        return _interpolate(entries, depth)
    for entry in entries:
        if entry.get("filter") in (None, "*") or entry["filter"] in name:
            return value_of(entry["value"], name, depth)
    return None


def _interpolate(values: Sequence[Any], depth: float) -> Scalar:
    """Between the two nearest of values that are spread evenly from 0 to 1; words are not mixed."""
    scaled = depth * (len(values) - 1)
    first = int(scaled)
    second = min(len(values) - 1, first + 1)
    share = scaled - first
    if any(isinstance(value, str) for value in values):
        return values[first]  # type: ignore[no-any-return]
    return (1 - share) * values[first] + share * values[second]  # type: ignore[no-any-return]


def depths_of(names: Iterable[str]) -> dict[str, float | None]:
    """Where each tensor is in its stack of layers: 0 first, 1 last, None outside of any.

    Layers are numbered within a prefix, as in `model.layers.3.`.
    """
    found = {name: _LAYER.search(name) for name in names}
    counts: dict[str, int] = {}
    for name, match in found.items():
        if match:
            prefix = name[: match.start()]
            counts[prefix] = max(counts.get(prefix, 0), int(match[1]) + 1)
    return {
        name: _depth(int(match[1]), counts[name[: match.start()]]) if match else None
        for name, match in found.items()
    }


def _depth(layer: int, count: int) -> float:
    return layer / (count - 1) if count > 1 else 1.0


# Methods on a command line ---------------------------------------------------------------------


def parse_merge(text: str) -> tuple[str, dict[str, float]]:
    """A method and its parameters from text such as ties or iso_c:lambda=1.5,weight=1.

    Only methods that merge any number of models can be compared.
    """
    method, _, rest = text.partition(":")
    row = MERGE_METHODS.get(method)
    if row is None or row.models[1] is not None:
        usable = [name for name, one in MERGE_METHODS.items() if one.models[1] is None]
        hint = nearest(method, usable)
        raise UsageError(f"--compare {text}: expected one of {', '.join(usable)}{hint}")
    known = {**row.per_model, **row.per_merge}
    given: dict[str, float] = {}
    for item in filter(None, rest.split(",")):
        key, _, value = item.partition("=")
        try:
            given[key] = float(value)
        except ValueError as problem:
            raise UsageError(f"--compare {text}: '{item}' is not KEY=NUMBER") from problem
        if key not in known:
            hint = nearest(key, known)
            raise UsageError(f"--compare {text}: {method} has no parameter '{key}'{hint}")
    for key, parameter in known.items():
        if parameter.compared is None and key not in given:
            raise UsageError(f"--compare {text}: parameter '{key}' is missing")
    return method, given


def check_compared(merges: Iterable[str], vectors: int) -> None:
    """Raise UsageError if there are fewer task vectors than one of the merges needs."""
    for text in merges:
        least, _ = MERGE_METHODS[parse_merge(text)[0]].models
        if vectors < least:
            raise UsageError(f"--compare {text}: expected {least} or more vectors, found {vectors}")
