"""What pydantic finds wrong with a recipe, in our own sentences: one line for each problem."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from atlas_cli.errors import nearest

# Kinds of errors beside pydantic's own: of the type, of the value, and of a number that is inf.
KIND, VALUE, FINITE = "kind", "value", "finite"
CONFLICT = "conflict"  # of values with each other
_TYPES = {
    "string_type": "str",
    "int_type": "int",
    "float_type": "float",
    "bool_type": "bool",
    "list_type": "a list",
    "dict_type": "keys and values",
    "model_type": "keys and values",
}
_KEY = "[key]"  # how pydantic says that the key is meant, not its value
_UNKNOWN = {"extra_forbidden", "invalid_key", "string_unicode"}
_STRUCTURE = {*_TYPES, *_UNKNOWN, "missing", KIND}


class Problems(NamedTuple):
    """Keys that are unknown or missing and wrong types; and what is wrong beyond that."""

    structure: list[str]
    values: list[str]


def sentences(
    errors: Sequence[ErrorDetails],
    schema: type[BaseModel],
    found: Mapping[Any, Any],
    where: str,
    prefix: str,
    order: Sequence[str],
) -> Problems:
    """Errors as lines. `order` are keys in the order in which problems with values come, if any."""
    structure = [error for error in errors if error["type"] in _STRUCTURE]
    values = [error for error in errors if error["type"] not in _STRUCTURE]
    taken = {error["loc"] for error in values if error["type"] == CONFLICT}
    values = [e for e in values if e["type"] != VALUE or e["loc"] not in taken]
    if order:
        values.sort(key=lambda error: _place(error, order))
    return Problems(
        [_structure(error, schema, found, where) for error in _unknown_first(structure)],
        [
            f"{prefix}{_path(found, e['loc'])[1:]}: {_value(e)}" if e["loc"] else where + _value(e)
            for e in values
        ],
    )


def _place(error: ErrorDetails, order: Sequence[str]) -> int:
    key = str(error["loc"][0])
    if error["type"] == FINITE:  # after all others
        return len(order) + order.index(key)
    if error["type"] in (VALUE, CONFLICT):
        return order.index(key)
    return len(order) - 1 - order[::-1].index(key)


def _unknown_first(errors: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    """Errors as pydantic has them, but unknown keys before the other problems of their table."""
    first: dict[tuple[int | str, ...], int] = {}

    def place(number: int, error: ErrorDetails) -> list[tuple[bool, int]]:
        loc = error["loc"][:-1] if error["loc"][-1:] == (_KEY,) else error["loc"]
        paths = [loc[: depth + 1] for depth in range(len(loc))]
        known = [True] * len(loc[1:]) + [error["type"] not in _UNKNOWN]
        return [(k, first.setdefault(path, number)) for k, path in zip(known, paths, strict=False)]

    placed = [(place(number, error), error) for number, error in enumerate(errors)]
    return [error for _, error in sorted(placed, key=lambda pair: pair[0])]


def _structure(
    error: ErrorDetails, schema: type[BaseModel], found: Mapping[Any, Any], where: str
) -> str:
    kind, loc, value = error["type"], error["loc"], error["input"]
    if kind == "missing":
        return f"{where}{_path(found, loc[:-1])}: key '{loc[-1]}' is missing"
    if kind in _UNKNOWN:
        key = loc[-1] if kind == "extra_forbidden" else value
        table = loc if kind == "string_unicode" else loc[:-1]
        close = nearest(str(key), _entry_at(schema, table).model_fields)
        return f"{where}{_path(found, table)}: unknown key '{key}'{close}"
    if loc[-1] == _KEY and not isinstance(value, str):
        path = _path(found, loc[:-1])
        return f"{where}{path}: expected a name, found {type(value).__name__}; quote it"
    expected = _TYPES.get(kind) or error.get("ctx", {}).get("text") or error["msg"]
    return f"{where}{_path(found, loc)}: expected {expected}, found {type(value).__name__}"


def _value(error: ErrorDetails) -> str:
    context = error.get("ctx", {})
    if error["type"] == "greater_than":
        return f"expected more than {context['gt']:g}, found {error['input']}"
    if error["type"] == "greater_than_equal":
        return f"expected {context['ge']:g} or more, found {error['input']}"
    return str(context["text"])


def _path(found: Any, loc: Iterable[int | str]) -> str:
    """Where a value is, such as .models[0].model. Names of types are no part of it."""
    path = ""
    for item in loc:
        if str(item).startswith("\0"):
            continue
        if isinstance(found, list):
            path, found = f"{path}[{item}]", found[int(item)]
            continue
        table = found if isinstance(found, dict) else {}
        # pydantic shows a key that is no text in its own way: True as 1, a date by its repr.
        key = next((k for k in table if k == item or repr(k) == item), item)
        path, found = f"{path}.{key}", table.get(key)
    return path


def _entry_at(schema: type[BaseModel], loc: Iterable[int | str]) -> type[BaseModel]:
    """The model whose keys are at a place of a recipe."""
    for item in loc:
        if item in schema.model_fields:
            inside = _entries_in(schema.model_fields[str(item)].annotation)
            schema = next(inside, schema)
    return schema


def _entries_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _entries_in(argument)
