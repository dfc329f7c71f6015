"""What is wrong with a recipe that merges models, beyond types: methods, parameters, slices.

Nothing is opened. Lines begin with the path of the value, such as `.models[0].model: `.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from atlas_cli.errors import nearest
from atlas_cli.recipes.merge_parameters import idle_parameters, parameter_problems
from atlas_cli.recipes.merge_parts import Group, groups_of
from atlas_cli.recipes.merge_tokenizer import tokenizer_problems, tokenizer_sources
from atlas_cli.recipes.model import method_problem
from atlas_cli.registry import MERGE_METHODS, POST_STEPS

if TYPE_CHECKING:
    from atlas_cli.merge_methods.method import MergeMethod

# What is wrong with a reference: a line for each problem, which begins with the path given last.
ReferenceCheck = Callable[[Literal["model", "vector"], Any, str], Iterable[str]]

DTYPES = ("float32", "float16", "bfloat16", "float64")
_OURS = ("vectors", "coefficients", "granularity", "groups", "linearised", "scope", "head")


# Keys that mergekit knows and atlas has no use for --------------------------------------------

_EXPERTS = "mergekit-moe builds mixtures of experts; atlas merges models into one of the same shape"
_REFUSED = dict.fromkeys(("experts", "gate_mode", "experts_per_token", "shared_experts"), _EXPERTS)
_IDLE = ("name", "embed_slerp", "random_seed")
_IDLE_IN_SLICES = ("residual_weight",)
# A recipe without any of these keys has nothing that is idle or refused.
MERGEKIT_KEYS = frozenset(("models", "slices", "modules", *_IDLE, *_REFUSED))


def refused_keys(found: Mapping[Any, Any], where: str) -> Iterator[str]:
    """Keys that mergekit knows and atlas does not support, each by name."""
    for key, what in _REFUSED.items():
        if key in found:
            yield f"{where}: '{key}' is not supported: {what}"


def effective_keys(found: Mapping[Any, Any]) -> dict[Any, Any]:
    """The recipe without keys that mean nothing or are not supported."""
    kept = {key: value for key, value in found.items() if key not in (*_IDLE, *_REFUSED)}
    if isinstance(slices := kept.get("slices"), list):
        kept["slices"] = [
            {key: value for key, value in part.items() if key not in _IDLE_IN_SLICES}
            if isinstance(part, dict)
            else part
            for part in slices
        ]
    return kept


def idle_keys(found: Mapping[Any, Any]) -> tuple[str, ...]:
    """The paths of all keys and parameters of a recipe that have no effect."""
    keys = [key for key in _IDLE if key in found]
    slices = found.get("slices")
    for number, part in enumerate(slices if isinstance(slices, list) else []):
        known = part if isinstance(part, dict) else {}
        keys += [f"slices[{number}].{key}" for key in _IDLE_IN_SLICES if key in known]
    tables: dict[str, list[set[str]]] = {}  # what is idle in a table, for each group that reads it
    for group in groups_of(found):
        row = MERGE_METHODS.get(group.method) if isinstance(group.method, str) else None
        if row is None:
            continue
        both = {**row.per_merge, **row.per_model}
        for table, place in group.levels:
            tables.setdefault(place, []).append({*idle_parameters(table, both, place)})
        for number, entry in enumerate(group.entries):
            own = entry.get("parameters") if isinstance(entry, dict) else None
            place = f"{group.place}[{number}].parameters"
            tables.setdefault(place, []).append({*idle_parameters(own, row.per_model, place)})
    idle = [path for each in tables.values() for path in sorted(set.intersection(*each))]
    return (*keys, *(path.removeprefix(".") for path in idle))


# Dtypes ---------------------------------------------------------------------------------------


def long_dtype(name: str) -> str:
    """The spelling of a dtype that torch has: float16 for fp16 or torch.float16."""
    short = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}
    plain = name.removeprefix("torch.")
    return short.get(plain, plain)


def dtype_problem(name: str) -> str | None:
    """What is wrong with the name of a dtype."""
    if long_dtype(name) in DTYPES:
        return None
    return f"expected {', '.join(DTYPES)}, found '{name}'{nearest(name, DTYPES)}"


def lock_problems(locked: object) -> Iterator[str]:
    """What is wrong with locks beyond their types: one without a digest holds nothing fast."""
    for name, entry in (locked if isinstance(locked, dict) else {}).items():
        if isinstance(entry, dict) and not any(entry.get(kind) for kind in ("sha256", "blake3")):
            yield f".locked.{name}: has no digest; expected sha256 or blake3 of its files"


# Models ---------------------------------------------------------------------------------------


def model_problems(found: Mapping[str, Any], check: ReferenceCheck) -> Iterator[str]:
    """What is wrong with values together. Parts of the wrong type are left to the model."""
    for key in _OURS:
        if key in found:
            yield f": '{key}' belongs to merge_method atlas"
    groups = list(groups_of(found))
    models = [entry.get("model") for group in groups for entry in group.listed]
    named = {name for name in (*models, found.get("base_model")) if isinstance(name, str)}
    yield from tokenizer_problems(found, list(named))
    for source, where in tokenizer_sources(found):
        yield from check("model", source, where)
    yield from _choice_problems(found, "")
    modules = found.get("modules")
    for name, module in (modules if isinstance(modules, dict) else {}).items():
        if isinstance(module, dict):
            yield from _choice_problems(module, f".modules.{name}")
    for group in groups:
        yield from _group_problems(group, found, check)
    yield from _post_problems(found)


def _post_problems(found: Mapping[str, Any]) -> Iterator[str]:
    """Steps after the method: their names, their parameters, and that there is a base."""
    steps = found.get("post")
    if not isinstance(steps, dict):
        return
    if steps and found.get("base_model") is None:
        yield ": key 'base_model' is missing; post steps need it"
    for name, given in steps.items():
        if name not in POST_STEPS:
            yield f".post: unknown step '{name}'{nearest(str(name), POST_STEPS)}"
            continue
        known = POST_STEPS[name].parameters
        for key, value in (given if isinstance(given, dict) else {}).items():
            if isinstance(value, list | dict):
                yield f".post.{name}.{key}: expected one number for all tensors"
                given = {k: v for k, v in given.items() if k != key}
        if isinstance(given, dict):
            yield from parameter_problems(given, known, f".post.{name}")


def _choice_problems(found: Mapping[str, Any], where: str) -> Iterator[str]:
    """A table lists models in one of several ways."""
    ways = ("models", "slices") if where else ("models", "slices", "modules")
    given = [key for key in ways if found.get(key) is not None]
    if len(given) != 1:
        listed = " or ".join([", ".join(f"'{way}'" for way in ways[:-1]), f"'{ways[-1]}'"])
        yield f"{where}: expected either {listed}"
    elif given[0] != "models" and found[given[0]] in ([], {}):
        yield f"{where}.{given[0]}: is empty"


def _group_problems(group: Group, found: Mapping[str, Any], check: ReferenceCheck) -> Iterator[str]:
    above = group.place.removesuffix(".sources")
    if group.base is not found.get("base_model"):
        yield from check("model", group.base, f"{above}.base_model")
    if group.method is not found.get("merge_method") and isinstance(group.method, str):
        wrong = method_problem(group.method)
        wrong = wrong or ("'atlas' merges no slices" if group.method == "atlas" else None)
        yield from [f"{above}.merge_method: {wrong}"] if wrong else []
    for number, entry in enumerate(group.entries):
        if isinstance(entry, dict):
            where = f"{group.place}[{number}]"
            yield from check("model", entry.get("model"), f"{where}.model")
    if group.sliced:
        yield from _range_problems(group)
    row = MERGE_METHODS.get(group.method) if isinstance(group.method, str) else None
    if row is None:
        return
    yield from _number_problems(group, row)
    yield from _value_problems(group, row)
    if row.base == "must" and group.base is None:
        yield f": key 'base_model' is missing; {group.method} needs it"


def _range_problems(group: Group) -> Iterator[str]:
    """Ranges of layers that begin before they end, and are of the same length in a slice."""
    lengths = set()
    for number, entry in enumerate(group.entries):
        span = entry.get("layer_range") if isinstance(entry, dict) else None
        if not isinstance(span, list) or not all(type(end) is int for end in span):
            continue
        if len(span) != 2 or not 0 <= span[0] < span[1]:
            yield (
                f"{group.place}[{number}].layer_range: expected [FIRST, END] with 0 <= FIRST < END "
                f"(the layer END is not taken any more), found {span}"
            )
        else:
            lengths.add(span[1] - span[0])
    if len(lengths) > 1:
        listed = " and ".join(map(str, sorted(lengths)))
        yield f"{group.place}: layer_range must be of the same length for all, found {listed}"


def _number_problems(group: Group, row: MergeMethod) -> Iterator[str]:
    names = [entry.get("model") for entry in group.listed]
    twice = (name for name in names if isinstance(name, str) and names.count(name) > 1)
    for name in dict.fromkeys(twice):
        yield f"{group.place}: {name} is given twice"
    count = len([name for name in names if row.base == "no" or name != group.base])
    low, high = row.models
    beside = " beside the base" if row.base != "no" else ""
    if count < low:
        yield f"{group.place}: expected {low} or more models{beside}, found {count}"
    elif high is not None and count > high:
        plural = "s" * (high > 1)
        yield f"{group.place}: expected {high} model{plural}{beside}, found {count}"


def _value_problems(group: Group, row: MergeMethod) -> Iterator[str]:
    """Parameters that are unknown, out of range, or missing."""
    both = {**row.per_merge, **row.per_model}
    for table, place in group.levels:
        if table is not None:
            yield from parameter_problems(table, both, place)
    general = {key for table, _ in group.levels if isinstance(table, dict) for key in table}
    for number, entry in enumerate(group.entries):
        if not isinstance(entry, dict):
            continue
        own = entry.get("parameters")
        if own is not None:
            yield from parameter_problems(own, row.per_model, f"{group.place}[{number}].parameters")
        given = general | (set(own) if isinstance(own, dict) else set())
        if row.base == "no" or entry.get("model") != group.base:
            for key, parameter in row.per_model.items():
                if parameter.default is None and key not in given:
                    yield f"{group.place}[{number}]: parameter '{key}' is missing"
    for key, parameter in row.per_merge.items():
        if parameter.default is None and key not in general:
            yield f"{group.levels[-1][1]}: parameter '{key}' is missing"
    names, base = [entry.get("model") for entry in group.listed], group.base
    if row.base == "no" and isinstance(base, str) and base not in names and not group.sliced:
        for key, parameter in row.per_model.items():
            if parameter.default is None and key not in general:
                yield f"{group.place}: base_model {base} is not listed, so it has no '{key}'"
