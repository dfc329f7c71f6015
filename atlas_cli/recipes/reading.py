"""YAML text -> keys and values, and back. Aliases cannot explode; a key given twice is an error."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

import yaml

from atlas_cli.errors import UsageError

if TYPE_CHECKING:
    from atlas_cli.recipes.merge import LearnedRecipe

_MANY_NODES = 100_000  # no recipe is this large; a few nested aliases can be


def parse_mapping(text: str, where: str) -> dict[Any, Any]:
    """The keys and values of a YAML text. Raises UsageError for anything else."""
    found = _parse(text, where)
    if not isinstance(found, dict):
        raise UsageError(f"{where}: expected keys and values, found {type(found).__name__}")
    return found


def write_mapping(found: Mapping[str, Any], comment: str) -> str:
    """Keys and values as YAML, under a comment of one or more lines."""
    lines = "".join(f"# {line}\n" for line in comment.splitlines())
    return lines + yaml.dump(found, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def write_recipe(recipe: LearnedRecipe, comment: str) -> str:
    """A learned recipe as YAML, under a comment of one or more lines."""
    return write_mapping(recipe.model_dump(), comment)


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
