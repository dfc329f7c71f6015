"""What is learned from images without labels: batches of them, each with its loss."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from atlas_cli.core.losses import (
    balanced_entropy,
    contrast,
    entropies,
    logits_of,
    soft_cross_entropy,
)
from atlas_cli.core.unlabelled import Trusted, sharpen, threshold_at, trust, trusted_count
from atlas_cli.datasets.pixels import Pixels
from atlas_cli.learning.batches import Sampler, TrainingConfig, predict, show
from atlas_cli.learning.loop import StatelessData, generator_of
from atlas_cli.models.composed import ComposedModel, LossOf

_TRUSTED_SHARE = 1 / 4  # of a batch
_TEMPERATURE = 0.2
_RELIABLE = 0.4  # SAR learns from images whose entropy is below this share of the largest
_FORGETTING, _TOO_SURE = 0.9, 0.2  # SAR's mean loss, and where it begins anew


@dataclass(frozen=True)
class UnlabelledConfig:
    """What is learned from images without labels."""

    objective: str = "ufm"
    per_class: int | None = None
    power: float = 0.5
    threshold: tuple[float, float] = (0.9, 1.0)


@dataclass(frozen=True)
class Unlabelled:
    """Unlabelled images, the head they are classified by, and what is learned from them."""

    tower: ComposedModel
    pixels: Pixels
    head: torch.Tensor
    prior: torch.Tensor
    training: TrainingConfig
    aim: UnlabelledConfig
    _known: list[tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=list, repr=False, kw_only=True
    )

    @property
    def count(self) -> int:
        """How many images there are."""
        return len(self.pixels.dataset.samples)

    def probabilities(self) -> torch.Tensor:
        """The prediction for every image at the coefficients that are loaded, (images, classes).

        The last ones are remembered: an epoch begins where the one before was judged.
        """
        loaded = self.tower.loaded
        if not (self._known and torch.equal(self._known[0][0], loaded)):
            logits = predict(self.tower, self.pixels, range(self.count), self.head)
            self._known[:] = [(loaded.clone(), logits.softmax(dim=1))]
        return self._known[0][1]


class Unsupervised(StatelessData):
    """Batches of images without labels, in shuffled passes, and a loss of what they look like."""

    def __init__(self, objective: Unlabelled) -> None:
        self._objective, self._training, self._aim = objective, objective.training, objective.aim
        count, size = objective.count, self._batch_size()
        shown = max(count, self._training.min_steps * size)
        self.epoch_steps = math.ceil(shown / size)
        self.steps = self._training.epochs * self.epoch_steps
        self._sampler = Sampler(list(range(count)), size, shown, self._training.seed, ())
        self._same = self._seen = 0

    def _batch_size(self) -> int:
        return min(self._training.batch_size, self._objective.count)

    def batches(self, step: int) -> Iterator[tuple[torch.Tensor, LossOf]]:
        """The batch of a step, in `accumulate` parts."""
        self._same = self._seen = 0
        epoch, place = divmod(step, self.epoch_steps)
        some = self._sampler.hand(epoch, place)
        random = generator_of(self._training.seed, "crops", step)
        size = math.ceil(len(some) / self._training.accumulate)
        for first in range(0, len(some), size):
            few = some[first : first + size]
            yield self._part(few, len(few) / len(some), random)

    def _part(
        self, some: Sequence[int], share: float, random: torch.Generator
    ) -> tuple[torch.Tensor, LossOf]:
        """Images and their loss: the entropy of the images as they are, or strong against weak."""
        objective, head = self._objective, self._objective.head
        weak = objective.pixels.fixed(some)
        if self._aim.objective != "simclr":
            prior = objective.prior.to(head.device)

            def sure(features: torch.Tensor) -> torch.Tensor:
                logits = logits_of(features, head)
                if self._aim.objective == "entropy":
                    return share * entropies(logits).mean()
                return share * balanced_entropy(logits, prior)

            return weak, sure
        keys = logits_of(objective.tower.features(weak), head)
        strong = show(objective.pixels, some, random, self._training.augment)

        def alike(features: torch.Tensor) -> torch.Tensor:
            logits = logits_of(features, head)
            self._compare(logits, keys)
            return share * contrast(logits, keys, _TEMPERATURE)

        return strong, alike

    def _compare(self, logits: torch.Tensor, others: torch.Tensor) -> None:
        """Count the images that two views agree on."""
        self._same += int((logits.argmax(dim=1) == others.argmax(dim=1)).sum().item())
        self._seen += len(logits)

    def accuracy(self) -> float:
        """The share of the last step's images that both views were classified alike in."""
        return self._same / self._seen if self._seen else 1.0


class SelfTraining(Unsupervised):
    """UFM: strong views learn what weak views are predicted to be, where that can be relied on.

    A quarter of every batch are trusted images with their class; of the others those count whose
    sharpened prediction exceeds the threshold. What is trusted is found anew every epoch.
    """

    def __init__(self, objective: Unlabelled) -> None:
        super().__init__(objective)
        self._trusted = Trusted(torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long))

    @property
    def trusted(self) -> Trusted:
        """The images whose prediction is their label in this epoch."""
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
        some = self._sampler.hand(epoch, place)
        kept, targets = self._targets(some, epoch)
        few, labels = self._trusted_hand(epoch, place)
        head = self._objective.head
        sure = F.one_hot(labels, len(head)).to(targets)
        yield from self._parts([*kept, *few], torch.cat([targets, sure]), step)

    def _find_trusted(self) -> Trusted:
        count, classes = self._objective.count, len(self._objective.head)
        per_class = self._aim.per_class or trusted_count(count, classes)
        return trust(self._objective.probabilities(), per_class)

    def _targets(self, some: Sequence[int], epoch: int) -> tuple[list[int], torch.Tensor]:
        """Of some images those that are sure enough, and what they are to become."""
        objective = self._objective
        logits = logits_of(objective.tower.features(objective.pixels.fixed(some)), objective.head)
        targets = sharpen(logits.softmax(dim=1), self._aim.power)
        limit = threshold_at(self._aim.threshold, epoch, self._training.epochs)
        sure = targets.amax(dim=1) > limit
        kept = [index for index, is_sure in zip(some, sure.tolist(), strict=True) if is_sure]
        return kept, targets[sure]

    def _trusted_hand(self, epoch: int, place: int) -> tuple[list[int], torch.Tensor]:
        """Trusted images of one step, and their classes."""
        size, found = self._trusted_size(), self._trusted
        numbers = list(range(len(found.images)))
        sampler = Sampler(numbers, size, self.epoch_steps * size, self._training.seed, ("trusted",))
        places = sampler.hand(epoch, place)
        return found.images[places].tolist(), found.labels[places]

    def _parts(
        self, some: list[int], targets: torch.Tensor, step: int
    ) -> Iterator[tuple[torch.Tensor, LossOf]]:
        self._same = self._seen = 0
        random = generator_of(self._training.seed, "crops", step)
        total = torch.tensor(float(len(some)), device=targets.device)
        size = max(1, math.ceil(len(some) / self._training.accumulate))
        for first in range(0, len(some), size):
            few, wanted = some[first : first + size], targets[first : first + size]

            def loss_of(features: torch.Tensor, wanted: torch.Tensor = wanted) -> torch.Tensor:
                logits = logits_of(features, self._objective.head)
                self._compare(logits, wanted)
                return soft_cross_entropy(logits, wanted, total)

            yield show(self._objective.pixels, few, random, self._training.augment), loss_of

    def state(self) -> dict[str, torch.Tensor]:
        """What is trusted in this epoch."""
        return {"trusted.images": self._trusted.images, "trusted.labels": self._trusted.labels}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Trust the same images."""
        self._trusted = Trusted(state["trusted.images"].cpu(), state["trusted.labels"].cpu())


class Reliable(Unsupervised):
    """SAR: the entropy of images that are predicted surely enough, before and after a climb.

    It begins anew once the mean loss is so small that all is predicted to be of one class.
    """

    def __init__(self, objective: Unlabelled) -> None:
        super().__init__(objective)
        self._mean = math.nan
        self._chosen: list[torch.Tensor] = []
        self._climbed = False
        self._limit = _RELIABLE * math.log(max(len(objective.head), 2))

    def batches(self, step: int) -> Iterator[tuple[torch.Tensor, LossOf]]:
        """The same images for both gradients of a step."""
        if not self._climbed:
            self._chosen = []
        yield from super().batches(step)
        self._climbed = not self._climbed

    def _part(
        self, some: Sequence[int], share: float, random: torch.Generator
    ) -> tuple[torch.Tensor, LossOf]:
        climbed = self._climbed

        def loss_of(features: torch.Tensor) -> torch.Tensor:
            found = entropies(logits_of(features, self._objective.head))
            reliable = found < self._limit
            if not climbed:
                self._chosen.append(reliable)
            else:
                first = self._chosen.pop(0)
                self._remember(found.detach()[first])
                reliable &= first
            return share * (found * reliable).sum() / reliable.sum().clamp(min=1)

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
        """Whether the mean loss is so small that learning begins anew; the mean does, too."""
        lost = self._mean < _TOO_SURE
        if lost:
            self._mean = math.nan
        return lost

    def state(self) -> dict[str, torch.Tensor]:
        """The mean loss."""
        return {"mean_loss": torch.tensor(self._mean, dtype=torch.float64)}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from a mean loss."""
        self._mean = state["mean_loss"].item()


def problem_of(objective: Unlabelled) -> Unsupervised:
    """What an objective learns from images."""
    kind = {"ufm": SelfTraining, "sar": Reliable}.get(objective.aim.objective, Unsupervised)
    return kind(objective)
