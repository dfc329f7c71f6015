"""Values of merge parameters: a scalar, a gradient over the layers, or values by name of tensor."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from atlas_cli.errors import UsageError, nearest


@dataclass(frozen=True)
class Knob:
    """A number, a switch or a word that a recipe may set. `default` None: it must be given."""

    default: float | bool | str | None = None
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()


Knobs = Mapping[str, Knob]


Base = Literal["no", "may", "must"]


@dataclass(frozen=True)
class MethodSpec:
    """A method: what it does with a base, how many models it merges, and its parameters.

    The number of models does not count the base, unless the method has no use for one.
    """

    base: Base
    models: tuple[int, int | None]
    per_model: Knobs = field(default_factory=dict)
    per_merge: Knobs = field(default_factory=dict)


def _one_of(*choices: str) -> Knob:
    """A word; the first is the default."""
    return Knob(choices[0], choices=choices)


_LAMBDA, _INT8 = Knob(1.0), Knob(False)  # mergekit's int8_mask changes no number
_OWN = {"weight": Knob(), "density": Knob(1.0, 0.0, 1.0)}
_EPSILON, _GAMMA = {"epsilon": Knob(0.15, 0.0, 1.0)}, {"gamma": Knob(0.01, 0.0, 1.0)}
_SCOPE = {"scope": _one_of("tensor", "model")}
_ROUNDING = {"rounding": _one_of("floor", "ceil", "above")}
_RESCALE_BY = {"rescale_by": _one_of("norm", "density")}
_ELECTION = {
    "elect": _one_of("sum", "count"),
    "zero_sign": _one_of("positive", "majority"),
    "weigh": _one_of("before", "after"),
    "divisor": _one_of("weight", "count"),
}


def _arithmetic(normalize: bool, rescale: bool, own: Knobs, merge: Knobs) -> MethodSpec:
    """A method of the family of task arithmetic, and what it has beside the family's."""
    switches = {"normalize": Knob(normalize), "rescale": Knob(rescale)}
    shared = {**switches, "lambda": _LAMBDA, "int8_mask": _INT8}
    return MethodSpec("must", (1, None), {**_OWN, **own}, {**shared, **merge})


def _spectral(**more: Knob) -> MethodSpec:
    """A method that decomposes the matrices of task vectors."""
    return MethodSpec("must", (1, None), {"weight": Knob(1.0)}, {"lambda": _LAMBDA, **more})


# One row for each of core/methods/registry.py; a test holds the two equal.
METHODS: Mapping[str, MethodSpec] = {
    "linear": MethodSpec("no", (1, None), {"weight": Knob()}, {"normalize": Knob(True)}),
    "slerp": MethodSpec("must", (1, 1), {}, {"t": Knob()}),
    "nuslerp": MethodSpec(
        "may",
        (2, 2),
        {"weight": Knob()},
        {"nuslerp_flatten": Knob(True), "nuslerp_row_wise": Knob(False)},
    ),
    "multislerp": MethodSpec(
        "may",
        (1, None),
        {"weight": Knob()},
        {"normalize_weights": Knob(True), "eps": Knob(1e-8, 0.0)},
    ),
    "karcher": MethodSpec("no", (1, None), {}, {"max_iter": Knob(10, 0), "tol": Knob(1e-5, 0.0)}),
    "passthrough": MethodSpec("no", (1, 1), {"scale": Knob(1.0)}),
    "task_arithmetic": _arithmetic(False, False, {}, {}),
    "ties": _arithmetic(True, False, {}, {**_SCOPE, **_ROUNDING, **_ELECTION}),
    "dare_linear": _arithmetic(False, True, {}, _RESCALE_BY),
    "dare_ties": _arithmetic(False, True, {}, {**_RESCALE_BY, **_ELECTION}),
    "della": _arithmetic(True, True, _EPSILON, {**_RESCALE_BY, **_ELECTION}),
    "della_linear": _arithmetic(False, True, _EPSILON, _RESCALE_BY),
    "breadcrumbs": _arithmetic(False, False, _GAMMA, _SCOPE),
    "breadcrumbs_ties": _arithmetic(False, False, _GAMMA, {**_SCOPE, **_ELECTION}),
    "model_stock": MethodSpec("must", (2, None), {}, {"filter_wise": Knob(False)}),
    "sce": MethodSpec(
        "must", (1, None), {}, {"select_topk": Knob(1.0, 0.0, 1.0), "int8_mask": _INT8}
    ),
    "wise_ft": MethodSpec("must", (1, 1), {}, {"alpha": Knob(0.5)}),
    "lines": MethodSpec(
        "must", (1, None), {"weight": Knob(1.0)}, {"alpha": Knob(), "beta": Knob()}
    ),
    "metagpt": MethodSpec("must", (1, None), {}, {"lambda": _LAMBDA}),
    "consensus": MethodSpec(
        "must",
        (1, None),
        {"threshold": Knob(0.4, 0.0)},
        {"lambda": _LAMBDA, "agreement": Knob(2, 1)},
    ),
    "tsv": _spectral(),
    "iso_c": _spectral(),
    "iso_cts": _spectral(common_space_fraction=Knob(0.8, 0.0, 1.0)),
    "atlas": MethodSpec("must", (0, 0)),
}
# What mergekit has and atlas does not: named, so that nobody looks for a misspelling.
OTHERS = ("arcee_fusion", "nearswap", "ram", "ramplus_tl", "rectify_embed")


Scalar = float | bool | str
_LAYER = re.compile(r"\.(\d+)\.")


# Checking -------------------------------------------------------------------------------------


def parameter_problems(found: Any, known: Knobs, elsewhere: Knobs, where: str) -> Iterator[str]:
    """What is wrong with a table of parameters. `elsewhere` belong to another table."""
    if not isinstance(found, dict):
        yield f"{where}: expected keys and values, found {type(found).__name__}"
        return
    for name, setting in found.items():
        if name in known:
            yield from _setting_problems(setting, known[name], f"{where}.{name}")
        elif name in elsewhere:
            yield f"{where}: '{name}' is one for the whole merge; give it under parameters"
        else:
            listed = f" (there are: {', '.join(known)})" if known else " (there are none)"
            yield f"{where}: unknown parameter '{name}'{nearest(str(name), known)}{listed}"


def _setting_problems(setting: Any, knob: Knob, where: str) -> Iterator[str]:
    entries = [setting] if isinstance(setting, dict) else setting
    if isinstance(entries, list) and any(isinstance(entry, dict) for entry in entries):
        for number, entry in enumerate(entries):
            yield from _condition_problems(entry, knob, f"{where}[{number}]")
    elif isinstance(setting, list):
        if len(setting) < 2:
            yield f"{where}: a gradient has two values or more, found {len(setting)}"
        for number, value in enumerate(setting):
            yield from _scalar_problems(value, knob, f"{where}[{number}]")
    else:
        yield from _scalar_problems(setting, knob, where)


def _condition_problems(entry: Any, knob: Knob, where: str) -> Iterator[str]:
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
        yield from _setting_problems(entry["value"], knob, f"{where}.value")


def _scalar_problems(value: Any, knob: Knob, where: str) -> Iterator[str]:
    if knob.choices:
        if value not in knob.choices:
            hint = nearest(str(value), knob.choices)
            yield f"{where}: expected {' or '.join(knob.choices)}, found {value!r}{hint}"
    elif isinstance(knob.default, bool):
        if value not in (0, 1):  # True and False are 1 and 0; mergekit takes these, too
            yield f"{where}: expected true or false, found {value!r}"
    elif isinstance(value, bool) or not isinstance(value, int | float):
        yield f"{where}: expected a number, found {type(value).__name__}"
    elif not math.isfinite(value):
        yield f"{where}: expected a finite number, found {value}"
    elif knob.low is not None and value < knob.low:
        yield f"{where}: expected {knob.low:g} or more, found {value:g}"
    elif knob.high is not None and value > knob.high:
        yield f"{where}: expected {knob.high:g} or less, found {value:g}"


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


def filters_of(parameters: Mapping[str, Any]) -> Iterator[str]:
    """Every filter that a table of parameters uses."""
    for setting in parameters.values():
        for entry in setting if isinstance(setting, list) else [setting]:
            if isinstance(entry, dict) and entry.get("filter") not in (None, "*"):
                yield entry["filter"]


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


def count_layers(names: Iterable[str]) -> int:
    """The number of layers of the longest stack."""
    matches = (_LAYER.search(name) for name in names)
    return max((int(match[1]) + 1 for match in matches if match), default=0)


# Methods on a command line ---------------------------------------------------------------------

_UNUSABLE = {"atlas", "passthrough", "slerp", "nuslerp", "wise_ft"}  # not for any number of models


def parse_merge(text: str) -> tuple[str, dict[str, float]]:
    """A method and its parameters from text such as ties or iso_c:lambda=1.5,weight=1."""
    method, _, rest = text.partition(":")
    usable = [name for name in METHODS if name not in _UNUSABLE]
    if method not in usable:
        hint = nearest(method, usable)
        raise UsageError(f"--compare {text}: expected one of {', '.join(usable)}{hint}")
    knobs = {**METHODS[method].per_model, **METHODS[method].per_merge}
    given: dict[str, float] = {}
    for item in filter(None, rest.split(",")):
        key, _, value = item.partition("=")
        try:
            given[key] = float(value)
        except ValueError as problem:
            raise UsageError(f"--compare {text}: '{item}' is not KEY=NUMBER") from problem
        if key not in knobs:
            hint = nearest(key, knobs)
            raise UsageError(f"--compare {text}: {method} has no parameter '{key}'{hint}")
    return method, given
