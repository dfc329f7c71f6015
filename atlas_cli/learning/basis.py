"""Learning coefficients of singular directions: where they start, and BOLT's schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from atlas_cli.datasets.dataset import Dataset, plain_name, task_name
from atlas_cli.errors import MismatchError
from atlas_cli.learning.batches import LabelledObjective, TrainingConfig
from atlas_cli.learning.selection import Policy
from atlas_cli.learning.setup import Setup, training_of
from atlas_cli.recipes.fit import FitRecipe
from atlas_cli.vectors.basis import read_start
from atlas_cli.vectors.pool import GatheredVector, open_member

_SCALES = (1.0, 3.0, 5.0, 7.0, 10.0)  # of the pooled start
_WARMUP = 0.1


def singular_training(recipe: FitRecipe) -> TrainingConfig:
    """BOLT's: coefficients below zero count as zero; the rate rises over a tenth of the steps."""
    training = training_of(recipe, (0.0, math.inf))
    config = replace(training.optimizer_config, warmup_share=_WARMUP)
    return replace(training, optimizer_config=config)


def singular_start(setup: Setup, objective: LabelledObjective, policy: Policy) -> torch.Tensor:
    """The best of some multiples of the pooled coefficients, by the shots that are learned from."""
    pooled = setup.table()
    column = {label: number for number, label in enumerate(setup.layout.labels)}
    for block, values in read_start(setup.inputs.files).items():
        pooled[: len(values), column[block]] = values.to(pooled.device)
    tables = [(scale * pooled).clamp(min=0.0) for scale in _SCALES]
    fold = policy.folds[-1]
    learned_from = replace(fold, scored_on=fold.train)
    plain = replace(objective, judges=())
    return max(tables, key=lambda table: plain.judge(learned_from, table))


def check_sources(paths: Sequence[str | GatheredVector], dataset: Dataset) -> None:
    """Refuse directions of a vector that by its name was learned on the very data."""
    for member in map(open_member, paths):
        if plain_name(member.name) == plain_name(task_name(dataset)):
            raise MismatchError(
                f"{member.path}: vector {member.name} seems to be learned on {dataset.name} "
                "itself; leave it out, or say --allow-target"
            )
