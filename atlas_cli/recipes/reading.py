"""The YAML recipes: frozen dataclasses, and every problem of a text reported at once."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from atlas_cli.errors import UsageError, nearest

_MANY_NODES = 100_000  # no recipe is this large; a few nested aliases can be


@dataclass(frozen=True)
class EvalRecipe:
    """What `atlas eval` compares: models and datasets, and how both are read."""

    models: list[str]
    data: list[str]
    split: str | None = None
    templates: list[str] = dataclasses.field(default_factory=list)
    shots: int | None = None
    arch: str | None = None
    text: str | None = None
    seed: int = 0


@dataclass(frozen=True)
class VectorEntry:
    """A task vector that a learned recipe scales: its name, its file and the file's sha256."""

    name: str
    file: str
    sha256: str


@dataclass(frozen=True)
class LearnedRecipe:
    """What `fit` prints and `merge` takes: a base, vectors, and a coefficient for each block.

    `coefficients` is the table itself or, for a large one, the safetensors file that holds it.
    """

    merge_method: str
    base_model: str
    vectors: list[VectorEntry]
    coefficients: dict[str, dict[str, float]] | str
    granularity: str = "block"
    groups: list[str] = dataclasses.field(default_factory=list)
    linearised: bool = False
    scope: str = "visual"
    seed: int = 0


_UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(text: str) -> int | None:
    """A size in bytes from text such as 2GiB, 500MB or 1000; None if it is none."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.lower())
    return int(float(found[1]) * _UNITS[found[2]]) if found and found[2] in _UNITS else None


Recipe = TypeVar("Recipe")


def read_recipe(schema: type[Recipe], text: str, where: str = "recipe") -> Recipe:
    """Read a recipe. Raises UsageError with one line for every problem found."""
    return _filled(schema, read_keys(schema, text, where))


def read_keys(schema: type, text: str, where: str = "recipe") -> dict[str, Any]:
    """The keys that a recipe gives. Raises UsageError with one line for every problem found."""
    found = parse_mapping(text, where)
    if problems := list(schema_problems(schema, found, where)):
        raise UsageError("\n".join(problems))
    return found


def parse_mapping(text: str, where: str) -> dict[Any, Any]:
    """The keys and values of a YAML text. Raises UsageError for anything else."""
    found = _parse(text, where)
    if not isinstance(found, dict):
        raise UsageError(f"{where}: expected keys and values, found {type(found).__name__}")
    return found


def write_recipe(recipe: LearnedRecipe, comment: str) -> str:
    """A learned recipe as YAML, under a comment of one or more lines."""
    return write_mapping(dataclasses.asdict(recipe), comment)


def write_mapping(found: dict[str, Any], comment: str) -> str:
    """Keys and values as YAML, under a comment of one or more lines."""
    lines = "".join(f"# {line}\n" for line in comment.splitlines())
    return lines + yaml.dump(found, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def _filled(schema: type[Recipe], found: dict[str, Any]) -> Recipe:
    values = dict(found)
    if schema is LearnedRecipe:
        values["vectors"] = [VectorEntry(**entry) for entry in found["vectors"]]
    return schema(**values)


def schema_problems(schema: type, found: dict[Any, Any], where: str) -> Iterator[str]:
    """Every key that is unknown or missing, and every value of the wrong type, one line each."""
    types = get_type_hints(schema)
    for key in found:
        if key not in types:
            yield f"{where}: unknown key '{key}'{nearest(str(key), types)}"
    for field in dataclasses.fields(schema):
        if field.name in found:
            yield from _wrong_type(types[field.name], found[field.name], f"{where}.{field.name}")
        elif field.default is field.default_factory is dataclasses.MISSING:
            yield f"{where}: key '{field.name}' is missing"


def _wrong_type(wanted: Any, value: Any, where: str) -> Iterator[str]:
    """Every way in which a value is not of the type a schema wants. Any is checked elsewhere."""
    if wanted is Any:
        return
    choices = get_args(wanted) if get_origin(wanted) in (Union, UnionType) else (wanted,)
    kinds = {get_origin(choice) or choice: choice for choice in choices}
    if isinstance(value, list) and list in kinds:
        for number, item in enumerate(value):
            yield from _wrong_type(get_args(kinds[list])[0], item, f"{where}[{number}]")
    elif isinstance(value, dict) and dict in kinds:
        for key, item in value.items():
            if not isinstance(key, str):
                yield f"{where}.{key}: expected a name, found {type(key).__name__}; quote it"
            yield from _wrong_type(get_args(kinds[dict])[1], item, f"{where}.{key}")
    elif isinstance(value, dict) and (entries := [c for c in choices if _is_entry(c)]):
        yield from schema_problems(entries[0], value, where)
    elif not _is_one_of(value, kinds):
        names = dict.fromkeys(_word(kind) for kind in kinds)
        listed = " or ".join(name for name in names if name)
        yield f"{where}: expected {listed}, found {type(value).__name__}"


_WORDS = {list: "a list", dict: "keys and values", type(None): ""}


def _is_entry(kind: Any) -> bool:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def _word(kind: Any) -> str:
    if _is_entry(kind):
        return _WORDS[dict]
    return _WORDS.get(kind, getattr(kind, "__name__", ""))


def _is_one_of(value: Any, kinds: Collection[Any]) -> bool:
    if isinstance(value, bool):
        return bool in kinds
    plain = tuple(kind for kind in kinds if kind in (str, int, float, type(None)))
    return isinstance(value, plain) or (float in kinds and isinstance(value, int))


# YAML -----------------------------------------------------------------------------------------


class _Strict(yaml.SafeLoader):
    """Safe YAML in which a key given twice is an error and aliases cannot explode."""

    nodes = 0

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key.value, str) and key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"key '{key.value}' is given twice", problem_mark=key.start_mark
                )
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        self.nodes += 1
        if self.nodes > _MANY_NODES:
            raise yaml.MarkedYAMLError(problem="too many nodes", problem_mark=node.start_mark)
        return super().construct_object(node, deep)


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Safe YAML without aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Strict)
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark
        line = f" on line {mark.line + 1}" if mark else ""
        raise UsageError(f"{where}: not valid YAML{line}: {problem.problem}") from problem
    except (yaml.YAMLError, RecursionError) as problem:
        raise UsageError(f"{where}: not valid YAML: {str(problem).splitlines()[0]}") from problem
