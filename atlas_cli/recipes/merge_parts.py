"""Where a merge recipe lists models: `models`, every slice of `slices`, and both in `modules`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from atlas_cli.registry import MERGE_METHODS

Range = tuple[int, int]
Levels = tuple[Mapping[str, Any], ...]


# As it is written -----------------------------------------------------------------------------


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


# In normal form -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """Models that are merged into some tensors of the result.

    `models` come with their tables of parameters, the most special first. `base` is None for a
    method that has no use for one. `ranges` are the layers that each model gives; without them
    every tensor is merged with the one of the same name. `place` is where the recipe says so.
    """

    place: str
    module: str | None
    method: str
    base: str | None
    models: tuple[tuple[str, Levels], ...]
    levels: Levels
    ranges: Mapping[str, Range] | None = None

    @property
    def references(self) -> tuple[str, ...]:
        """The base, if there is one, and the models."""
        return (*([self.base] if self.base else []), *(model for model, _ in self.models))


def parts_of(raw: Mapping[str, Any]) -> tuple[Part, ...]:
    """The parts of a recipe that was checked, in the order of the result's layers."""
    return tuple(_part(group) for group in groups_of(raw))


def _part(group: Group) -> Part:
    levels = tuple(table or {} for table, _ in group.levels)
    use, base = MERGE_METHODS[group.method].base, group.base
    listed = [(e["model"], (e.get("parameters") or {}, *levels)) for e in group.listed]
    if use == "no" and base and not group.sliced and base not in [model for model, _ in listed]:
        listed.append((base, levels))
    ranges: dict[str, Range] = {}
    if group.sliced:
        ranges = {e["model"]: (e["layer_range"][0], e["layer_range"][1]) for e in group.listed}
    kept = base if use != "no" else None
    if kept and group.sliced:  # a base that is not listed gives the layers of the first source
        ranges.setdefault(kept, next(iter(ranges.values())))
    return Part(
        group.place.removeprefix(".").removesuffix(".sources"),
        group.module,
        group.method,
        kept,
        tuple(one for one in listed if use == "no" or one[0] != base),
        levels,
        ranges if group.sliced else None,
    )
