"""Images that come one by one: each is predicted at once, every full batch is learned from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from atlas_cli.core.losses import objection
from atlas_cli.core.optimizers import make_optimizer
from atlas_cli.datasets.pixels import Pixels
from atlas_cli.errors import DataError
from atlas_cli.learning.loop import descend
from atlas_cli.learning.setup import Setup
from atlas_cli.learning.unlabelled import (
    UnlabelledData,
    UnlabelledObjective,
    unlabelled_objective,
)
from atlas_cli.models.clip import logits_of
from atlas_cli.models.composed import LossOf

_ENDLESS = 2**62  # steps
_PIXELS = 2**30  # bytes
_GRAVE = ("collapse", "disagreement")


class _ContinuedData:
    """One pass over images, as steps that are counted on from those before."""

    def __init__(self, data: UnlabelledData, first: int) -> None:
        self._data, self._first = data, first
        self.epoch_steps = data.epoch_steps
        self.steps = first + data.epoch_steps
        self.accuracy, self.diverged = data.accuracy, data.diverged
        self.state, self.restore = data.state, data.restore

    def batches(self, step: int) -> Iterator[tuple[torch.Tensor, LossOf]]:
        return self._data.batches(step - self._first)


class OnlineAdapter:
    """Coefficients that adapt to a stream of images.

    Once `batch_size` images were predicted, they are learned from in one pass, and let go. Before
    that they show whether zero-shot would have suited them better; if so, training starts again.
    """

    def __init__(self, setup: Setup, warn: Callable[[str], None]) -> None:
        recipe = setup.inputs.recipe
        once = recipe.model_copy(update={"epochs": 1, "min_steps": 1, "schedule": "constant"})
        inputs = replace(setup.inputs, recipe=once)
        self._setup, self._warn = replace(setup, inputs=inputs), warn
        self._pixels = self._no_images()
        first = self._objective()
        config, scaled = first.training.optimizer_config, first.scaled
        self._optimizer = make_optimizer(first.start, _ENDLESS, config, scaled=scaled)
        self._memory: dict[str, torch.Tensor] = {}  # of the data before
        self.seen = self.learned_from = 0

    def _no_images(self) -> Pixels:
        empty = self._setup.tasks[0]
        dataset = replace(empty.dataset, samples=(), root=Path())
        return Pixels(dataset, empty.view, _PIXELS, self._setup.clip.device)

    def _objective(self) -> UnlabelledObjective:
        return unlabelled_objective(self._setup, self._pixels)

    @property
    def coefficients(self) -> torch.Tensor:
        """The coefficients that the next image is predicted with."""
        return self._optimizer.values

    def predict(self, path: str) -> torch.Tensor:
        """The probabilities of the classes of one more image. Raises DataError if it is broken."""
        self.seen += 1
        number = self._pixels.add(path)
        model = self._setup.model
        model.load(self.coefficients)
        features = model.features(self._pixels.fixed([number]))
        return logits_of(features, self._setup.heads[0]).softmax(dim=1)[0].cpu()

    def adapt(self) -> bool:
        """Learn from the images that wait, if there are enough; whether there were."""
        objective = self._objective()
        if objective.count < self._setup.inputs.recipe.batch_size:
            return False
        self._guard(objective)
        data = objective.training_data()
        if self._memory:
            data.restore(self._memory)
        continued = _ContinuedData(data, self._optimizer.number)
        for _ in descend(objective.model, self._optimizer, continued):
            pass
        self._memory = data.state()
        self.learned_from += objective.count
        self._pixels = self._no_images()
        return True

    def _guard(self, objective: UnlabelledObjective) -> None:
        """Start again if zero-shot suits the waiting images better; none was learned from yet."""
        if not (objective.guarded and self.coefficients.any()):
            return
        zero = objective.statistics(torch.zeros_like(self.coefficients))
        found = objective.statistics(self.coefficients)
        fault = objection(zero, found)
        if fault in _GRAVE or found.information < zero.information:
            self._optimizer.reset()
            self._warn(f"{fault} after {self.seen} images: all coefficients are 0 again")

    # Going on after a stop --------------------------------------------------------------------

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """All that going on depends on: named tensors, and the rest as JSON."""
        tensors = {f"walker.{name}": tensor for name, tensor in self._optimizer.state().items()}
        tensors |= {f"problem.{name}": tensor for name, tensor in self._memory.items()}
        waiting = [sample.key for sample in self._pixels.dataset.samples]
        facts = {"seen": self.seen, "learned_from": self.learned_from, "waiting": waiting}
        return tensors, facts

    def restore(self, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> None:
        """Go on from a state. Images that waited and are gone are not waited for."""
        parts: dict[str, dict[str, torch.Tensor]] = {"walker": {}, "problem": {}}
        for name, tensor in tensors.items():
            part, _, key = name.partition(".")
            parts[part][key] = tensor
        self._optimizer.restore(parts["walker"])
        self._memory = parts["problem"]
        self.seen, self.learned_from = int(facts["seen"]), int(facts["learned_from"])
        for path in facts["waiting"]:
            try:
                self._pixels.add(path)
            except DataError as problem:
                self._warn(str(problem))
