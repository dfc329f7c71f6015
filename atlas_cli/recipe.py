"""The YAML recipes: frozen dataclasses, and every problem of a text reported at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

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


def read_recipe(text: str, where: str = "recipe") -> EvalRecipe:
    """Read a recipe. Raises UsageError with one line for every problem found."""
    found = _parse(text, where)
    if not isinstance(found, dict):
        raise UsageError(f"{where}: expected keys and values, found {type(found).__name__}")
    if problems := list(_problems(EvalRecipe, found, where)):
        raise UsageError("\n".join(problems))
    return EvalRecipe(**found)


def _problems(schema: type, found: dict[Any, Any], where: str) -> Iterator[str]:
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
    if wanted == list[str]:
        if not isinstance(value, list):
            yield f"{where}: expected a list, found {type(value).__name__}"
            return
        for number, item in enumerate(value):
            yield from _wrong_type(str, item, f"{where}[{number}]")
        return
    allowed = get_args(wanted) or (wanted,)
    if not isinstance(value, allowed) or isinstance(value, bool):
        names = " or ".join(kind.__name__ for kind in allowed if kind is not type(None))
        yield f"{where}: expected {names}, found {type(value).__name__}"


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


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Strict)
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark
        line = f" on line {mark.line + 1}" if mark else ""
        raise UsageError(f"{where}: not valid YAML{line}: {problem.problem}") from problem
    except (yaml.YAMLError, RecursionError) as problem:
        raise UsageError(f"{where}: not valid YAML: {str(problem).splitlines()[0]}") from problem
