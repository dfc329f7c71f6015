"""Images without labels: batches, their losses, and scores that need no labels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F

from atlas_cli.core.adapters import Head
from atlas_cli.core.losses import (
    PredictionStatistics,
    Trusted,
    entropies,
    objection,
    prediction_statistics,
    sharpen,
    threshold_at,
    trust,
    trusted_count,
)
from atlas_cli.datasets.pixels import Pixels
from atlas_cli.errors import UsageError
from atlas_cli.learning.batches import (
    Sampler,
    StatelessData,
    TrainingConfig,
    generator_of,
    predict,
    show,
)
from atlas_cli.learning.selection import Fold, Score
from atlas_cli.learning.setup import Setup, training_of
from atlas_cli.models.clip import logits_of
from atlas_cli.models.composed import ComposedModel, LossOf
from atlas_cli.recipes.tta import TtaRecipe, parse_schedule, parse_shares
from atlas_cli.registry import find_objective

_TRUSTED_SHARE = 1 / 4  # of a batch
_RELIABLE = 0.4  # SAR learns from images whose entropy is below this share of the largest
_FORGETTING, _TOO_CONFIDENT = 0.9, 0.2  # SAR's mean loss, and where it starts again
_SHOWN_AT_ONCE = 256


@dataclass(frozen=True)
class UnlabelledConfig:
    """What is learned from images without labels; all but `objective` is for ufm."""

    objective: str = "ufm"
    per_class: int | None = None
    power: float = 0.5
    threshold: tuple[float, float] = (0.9, 1.0)


@dataclass(frozen=True)
class UnlabelledObjective:
    """Unlabelled images, the head they are classified by, and what is learned from them.

    If it is `guarded`, coefficients that something speaks against are not valid.
    """

    model: ComposedModel
    pixels: Pixels
    head: torch.Tensor | Head
    prior: torch.Tensor
    training: TrainingConfig
    config: UnlabelledConfig
    start: torch.Tensor
    guarded: bool = True
    scaled: bool = False
    backtrack: tuple[float, ...] = ()
    _known: list[tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=list, repr=False, kw_only=True
    )
    _statistics: dict[bytes, PredictionStatistics] = field(
        default_factory=dict, repr=False, kw_only=True
    )

    @property
    def count(self) -> int:
        """How many images there are."""
        return len(self.pixels.dataset.samples)

    def training_data(self, fold: Fold | None = None) -> UnlabelledData:
        """Batches of all images. Raises UsageError if no objective has the name in `config`."""
        entry = find_objective(self.config.objective, "tta")
        if "labels" in entry.needs:
            raise UsageError(f"objective '{self.config.objective}' needs labels; tta has none")
        kinds = {"weak": LogitData, "targets": SelfTraining, "reliable": ReliableEntropy}
        found = [kind for need, kind in kinds.items() if need in entry.needs]
        if len(found) > 1:
            listed = " and ".join(need for need in kinds if need in entry.needs)
            raise UsageError(f"objective '{self.config.objective}' needs {listed}; it can have one")
        return found[0](self) if found else LogitData(self)

    def judge(self, fold: Fold, coefficients: torch.Tensor) -> Score:
        """Score coefficients without labels, beside zero-shot."""
        found = self.statistics(coefficients)
        zero = self.statistics(torch.zeros_like(self.start))
        moved = bool(coefficients.any())
        fault = objection(zero, found) if moved and self.guarded else None
        values = found.values()
        if fault:
            values[fault] = 1.0
        rank = found.information if self.guarded else float(moved)
        return Score((float(fault is None), rank), values, fault is None)

    def statistics(self, coefficients: torch.Tensor) -> PredictionStatistics:
        """How the images are classified with coefficients: as they are, and in other views."""
        key = coefficients.cpu().numpy().tobytes()
        if key not in self._statistics:
            self.model.load(coefficients)
            weak, strong = self.probabilities(), self._other_views()
            self._statistics[key] = prediction_statistics(weak, strong, self.prior)
        return self._statistics[key]

    def predictions(self, coefficients: torch.Tensor) -> torch.Tensor:
        """The prediction for every image with coefficients, (images, classes)."""
        self.model.load(coefficients)
        return self.probabilities()

    def probabilities(self) -> torch.Tensor:
        """The prediction for every image at the coefficients that are loaded, (images, classes).

        The last ones are remembered: an epoch begins where the one before was scored.
        """
        loaded = self.model.loaded
        if not (self._known and torch.equal(self._known[0][0], loaded)):
            logits = predict(self.model, self.pixels, range(self.count), self.head)
            self._known[:] = [(loaded.clone(), logits.softmax(dim=1))]
        return self._known[0][1]

    def _other_views(self) -> torch.Tensor:
        """The prediction for a strong view of every image, the same views each time."""
        random = generator_of(self.training.seed, "judge")
        found = []
        for start in range(0, self.count, _SHOWN_AT_ONCE):
            some = range(start, min(start + _SHOWN_AT_ONCE, self.count))
            images = show(self.pixels, some, random, self.training.augment)
            found.append(logits_of(self.model.features(images), self.head).softmax(dim=1).cpu())
        return torch.cat(found)


class UnlabelledData(StatelessData):
    """Batches of images without labels, in shuffled passes. Subclasses say what their loss is."""

    def __init__(self, objective: UnlabelledObjective) -> None:
        self._objective, self._training = objective, objective.training
        self._config = objective.config
        self._entry = find_objective(self._config.objective, "tta")
        count, size = objective.count, self._batch_size()
        shown = max(count, self._training.min_steps * size)
        self.epoch_steps = math.ceil(shown / size)
        self.steps = self._training.epochs * self.epoch_steps
        self._sampler = Sampler(list(range(count)), size, shown, self._training.seed, ())
        self.hits = self.seen = 0

    def _batch_size(self) -> int:
        return min(self._training.batch_size, self._objective.count)

    def batches(self, step: int) -> Iterator[tuple[torch.Tensor, LossOf]]:
        """The batch of a step, in `accumulate` parts."""
        self.hits = self.seen = 0
        epoch, place = divmod(step, self.epoch_steps)
        some = self._sampler.batch(epoch, place)
        random = generator_of(self._training.seed, "crops", step)
        size = math.ceil(len(some) / self._training.accumulate)
        for first in range(0, len(some), size):
            few = some[first : first + size]
            yield self._part(few, len(few) / len(some), random)

    def _part(
        self, some: Sequence[int], share: float, random: torch.Generator
    ) -> tuple[torch.Tensor, LossOf]:
        """Some images of a batch, and their loss times their share of it."""
        raise NotImplementedError

    def _loss(self, logits: torch.Tensor, **needed: torch.Tensor) -> torch.Tensor:
        """The objective at some logits, and at what else it needs."""
        if "prior" in self._entry.needs:
            needed["prior"] = self._objective.prior.to(logits.device)
        found: torch.Tensor = self._entry.function(logits, **needed)
        return found

    def _compare(self, logits: torch.Tensor, others: torch.Tensor) -> None:
        """Count the images that two views agree on."""
        self.hits += int((logits.argmax(dim=1) == others.argmax(dim=1)).sum().item())
        self.seen += len(logits)

    def accuracy(self) -> float:
        """The share of the last step's images whose two views were classified alike."""
        return self.hits / self.seen if self.seen else 1.0


class LogitData(UnlabelledData):
    """An objective that is a function of logits: of the images as they are, or of strong views."""

    def _part(
        self, some: Sequence[int], share: float, random: torch.Generator
    ) -> tuple[torch.Tensor, LossOf]:
        objective, head = self._objective, self._objective.head
        images = objective.pixels.fixed(some)
        needed: dict[str, torch.Tensor] = {}
        if "weak" in self._entry.needs:
            needed["weak"] = logits_of(objective.model.features(images), head)
            images = show(objective.pixels, some, random, self._training.augment)

        def loss_of(features: torch.Tensor) -> torch.Tensor:
            logits = logits_of(features, head)
            if "weak" in needed:
                self._compare(logits, needed["weak"])
            return share * self._loss(logits, **needed)

        return images, loss_of


class SelfTraining(UnlabelledData):
    """UFM: strong views learn what weak views are predicted to be, where that can be relied on.

    A quarter of every batch are trusted images with their predicted class as label; of the others
    those count whose sharpened prediction exceeds the threshold. The trusted images are chosen
    anew every epoch.
    """

    def __init__(self, objective: UnlabelledObjective) -> None:
        super().__init__(objective)
        self._trusted = Trusted(torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long))

    @property
    def trusted(self) -> Trusted:
        """The images whose prediction is taken for their label in this epoch."""
        return self._trusted

    def _trusted_size(self) -> int:
        return max(1, round(_TRUSTED_SHARE * self._training.batch_size))

    def _batch_size(self) -> int:
        return min(max(1, self._training.batch_size - self._trusted_size()), self._objective.count)

    def batches(self, step: int) -> Iterator[tuple[torch.Tensor, LossOf]]:
        """Strong views with their targets; the weak views are predicted without gradients."""
        epoch, place = divmod(step, self.epoch_steps)
        if place == 0:
            self._trusted = self._find_trusted()
        some = self._sampler.batch(epoch, place)
        kept, targets = self._targets(some, epoch)
        few, labels = self._trusted_batch(epoch, place)
        head = self._objective.head
        sure = F.one_hot(labels, len(head)).to(targets)
        yield from self._parts([*kept, *few], torch.cat([targets, sure]), step)

    def _find_trusted(self) -> Trusted:
        count, classes = self._objective.count, len(self._objective.head)
        per_class = self._config.per_class or trusted_count(count, classes)
        return trust(self._objective.probabilities(), per_class)

    def _targets(self, some: Sequence[int], epoch: int) -> tuple[list[int], torch.Tensor]:
        """Of some images those that are sure enough, and what they are to become."""
        objective = self._objective
        logits = logits_of(objective.model.features(objective.pixels.fixed(some)), objective.head)
        targets = sharpen(logits.softmax(dim=1), self._config.power)
        limit = threshold_at(self._config.threshold, epoch, self._training.epochs)
        sure = targets.amax(dim=1) > limit
        kept = [index for index, is_sure in zip(some, sure.tolist(), strict=True) if is_sure]
        return kept, targets[sure]

    def _trusted_batch(self, epoch: int, place: int) -> tuple[list[int], torch.Tensor]:
        """Trusted images of one step, and their classes."""
        size, found = self._trusted_size(), self._trusted
        numbers = list(range(len(found.images)))
        sampler = Sampler(numbers, size, self.epoch_steps * size, self._training.seed, ("trusted",))
        places = sampler.batch(epoch, place)
        return found.images[places].tolist(), found.labels[places]

    def _parts(
        self, some: list[int], targets: torch.Tensor, step: int
    ) -> Iterator[tuple[torch.Tensor, LossOf]]:
        self.hits = self.seen = 0
        random = generator_of(self._training.seed, "crops", step)
        total = torch.tensor(float(len(some)), device=targets.device)
        size = max(1, math.ceil(len(some) / self._training.accumulate))
        for first in range(0, len(some), size):
            few, wanted = some[first : first + size], targets[first : first + size]

            def loss_of(features: torch.Tensor, wanted: torch.Tensor = wanted) -> torch.Tensor:
                logits = logits_of(features, self._objective.head)
                self._compare(logits, wanted)
                return self._loss(logits, targets=wanted, total=total)

            yield show(self._objective.pixels, few, random, self._training.augment), loss_of

    def state(self) -> dict[str, torch.Tensor]:
        return {"trusted.images": self._trusted.images, "trusted.labels": self._trusted.labels}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        self._trusted = Trusted(state["trusted.images"].cpu(), state["trusted.labels"].cpu())


class ReliableEntropy(UnlabelledData):
    """SAR: the entropy of images that are predicted with confidence, before and after an ascent.

    Training starts again once the mean loss is so small that one class is predicted for all.
    """

    def __init__(self, objective: UnlabelledObjective) -> None:
        super().__init__(objective)
        self._mean = math.nan
        self._chosen: list[torch.Tensor] = []
        self._ascended = False
        self._limit = _RELIABLE * math.log(max(len(objective.head), 2))

    def batches(self, step: int) -> Iterator[tuple[torch.Tensor, LossOf]]:
        """The same images for both gradients of a step."""
        if not self._ascended:
            self._chosen = []
        yield from super().batches(step)
        self._ascended = not self._ascended

    def _part(
        self, some: Sequence[int], share: float, random: torch.Generator
    ) -> tuple[torch.Tensor, LossOf]:
        ascended = self._ascended

        def loss_of(features: torch.Tensor) -> torch.Tensor:
            logits = logits_of(features, self._objective.head)
            found = entropies(logits.detach())
            reliable = found < self._limit
            if not ascended:
                self._chosen.append(reliable)
            else:
                first = self._chosen.pop(0)
                self._remember(found[first])
                reliable &= first
            losses = self._loss(logits)  # of every image
            return share * (losses * reliable).sum() / reliable.sum().clamp(min=1)

        return self._objective.pixels.fixed(some), loss_of

    def _remember(self, found: torch.Tensor) -> None:
        """The moving mean of the loss; nothing selected changes nothing."""
        if len(found):
            value = found.mean().item()
            mean = self._mean
            self._mean = (
                value if math.isnan(mean) else _FORGETTING * mean + (1 - _FORGETTING) * value
            )

    def diverged(self) -> bool:
        """Whether the mean loss is so small that training starts again; so does the mean."""
        lost = self._mean < _TOO_CONFIDENT
        if lost:
            self._mean = math.nan
        return lost

    def state(self) -> dict[str, torch.Tensor]:
        return {"mean_loss": torch.tensor(self._mean, dtype=torch.float64)}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        self._mean = state["mean_loss"].item()


def unlabelled_objective(setup: Setup, pixels: Pixels) -> UnlabelledObjective:
    """What a recipe learns from images. Raises UsageError if there is no such objective."""
    recipe: TtaRecipe = setup.inputs.recipe
    training = training_of(recipe)
    sharp = find_objective(recipe.objective, "tta").two_gradients
    config = replace(training.optimizer_config, sharp=sharp, backs_off=False)
    threshold = parse_schedule(recipe.threshold) or (0.0, 0.0)
    return UnlabelledObjective(
        setup.model,
        pixels,
        setup.heads[0],
        prior_of(recipe, len(setup.heads[0])),
        replace(training, optimizer_config=config),
        UnlabelledConfig(recipe.objective, recipe.trusted_per_class, recipe.power, threshold),
        setup.table(),
        guarded=recipe.select == "guard",
        scaled=setup.scaled,
    )


def prior_of(recipe: TtaRecipe, classes: int) -> torch.Tensor:
    """How often every class is expected: alike, or as the recipe says."""
    shares = parse_shares(recipe.prior) or [1.0] * classes
    if len(shares) != classes:
        raise UsageError(f"--prior: has {len(shares)} shares for {classes} classes")
    found = torch.tensor(shares)
    return found / found.sum()
