"""Tasks and the vectors of each -> one set of coefficients that serves all of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from atlas_cli.core.losses import cross_entropy, entropy
from atlas_cli.datasets.pixels import Pixels
from atlas_cli.learning.batches import TaskData, TaskScore, predict
from atlas_cli.learning.labelled import LabelledObjective
from atlas_cli.learning.selection import Fold, Score, folds_for
from atlas_cli.learning.setup import Setting, own_vector, training_of
from atlas_cli.recipes.learning import AddRecipe, parse_clamp, parse_individual


def add(setting: Setting) -> tuple[LabelledObjective, list[Fold]]:
    """The sum over tasks of cross-entropy or, without labels, of entropy."""
    recipe: AddRecipe = setting.inputs.recipe
    loss = cross_entropy if recipe.objective == "labels" else entropy
    share = 1 / len(setting.tasks)
    pairs = zip(setting.tasks, setting.heads, strict=True)
    start = setting.table(recipe.init)
    own = own_tables(setting)
    given = dict(filter(None, map(parse_individual, recipe.individual)))
    known = [given.get(dataset.name) for dataset in setting.inputs.datasets]
    objective = LabelledObjective(
        setting.tower,
        tuple(TaskData(pixels, head, loss, share) for pixels, head in pairs),
        training_of(recipe, parse_clamp(recipe.clamp) if recipe.clamp else None),
        partial(combine, known),
        start,
        references=tuple(torch.zeros_like(start) if table is None else table for table in own),
        judges=setting.judges,
        scaled=setting.scaled,
    )
    select = "blind" if recipe.objective == "entropy" else recipe.select
    return objective, folds_for(select, setting.tasks, recipe.seed)


def own_tables(setting: Setting) -> list[torch.Tensor | None]:
    """For each task the coefficients of its own vector alone, if there is one of its name."""
    found: list[torch.Tensor | None] = []
    for dataset in setting.inputs.datasets:
        number = own_vector(setting.pool, dataset)
        table = setting.table()
        if number is not None:
            table[number] = 1.0
        found.append(table if number is not None else None)
    return found


def combine(
    known: Sequence[float | None], scores: Sequence[TaskScore], individual: Sequence[TaskScore]
) -> Score:
    """The higher the mean accuracy, each relative to the task's own model, the better.

    `known` are accuracies of fine-tuned models that were given; else a task's own model is the
    base and its own vector. Where they are equal, the mean logarithm of the right class decides.
    """
    count = len(scores)
    ceilings = [given or own.accuracy or 1.0 for given, own in zip(known, individual, strict=True)]
    relative = sum(s.accuracy / top for s, top in zip(scores, ceilings, strict=True)) / count
    accuracy = sum(score.accuracy for score in scores) / count
    gain = sum(score.gain for score in scores) / count
    return Score((relative, gain), {"accuracy": accuracy, "normalised": relative})


def disentanglement(
    setting: Setting, coefficients: torch.Tensor, own: Sequence[int]
) -> list[list[float]]:
    """xi[i][j]: the share of the images of task i that vector j makes to be classified otherwise.

    The prediction of base + vector i is compared with that of base + vectors i and j, each with
    its learned coefficients (the paper's eq. 10 to 12). `own` numbers the vector of each task.
    """
    found = []
    for task, (pixels, head) in enumerate(zip(setting.tasks, setting.heads, strict=True)):
        alone = _predictions(setting, coefficients, {own[task]}, pixels, head)
        found.append(
            [
                (alone != _predictions(setting, coefficients, {own[task], other}, pixels, head))
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
    setting: Setting, coefficients: torch.Tensor, kept: set[int], pixels: Pixels, head: torch.Tensor
) -> torch.Tensor:
    table = torch.zeros_like(coefficients)
    for number in kept:
        table[number] = coefficients[number]
    setting.tower.load(table)
    every = range(len(pixels.dataset.samples))
    return predict(setting.tower, pixels, every, head).argmax(dim=1)
