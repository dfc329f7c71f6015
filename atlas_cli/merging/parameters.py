"""What every parameter of a recipe is for every tensor."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atlas_cli.errors import AtlasError, UsageError
from atlas_cli.merge_recipe import Merge
from atlas_cli.method_table import METHODS
from atlas_cli.settings import count_layers, depths_of, filters_of, resolve


@dataclass(frozen=True)
class Resolved:
    """The parameters of one tensor: those of each model, those of the whole merge, its depth."""

    models: tuple[dict[str, Any], ...]
    merge: dict[str, Any]
    depth: float | None


def resolve_all(merge: Merge, names: Sequence[str]) -> dict[str, Resolved]:
    """What every parameter is for every tensor. Raises AtlasError if one has no value."""
    if merge.layers not in (None, layers := count_layers(names)):
        raise UsageError(
            f"slices: layer_range ends at {merge.layers}, but the models have {layers} layers"
        )
    depths = depths_of(names)
    return {name: _resolve_one(merge, name, depths[name]) for name in names}


def check_together(
    merge: Merge, resolved: Mapping[str, Resolved], dtypes: Collection[object]
) -> None:
    """Raise UsageError if tensors that are merged as one vector differ in more than their names."""
    who = f"{merge.method} with scope model"
    first = next(iter(resolved.values()))
    for name, one in resolved.items():
        if (one.models, one.merge) != (first.models, first.merge):
            raise UsageError(f"{who}: give every parameter as one value; {name} has another")
    if len(dtypes) > 1 and not merge.recipe.dtype:
        raise UsageError(f"{who}: tensors have several dtypes; give a dtype to compute in")


def _resolve_one(merge: Merge, name: str, depth: float | None) -> Resolved:
    row = METHODS[merge.method]

    def value(levels: Sequence[Mapping[str, Any]], key: str, default: Any, whose: str) -> Any:
        found = resolve(levels, key, name, depth)
        if found is None and default is None:
            raise AtlasError(f"{name}: no filter gives it a {key}{whose}; add an entry without one")
        return default if found is None else found

    models = tuple(
        {key: value(levels, key, knob.default, f" of {who}") for key, knob in row.per_model.items()}
        for who, levels in merge.models
    )
    whole = {key: value(merge.levels, key, knob.default, "") for key, knob in row.per_merge.items()}
    return Resolved(models, whole, depth)


def idle_filters(merge: Merge, names: Sequence[str]) -> list[str]:
    """Filters that no tensor's name contains."""
    tables = [*merge.levels, *(levels[0] for _, levels in merge.models)]
    used = dict.fromkeys(text for table in tables for text in filters_of(table))
    return [text for text in used if not any(text in name for name in names)]


def explain(merge: Merge, resolved: Mapping[str, Resolved], pattern: str) -> list[dict[str, Any]]:
    """The parameters of every tensor whose name the regular expression is found in."""
    return [
        {
            "tensor": name,
            "parameters": one.merge,
            "models": {who: own for (who, _), own in zip(merge.models, one.models, strict=True)},
        }
        for name, one in resolved.items()
        if re.search(pattern, name)
    ]
