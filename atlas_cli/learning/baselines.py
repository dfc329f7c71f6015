"""What learning is compared with: the best uniform scale, merges, and each task's own model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from atlas_cli.core.storage import decode
from atlas_cli.datasets.pixels import Pixels
from atlas_cli.learning.batches import predict, score
from atlas_cli.learning.loop import Objective
from atlas_cli.learning.selection import Fold, Selection, policy_for
from atlas_cli.learning.setup import PreparedRun, Setup, own_vector
from atlas_cli.merge_methods.method import Values
from atlas_cli.merge_methods.tiling import tile_of
from atlas_cli.models.clip import Classifier
from atlas_cli.recipes.learning import parse_individual
from atlas_cli.recipes.merge_parameters import depths_of, parse_merge
from atlas_cli.recipes.model import as_percent
from atlas_cli.registry import MERGE_METHODS


def search_tables(objective: Objective, fold: Fold, tables: Iterable[torch.Tensor]) -> Selection:
    """The best of some tables by what scores a fold; zero if none of them is better."""
    zero = torch.zeros_like(objective.start)
    before = objective.judge(fold, zero)
    best, after = zero, before
    for table in tables:
        found = objective.judge(fold, table)
        if found.valid and found > after:
            best, after = table, found
    return Selection(best, before, after)


def accuracies(
    ready: PreparedRun,
    coefficients: torch.Tensor,
    scales: Iterable[torch.Tensor],
    merges: Sequence[str],
) -> dict[str, list[float]]:
    """The accuracy on every task, by method: zero-shot, search, what was learned, and merges.

    In percent. Nothing is searched if there are no scales.
    """
    setup, objective = ready.setup, ready.objective
    recipe = ready.inputs.recipe
    (whole,) = policy_for("same", setup.tasks, recipe.seed).folds
    tables = {"zero-shot": setup.table()}
    if recipe.method == "search":
        tables["search"] = coefficients
    else:
        if searched := list(scales):
            tables["search"] = search_tables(objective, whole, searched).coefficients
        tables[recipe.method] = coefficients
    found = {name: _accuracies_with(setup, table) for name, table in tables.items()}
    for text in merges:
        setup.model.hold(merged(setup, *parse_merge(text)))
        found[text] = _measured(setup)
    return found


def heading(ready: PreparedRun) -> str:
    """What stands above these accuracies: which images they are of, and the unit."""
    return f"{'validation' if ready.setup.judges else 'training'} top-1 in percent"


def individual(ready: PreparedRun) -> list[float | None]:
    """The accuracy of each task's own model: as given, or base + its own vector; in percent."""
    setup, recipe = ready.setup, ready.inputs.recipe
    given = dict(filter(None, map(parse_individual, recipe.individual)))
    found: list[float | None] = []
    for task, (dataset, own) in enumerate(
        zip(ready.inputs.datasets, own_tables(setup), strict=True)
    ):
        if dataset.name in given:
            found.append(as_percent(given[dataset.name]))
        elif own is None:
            found.append(None)
        else:
            setup.model.load(own)
            found.append(_accuracy(setup, task))
    return found


def _accuracies_with(setup: Setup, table: torch.Tensor) -> list[float]:
    setup.model.load(table)
    return _measured(setup)


def _measured(setup: Setup) -> list[float]:
    return [_accuracy(setup, task) for task in range(len(setup.tasks))]


def _accuracy(setup: Setup, task: int) -> float:
    """The accuracy in percent on all images that judge a task, with what the model has loaded."""
    pixels = (setup.judges or setup.tasks)[task]
    images = range(len(pixels.dataset.samples))
    return as_percent(score(setup.model, pixels, images, setup.heads[task]).accuracy)


def own_tables(setup: Setup) -> list[torch.Tensor | None]:
    """For each task the coefficients of its own vector alone, if there is one of its name."""
    found: list[torch.Tensor | None] = []
    for dataset in setup.inputs.datasets:
        number = own_vector(setup.pool, dataset)
        table = setup.table()
        if number is not None:
            table[number] = 1.0
        found.append(table if number is not None else None)
    return found


def disentanglement(
    setup: Setup, coefficients: torch.Tensor, own: Sequence[int]
) -> list[list[float]]:
    """xi[i][j]: the share of the images of task i that vector j makes to be classified otherwise.

    The prediction of base + vector i is compared with that of base + vectors i and j, each with
    its learned coefficients (the paper's eq. 10 to 12). `own` numbers the vector of each task.
    """
    found = []
    for task, (pixels, head) in enumerate(zip(setup.tasks, setup.heads, strict=True)):
        alone = _predictions(setup, coefficients, {own[task]}, pixels, head)
        found.append(
            [
                (alone != _predictions(setup, coefficients, {own[task], other}, pixels, head))
                .float()
                .mean()
                .item()
                if other != own[task]
                else 0.0
                for other in own
            ]
        )
    return found


def _predictions(
    setup: Setup, coefficients: torch.Tensor, kept: set[int], pixels: Pixels, head: Classifier
) -> torch.Tensor:
    table = torch.zeros_like(coefficients)
    for number in kept:
        table[number] = coefficients[number]
    setup.model.load(table)
    every = range(len(pixels.dataset.samples))
    return predict(setup.model, pixels, every, head).argmax(dim=1)


# Merges ---------------------------------------------------------------------------------------


def merged(setup: Setup, method: str, given: dict[str, float]) -> dict[str, torch.Tensor]:
    """The tensors that a merge method makes of the base and of base + each vector."""
    formula = MERGE_METHODS[method]
    found = {}
    depths = depths_of(list(setup.model.composition.base))
    for name, base in setup.model.composition.base.items():
        base = base.float().cpu()
        models = tuple(base + _delta(member.vector, name, base) for member in setup.pool.members)
        seed = hashlib.sha256(f"{setup.inputs.recipe.seed}:{name}".encode()).digest()[:7]
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
