"""Training the weights of an image tower on one task, with its zero-shot head frozen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from atlas_cli.core.optimizers import OptimizerConfig, WeightOptimizer
from atlas_cli.datasets.dataset import plain_name, task_name
from atlas_cli.datasets.pixels import Pixels, view_of
from atlas_cli.errors import AtlasError, CheckpointError
from atlas_cli.learning.batches import LabelledData, Step, TaskData, TrainingConfig, score
from atlas_cli.learning.loop import descend
from atlas_cli.learning.run import RunInputs
from atlas_cli.learning.run_folder import SavedRun
from atlas_cli.learning.setup import accelerate, config_of
from atlas_cli.learning.splits import hold_out
from atlas_cli.models.clip import Clip, open_model, zero_shot_head
from atlas_cli.models.saving import whole_folder, write_model
from atlas_cli.models.trainable import (
    ALPHA,
    LoraModel,
    TrainableModel,
    checkpoint_activations,
    names_of,
    start_factors,
    write_adapter,
)
from atlas_cli.parallel import ThreadPool, thread_pool_for
from atlas_cli.recipes.finetune import FinetuneRecipe, epochs_of, warmup_of
from atlas_cli.recipes.model import as_percent

_PREFIX = "visual."
_PIXELS = 2**30  # bytes of decoded images that are kept
_STATE, _KEPT = "state.", "kept."

Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class FinetuneCheckpoint:
    """Where fine-tuning stands after a step.

    `accuracies` are those on images held out: zero-shot first, then after every epoch. `kept` are
    the weights of the best epoch so far, if that is wanted; at the end, those of the result.
    Tensors are valid until the next step.
    """

    step: Step | None
    accuracies: tuple[float, ...]
    over: bool = False
    kept: Weights = field(default_factory=dict, repr=False)
    state: Weights = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class WeightTrainer:
    """An image tower, the images it is trained on, and those it is scored on."""

    inputs: RunInputs
    clip: Clip
    model: TrainableModel | LoraModel
    data: LabelledData
    head: torch.Tensor
    judge: Pixels
    scored_on: tuple[int, ...]
    optimizer_config: OptimizerConfig

    @property
    def recipe(self) -> FinetuneRecipe:
        found: FinetuneRecipe = self.inputs.recipe
        return found

    @property
    def steps(self) -> int:
        return self.data.steps

    @property
    def batch_size(self) -> int:
        return self.recipe.batch_size

    @cached_property
    def config(self) -> dict[str, Any]:
        """All that decides the result, as JSON. It hashes all images, so it is made once."""
        return config_of(self.inputs, self.clip)

    def accuracy(self) -> float:
        """The share of the images held out that are classified correctly."""
        return score(self.model, self.judge, self.scored_on, self.head).accuracy

    def begin(self) -> FinetuneCheckpoint:
        """Before the first step: zero-shot."""
        self.model.load(self.model.values)
        return FinetuneCheckpoint(None, (self.accuracy(),) if self.scored_on else ())

    def learn(self, checkpoint: FinetuneCheckpoint) -> Iterator[FinetuneCheckpoint]:
        """Take the steps that remain and yield after each."""
        if checkpoint.over:
            return
        scaled = self.model.accelerator is not None and self.model.accelerator.scaled
        optimizer = WeightOptimizer(
            self.model.values, self.steps, self.optimizer_config, scaled=scaled
        )
        if checkpoint.state:
            optimizer.restore(checkpoint.state)
        accuracies, kept = checkpoint.accuracies, checkpoint.kept
        for step in descend(self.model, optimizer, self.data):
            over = step.number == self.steps
            if over or step.number % self.data.epoch_steps == 0:
                accuracies, kept = self._after_epoch(optimizer.values, accuracies, kept)
            if over:
                result = kept or optimizer.values
                yield FinetuneCheckpoint(step, accuracies, over, result)
            else:
                yield FinetuneCheckpoint(step, accuracies, over, kept, optimizer.state())

    def _after_epoch(
        self, values: Weights, accuracies: tuple[float, ...], kept: Weights
    ) -> tuple[tuple[float, ...], Weights]:
        """Score the weights of an epoch, and keep a copy if the best are wanted and these are."""
        if not self.scored_on:
            return accuracies, kept
        self.model.load(values)
        found = self.accuracy()
        if self.recipe.select == "best" and found > max(accuracies[1:], default=-1.0):
            kept = {name: tensor.cpu().clone() for name, tensor in values.items()}
        return (*accuracies, found), kept

    def step_of(self, checkpoint: FinetuneCheckpoint) -> Step:
        assert checkpoint.step is not None
        return checkpoint.step

    def is_over(self, checkpoint: FinetuneCheckpoint) -> bool:
        return checkpoint.over

    def row(self, checkpoint: FinetuneCheckpoint) -> dict[str, object]:
        """One line of metrics.jsonl; after an epoch also with the accuracy on images held out."""
        step = self.step_of(checkpoint)
        ends = checkpoint.over or step.number % self.data.epoch_steps == 0
        row = step.row("top1")
        if ends and self.scored_on:
            row["val_top1_percent"] = as_percent(checkpoint.accuracies[-1])
        return row

    def to_saved(
        self, checkpoint: FinetuneCheckpoint
    ) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
        """What a run's folder keeps of a checkpoint."""
        tensors = {f"{_STATE}{name}": tensor for name, tensor in checkpoint.state.items()}
        tensors |= {f"{_KEPT}{name}": tensor for name, tensor in checkpoint.kept.items()}
        step = dataclasses.asdict(checkpoint.step) if checkpoint.step else None
        return tensors, {"step": step, "accuracies": checkpoint.accuracies, "over": checkpoint.over}

    def from_saved(self, saved: SavedRun) -> FinetuneCheckpoint:
        """The checkpoint that was saved. Raises CheckpointError if it is damaged."""
        facts = saved.facts
        try:
            step = Step(**facts["step"]) if facts["step"] else None
            accuracies, over = tuple(facts["accuracies"]), facts["over"]
        except (KeyError, TypeError) as problem:
            raise CheckpointError(f"{saved.path}: is not the state of a run") from problem
        if accuracies and not self.scored_on and not over:
            raise CheckpointError(
                f"{saved.path.parent}: was begun by an earlier version of atlas, which held images "
                "out of training here; start anew with --force"
            )
        return FinetuneCheckpoint(step, accuracies, over, saved.below(_KEPT), saved.below(_STATE))

    def write(self, checkpoint: FinetuneCheckpoint, model: Path, adapter: Path) -> None:
        """Write the model of the last checkpoint and, if factors were trained, their adapter."""
        if not all(tensor.isfinite().all() for tensor in checkpoint.kept.values()):
            raise AtlasError("the weights are no longer finite; a lower learning rate may help")
        rank = self.recipe.lora
        if rank is not None:
            with whole_folder(adapter) as temporary:
                write_adapter(self.clip.module, rank, checkpoint.kept, temporary)
        write_model(self.clip, self.model.load(checkpoint.kept), model)


@contextmanager
def prepared_trainer(inputs: RunInputs, warn: Callable[[str], None]) -> Iterator[WeightTrainer]:
    """Open a model and the images of one task, and make its image tower ready to be trained."""
    recipe: FinetuneRecipe = inputs.recipe
    (dataset,) = inputs.datasets
    clip = open_model(inputs.model, inputs.opening)
    for doubt in clip.blueprint.doubts:
        warn(doubt)
    module: torch.nn.Module = clip.module.visual  # type: ignore[assignment]
    head = zero_shot_head(clip, dataset.classes, dataset.templates, warn)
    view = view_of(clip.preprocess)
    how = (view, _PIXELS, clip.device, inputs.options.workers)
    shown = Pixels(dataset, *how)
    train = tuple(range(len(dataset.samples)))
    if inputs.judges:
        judge = Pixels(inputs.judges[0], *how)
        scored_on = tuple(range(len(judge.dataset.samples)))
    else:  # only --select best needs images that are not trained on
        judge, scored_on = shown, hold_out(shown, recipe.seed) if recipe.select == "best" else ()
        train = tuple(sorted(set(train) - set(scored_on)))
    training = training_of(recipe, task_name(dataset))
    data = LabelledData([TaskData(shown, head)], [train], training)
    optimizer_config = dataclasses.replace(
        training.optimizer_config, warmup=warmup_of(recipe, data.steps)
    )
    if recipe.checkpoint_activations:
        checkpoint_activations(module)
    with thread_pool_for(module, inputs.options.cores) as thread_pool:
        model = trained_model(clip, recipe, thread_pool)
        accelerate(model, inputs, clip, warn)
        yield WeightTrainer(inputs, clip, model, data, head, judge, scored_on, optimizer_config)


def trained_model(
    clip: Clip, recipe: FinetuneRecipe, thread_pool: ThreadPool | None
) -> TrainableModel | LoraModel:
    """The image tower, with what is trained in it."""
    module: torch.nn.Module = clip.module.visual  # type: ignore[assignment]
    if recipe.lora is not None:
        factors, pairs = start_factors(clip.module, recipe.lora, recipe.seed)
        scale = ALPHA / recipe.lora
        return LoraModel(module, factors, pairs, scale, prefix=_PREFIX, thread_pool=thread_pool)
    names = names_of(module, recipe.tune)
    return TrainableModel(
        module, names, prefix=_PREFIX, thread_pool=thread_pool, linear=recipe.linearised
    )


def training_of(recipe: FinetuneRecipe, task: str) -> TrainingConfig:
    """How a recipe wants images shown and weights moved."""
    optimizer_config = OptimizerConfig(
        rate=recipe.lr, decay=recipe.weight_decay, clip=recipe.clip, schedule=recipe.schedule
    )
    return TrainingConfig(
        epochs=epochs_of(recipe, plain_name(task)),
        steps=recipe.steps,
        batch_size=recipe.batch_size,
        accumulate=recipe.accumulate,
        min_steps=1,
        augment=recipe.augment,
        seed=recipe.seed,
        optimizer_config=optimizer_config,
    )
