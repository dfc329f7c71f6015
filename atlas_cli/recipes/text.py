"""Recipes as text: YAML in and out, and the tables of coefficients that it holds."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from atlas_cli.errors import UsageError

if TYPE_CHECKING:
    from atlas_cli.recipes.learned import LearnedRecipe


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


def table_problems(table: Mapping[str, Mapping[str, float]], where: str) -> list[str]:
    """A line for every number that is not finite."""
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


_MANY_NODES = 100_000  # no recipe is this large; a few nested aliases can be
_DEEP = 50


def parse_mapping(text: str, where: str) -> dict[Any, Any]:
    """The keys and values of a YAML text. Raises UsageError for anything else."""
    return _mapping(_parse(text, where, _load), where)


def parse_documents(text: str, where: str) -> list[dict[Any, Any]]:
    """The keys and values of every document of a YAML text; a text without any has one."""
    found = [one for one in _parse(text, where, _load_all) if one is not None] or [None]
    places = [where] if len(found) == 1 else [f"{where}#{n}" for n in range(1, len(found) + 1)]
    return [_mapping(one, place) for one, place in zip(found, places, strict=True)]


def _mapping(found: Any, where: str) -> dict[Any, Any]:
    if not isinstance(found, dict):
        raise UsageError(f"{where}: expected keys and values, found {type(found).__name__}")
    return found


def write_mapping(found: Mapping[str, Any], comment: str) -> str:
    """Keys and values as YAML, under a comment of one or more lines."""
    lines = "".join(f"# {line}\n" for line in comment.splitlines())
    return lines + yaml.dump(found, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def write_recipe(recipe: LearnedRecipe, comment: str) -> str:
    """A learned recipe as YAML, under a comment of one or more lines."""
    return write_mapping(recipe.model_dump(exclude_none=True), comment)


class _Strict(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Safe YAML in which a key given twice is an error."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key.value, str) and key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"key '{key.value}' is given twice", problem_mark=key.start_mark
                )
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)  # type: ignore[no-any-return]

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except yaml.YAMLError:
            raise
        except (ValueError, ArithmeticError, TypeError, LookupError, AttributeError) as problem:
            # A date that never was, an integer without an end, a !!bool that is none.
            kind, value = node.tag.rpartition(":")[2], str(node.value)
            shown = value if len(value) <= 40 else f"{value[:40]}..."
            raise yaml.MarkedYAMLError(
                problem=f"'{shown}' is no {kind}", problem_mark=node.start_mark
            ) from problem


def _check_size(text: str) -> None:
    """Raise MarkedYAMLError for too many or too deep nodes, before any of them is made.

    An alias, also one of a merge key, counts as all that it stands for.
    """
    open_nodes: list[tuple[str | None, int]] = []  # anchors, and how many nodes came before
    sizes: dict[str, int] = {}  # of what anchors stand for
    count = 0
    for event in yaml.parse(text, _Strict):
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_nodes.pop()
            if anchor:
                sizes[anchor] = count - before
        elif isinstance(event, yaml.NodeEvent):
            anchor = event.anchor
            if isinstance(event, yaml.AliasEvent) and anchor in [name for name, _ in open_nodes]:
                raise _at(event, f"'*{anchor}' is within what it stands for")
            if isinstance(event, yaml.CollectionStartEvent):
                open_nodes.append((anchor, count))
            count += sizes.get(anchor or "", 1) if isinstance(event, yaml.AliasEvent) else 1
            if isinstance(event, yaml.ScalarEvent) and anchor:
                sizes[anchor] = 1
        if count > _MANY_NODES or len(open_nodes) > _DEEP:
            problem = "too many nodes" if count > _MANY_NODES else "nodes within nodes too deep"
            raise _at(event, problem)


def _at(event: Any, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Safe YAML without aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


# YAML 1.1 takes 1e-10 for text, because it has no point; everybody who writes it means a number.
_EXPONENT = re.compile(r"^[-+]?[0-9]+[eE][-+]?[0-9]+$")
for _kind in (_Strict, _Dumper):  # the writer quotes text that the reader would take for a number
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, [*"-+0123456789"])


def _load(text: str) -> Any:
    return yaml.load(text, _Strict)  # noqa: S506 (a safe loader, with more checks)


def _load_all(text: str) -> list[Any]:
    return list(yaml.load_all(text, _Strict))


def _parse(text: str, where: str, load: Callable[[str], Any]) -> Any:
    try:
        _check_size(text)
        return load(text)
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark
        line = f" on line {mark.line + 1}" if mark else ""
        raise UsageError(f"{where}: not valid YAML{line}: {problem.problem}") from problem
    except yaml.YAMLError as problem:
        raise UsageError(f"{where}: not valid YAML: {str(problem).splitlines()[0]}") from problem
