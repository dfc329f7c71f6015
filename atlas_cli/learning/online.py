"""Images that come one by one: each is predicted at once, every full batch is learned from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from atlas_cli.core.losses import logits_of
from atlas_cli.core.unlabelled import objection
from atlas_cli.datasets.pixels import Pixels
from atlas_cli.errors import DataError
from atlas_cli.learning.loop import descend
from atlas_cli.learning.selection import make_optimizer
from atlas_cli.learning.setup import Setting
from atlas_cli.learning.tta import Adaptation, adaptation_of
from atlas_cli.learning.unlabelled import Unsupervised, problem_of
from atlas_cli.models.composed import LossOf

_ENDLESS = 2**62  # steps
_PIXELS = 2**30  # bytes
_GRAVE = ("collapse", "disagreement")


class _Onward:
    """One pass over the images of a problem, as steps that follow on those before."""

    def __init__(self, problem: Unsupervised, first: int) -> None:
        self._problem, self._first = problem, first
        self.epoch_steps = problem.epoch_steps
        self.steps = first + problem.epoch_steps
        self.accuracy, self.diverged = problem.accuracy, problem.diverged
        self.state, self.restore = problem.state, problem.restore

    def batches(self, step: int) -> Iterator[tuple[torch.Tensor, LossOf]]:
        """The batch of a step."""
        return self._problem.batches(step - self._first)


class OnlineAdapter:
    """Coefficients on their way through a stream of images.

    Once `batch_size` images were predicted, they are learned from in one pass, and let go. Before
    that they tell whether zero-shot would have suited them better: then all begins anew.
    """

    def __init__(self, setting: Setting, said: Callable[[str], None]) -> None:
        recipe = setting.inputs.recipe
        once = dataclasses.replace(recipe, epochs=1, min_steps=1, schedule="constant")
        inputs = dataclasses.replace(setting.inputs, recipe=once)
        self._setting, self._said = dataclasses.replace(setting, inputs=inputs), said
        self._pixels = self._no_images()
        self._optimizer = make_optimizer(self._objective(), _ENDLESS)
        self._memory: dict[str, torch.Tensor] = {}  # of the problem before
        self.seen = self.learned_from = 0

    def _no_images(self) -> Pixels:
        empty = self._setting.tasks[0]
        dataset = dataclasses.replace(empty.dataset, samples=(), root=Path())
        return Pixels(dataset, empty.view, _PIXELS, self._setting.clip.device)

    def _objective(self) -> Adaptation:
        return adaptation_of(self._setting, self._pixels)

    @property
    def coefficients(self) -> torch.Tensor:
        """The coefficients that the next image is predicted with."""
        return self._optimizer.values

    def predict(self, path: str) -> torch.Tensor:
        """The probabilities of the classes of one more image. Raises DataError if it is broken."""
        self.seen += 1
        number = self._pixels.add(path)
        tower = self._setting.tower
        tower.load(self.coefficients)
        features = tower.features(self._pixels.fixed([number]))
        return logits_of(features, self._setting.heads[0]).softmax(dim=1)[0].cpu()

    def adapt(self) -> bool:
        """Learn from the images that wait, if there are enough; whether there were."""
        objective = self._objective()
        if objective.count < self._setting.inputs.recipe.batch_size:
            return False
        self._guard(objective)
        problem = problem_of(objective)
        if self._memory:
            problem.restore(self._memory)
        for _ in descend(
            objective.tower, self._optimizer, _Onward(problem, self._optimizer.number)
        ):
            pass
        self._memory = problem.state()
        self.learned_from += objective.count
        self._pixels = self._no_images()
        return True

    def _guard(self, objective: Adaptation) -> None:
        """Begin anew if zero-shot suits images better that nothing was learned from yet."""
        if not (objective.guarded and self.coefficients.any()):
            return
        zero = objective.signs(torch.zeros_like(self.coefficients))
        found = objective.signs(self.coefficients)
        fault = objection(zero, found)
        if fault in _GRAVE or found.merit < zero.merit:
            self._optimizer.reset()
            self._said(f"{fault} after {self.seen} images: all coefficients are 0 again")

    # Going on after a stop --------------------------------------------------------------------

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
        """All that going on depends on: named tensors, and the rest as JSON."""
        tensors = {f"walker.{name}": tensor for name, tensor in self._optimizer.state().items()}
        tensors |= {f"problem.{name}": tensor for name, tensor in self._memory.items()}
        waiting = [sample.key for sample in self._pixels.dataset.samples]
        facts = {"seen": self.seen, "learned_from": self.learned_from, "waiting": waiting}
        return tensors, facts

    def restore(self, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, object]) -> None:
        """Go on from a state. Images that waited and are gone are not waited for."""
        parts: dict[str, dict[str, torch.Tensor]] = {"walker": {}, "problem": {}}
        for name, tensor in tensors.items():
            part, _, key = name.partition(".")
            parts[part][key] = tensor
        self._optimizer.restore(parts["walker"])
        self._memory = parts["problem"]
        self.seen, self.learned_from = int(str(facts["seen"])), int(str(facts["learned_from"]))
        waiting = facts["waiting"]
        assert isinstance(waiting, list)
        for path in waiting:
            try:
                self._pixels.add(path)
            except DataError as problem:
                self._said(str(problem))
