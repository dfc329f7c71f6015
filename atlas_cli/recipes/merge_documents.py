"""Several merges in one recipe: YAML documents with names that refer to each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from atlas_cli.errors import UsageError

_NAMES = ("name", "out_path")
_REFERENCES = ("model", "base_model", "tokenizer_source", "source")  # keys that name a model


def name_of(document: Mapping[Any, Any]) -> str | None:
    """What other documents call the result of a merge; None for the one that is the last."""
    return next((str(document[key]) for key in _NAMES if document.get(key) is not None), None)


def in_order(documents: Sequence[Mapping[Any, Any]], where: str) -> list[int]:
    """The numbers of the documents that the last merge needs, each after those that it needs.

    The last merge is the one without a name, or the last document.
    """
    names = [name_of(document) for document in documents]
    lines = [
        f"{where}: the name '{name}' is given twice"
        for name in dict.fromkeys(names)
        if name and names.count(name) > 1
    ]
    if names.count(None) > 1:
        lines.append(f"{where}: {names.count(None)} documents have no name; one of them may")
    if lines:
        raise UsageError(*lines)
    last = names.index(None) if None in names else len(names) - 1
    needs = [
        {names.index(name) for name in map(_model, references(found)) if name in names}
        for found in documents
    ]
    order: list[int] = []
    _visit(last, needs, [], order, [str(name) for name in names], where)
    return order


def _visit(
    at: int,
    needs: Sequence[set[int]],
    way: list[int],
    order: list[int],
    names: Sequence[str],
    where: str,
) -> None:
    if at in order:
        return
    if at in way:
        circle = " -> ".join(names[number] for number in [*way[way.index(at) :], at])
        raise UsageError(f"{where}: merges need each other in a circle: {circle}")
    for other in sorted(needs[at]):
        _visit(other, needs, [*way, at], order, names, where)
    order.append(at)


def references(found: Any, key: str = "") -> Iterator[str]:
    """Every model that a document names."""
    if isinstance(found, Mapping):
        for name, value in found.items():
            yield from references(value, str(name))
    elif isinstance(found, list):
        for value in found:
            yield from references(value, key)
    elif isinstance(found, str) and key in _REFERENCES:
        yield found


def _model(reference: str) -> str:
    return reference.partition("+")[0]


def with_places(found: Any, places: Mapping[str, str], key: str = "") -> Any:
    """A document in which names are replaced: of models, and in the table `locked`."""
    if isinstance(found, Mapping):
        return {
            _placed(name, places, "/") if key == "locked" else name: with_places(
                value, places, name
            )
            for name, value in found.items()
        }
    if isinstance(found, list):
        return [with_places(value, places, key) for value in found]
    if isinstance(found, str) and key in _REFERENCES:
        return _placed(found, places, "+")
    return found


def _placed(text: str, places: Mapping[str, str], end: str) -> str:
    """A name with its place instead, also where more follows: an adapter, or a file of a model."""
    for name, place in places.items():
        if text == name or text.startswith(name + end):
            return place + text.removeprefix(name)
    return text
