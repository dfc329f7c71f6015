"""Where a merge recipe lists models: `models`, every slice of `slices`, and both in `modules`.

Recipes are read as they were given, whatever is wrong with them; `merge_checks` says what is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Group:
    """Models that are merged with each other.

    `place` is the path of their list, `module` the part of the model that they give. `levels` are
    tables of parameters for all of them, each with its path, the most special first.
    """

    place: str
    entries: list[Any]
    levels: tuple[tuple[Any, str], ...]
    base: Any
    method: Any
    module: str | None = None
    sliced: bool = False

    @property
    def listed(self) -> list[Mapping[str, Any]]:
        """The entries that are tables."""
        return [entry for entry in self.entries if isinstance(entry, dict)]


def groups_of(found: Mapping[str, Any]) -> Iterator[Group]:
    """Every group of models of a recipe, in the order of the result's layers."""
    general = ((found.get("parameters"), ".parameters"),)
    yield from _groups_in(found, None, general, found)
    for name, module in _table(found.get("modules")).items():
        if isinstance(module, dict):
            levels = ((module.get("parameters"), f".modules.{name}.parameters"), *general)
            yield from _groups_in(module, name, levels, found)


def _groups_in(
    table: Mapping[str, Any],
    module: str | None,
    levels: tuple[tuple[Any, str], ...],
    found: Mapping[str, Any],
) -> Iterator[Group]:
    base, method = found.get("base_model"), found.get("merge_method")
    place = f".modules.{module}" if module is not None else ""
    if isinstance(table.get("models"), list):
        yield Group(f"{place}.models", table["models"], levels, base, method, module)
        return
    slices = table.get("slices")
    for number, part in enumerate(slices if isinstance(slices, list) else []):
        if isinstance(part, dict) and isinstance(part.get("sources"), list):
            path = f"{place}.slices[{number}]"
            own = ((part.get("parameters"), f"{path}.parameters"), *levels)
            whose = part.get("base_model") or base, part.get("merge_method") or method
            yield Group(f"{path}.sources", part["sources"], own, *whose, module, sliced=True)


def _table(found: Any) -> Mapping[str, Any]:
    return found if isinstance(found, dict) else {}
