"""Tensors cut into tiles and merged, as the engine does it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from atlas_cli.merge_methods.method import MergeMethod, Parameter, Values
from atlas_cli.merge_methods.tiling import Tile, tile_of
from atlas_cli.registry import MERGE_METHODS


def rows_of(tensor: torch.Tensor, first: int, count: int) -> torch.Tensor:
    return tensor[first : first + count] if tensor.ndim else tensor


def cut(
    base: torch.Tensor | None, models: Sequence[torch.Tensor], rows: int, name: str = "weight"
) -> Iterator[Tile]:
    """Tiles of `rows` rows each, or elements of a vector."""
    shape = tuple(models[0].shape)
    width = math.prod(shape[1:])
    for first in range(0, shape[0] if shape else 1, rows):
        part = None if base is None else rows_of(base, first, rows)
        parts = tuple(rows_of(model, first, rows) for model in models)
        yield tile_of(name, first * width, shape, part, parts)


def resolve(method: MergeMethod, count: int, parameters: Mapping[str, Any], seed: int) -> Values:
    """Defaults and given values; those of models are lists, or one number for all."""

    def chosen(table: Mapping[str, Parameter], model: int) -> dict[str, Any]:
        given = {key: parameters.get(key, one.default) for key, one in table.items()}
        return {key: v[model] if isinstance(v, list) else v for key, v in given.items()}

    assert set(parameters) <= {*method.per_model, *method.per_merge}
    per_model = tuple(chosen(method.per_model, i) for i in range(count))
    return Values(per_model, chosen(method.per_merge, 0), seed)


def merge(
    name: str,
    base: torch.Tensor | None,
    models: Sequence[torch.Tensor],
    parameters: Mapping[str, Any] | None = None,
    *,
    rows: int = 1 << 30,
    seed: int = 0,
) -> torch.Tensor:
    """The merged tensor, `rows` rows at a time unless the method wants it whole."""
    method = MERGE_METHODS[name]
    values = resolve(method, len(models), parameters or {}, seed)
    step = 1 << 30 if method.whole else rows
    found = method.statistics(lambda: cut(base, models, step), values)
    parts = [method.apply(tile, values, found) for tile in cut(base, models, step)]
    return torch.cat(parts) if models[0].ndim else parts[0]
