"""What learning buys: the same tasks with a uniform scale, with merges, and with own models."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from atlas_cli.core.storage import decode
from atlas_cli.learning.add import own_tables
from atlas_cli.learning.batches import score
from atlas_cli.learning.selection import folds_for, search_tables
from atlas_cli.learning.setup import PreparedRun, Setting
from atlas_cli.merge_methods.method import Values
from atlas_cli.merge_methods.tiling import tile_of
from atlas_cli.recipes.learning import parse_individual
from atlas_cli.recipes.merge_parameters import depths_of, parse_merge
from atlas_cli.registry import MERGE_METHODS


def contest(
    ready: PreparedRun,
    coefficients: torch.Tensor,
    scales: Iterable[torch.Tensor],
    merges: Sequence[str],
) -> dict[str, list[float]]:
    """The accuracy on every task, by method: zero-shot, search, what was learned, and merges.

    Nothing is searched if there are no scales.
    """
    setting, objective = ready.setting, ready.objective
    recipe = ready.inputs.recipe
    (whole,) = folds_for("same", setting.tasks, recipe.seed)
    tables = {"zero-shot": setting.table()}
    if recipe.method == "search":
        tables["search"] = coefficients
    else:
        if searched := list(scales):
            tables["search"] = search_tables(objective, whole, searched).coefficients
        tables[recipe.method] = coefficients
    found = {name: _accuracies(setting, table) for name, table in tables.items()}
    for text in merges:
        setting.tower.hold(merged(setting, *parse_merge(text)))
        found[text] = _measured(setting)
    return found


def individual(ready: PreparedRun) -> list[float | None]:
    """The accuracy of each task's own model: as given, or base + its own vector; else None."""
    setting, recipe = ready.setting, ready.inputs.recipe
    given = dict(filter(None, map(parse_individual, recipe.individual)))
    found: list[float | None] = []
    for task, (dataset, own) in enumerate(
        zip(ready.inputs.datasets, own_tables(setting), strict=True)
    ):
        if dataset.name in given:
            found.append(given[dataset.name])
        elif own is None:
            found.append(None)
        else:
            setting.tower.load(own)
            found.append(_accuracy(setting, task))
    return found


def _accuracies(setting: Setting, table: torch.Tensor) -> list[float]:
    setting.tower.load(table)
    return _measured(setting)


def _measured(setting: Setting) -> list[float]:
    return [_accuracy(setting, task) for task in range(len(setting.tasks))]


def _accuracy(setting: Setting, task: int) -> float:
    """The accuracy on all images that judge a task, with what the tower has loaded."""
    pixels = (setting.judges or setting.tasks)[task]
    images = range(len(pixels.dataset.samples))
    return score(setting.tower, pixels, images, setting.heads[task]).accuracy


# Merges ---------------------------------------------------------------------------------------


def merged(setting: Setting, method: str, given: dict[str, float]) -> dict[str, torch.Tensor]:
    """The tensors that a merge method makes of the base and of base + each vector."""
    formula = MERGE_METHODS[method]
    found = {}
    depths = depths_of(list(setting.tower.composition.base))
    for name, base in setting.tower.composition.base.items():
        base = base.float().cpu()
        models = tuple(base + _delta(member.vector, name, base) for member in setting.pool.members)
        seed = hashlib.sha256(f"{setting.inputs.recipe.seed}:{name}".encode()).digest()[:7]
        own = {key: given.get(key, one.compared) for key, one in formula.per_model.items()}
        values = Values(
            tuple(own for _ in models),
            {key: given.get(key, one.compared) for key, one in formula.per_merge.items()},
            int.from_bytes(seed, "big"),
            depths[name],
        )
        tile = tile_of(name, 0, tuple(base.shape), base, models)
        known = formula.statistics(lambda tile=tile: iter([tile]), values)  # type: ignore[misc]
        found[name] = formula.apply(tile, values, known).reshape(base.shape)
    return found


def _delta(vector: Any, name: str, base: torch.Tensor) -> torch.Tensor:
    if name not in vector.names:
        return torch.zeros_like(base)
    return decode(vector.read(name)).reshape(base.shape)
