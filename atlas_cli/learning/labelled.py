"""Learning from labelled images of one task or of several, judged task by task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from atlas_cli.datasets.pixels import Pixels
from atlas_cli.learning.batches import LabelledData, TaskData, TaskScore, TrainingConfig, score
from atlas_cli.learning.selection import Fold, Score
from atlas_cli.models.composed import ComposedModel

Rule = Callable[[Sequence[TaskScore], Sequence[TaskScore]], Score]


@dataclass(frozen=True)
class LabelledObjective:
    """Streams of images that are learned from together.

    `rule` makes one check of the scores of all streams and of those they are compared with, which
    `references` gives: a table of coefficients for each stream. `judges` are other images to
    select on, if any, as many as there are streams.
    """

    tower: ComposedModel
    streams: tuple[TaskData, ...]
    training: TrainingConfig
    rule: Rule
    start: torch.Tensor
    references: tuple[torch.Tensor, ...] = ()
    judges: tuple[Pixels, ...] = ()
    scaled: bool = False
    backtrack: tuple[float, ...] = ()
    _known: dict[str, tuple[TaskScore, ...]] = field(default_factory=dict, repr=False)

    def is_judged(self, fold: Fold) -> bool:
        """Whether any images judge a stage."""
        return bool(fold.judged_by or self.judges)

    def judge(self, fold: Fold, coefficients: torch.Tensor) -> Score:
        """Classify the images that judge a stage."""
        return self.rule(self.scores(fold, coefficients), self.reference(fold))

    def scores(self, fold: Fold, coefficients: torch.Tensor) -> tuple[TaskScore, ...]:
        """How well the images of every stream are classified."""
        self.tower.load(coefficients)
        return tuple(self._score(fold, number) for number in range(len(self.streams)))

    def reference(self, fold: Fold) -> tuple[TaskScore, ...]:
        """The scores that those of learned coefficients are compared with."""
        if fold.name not in self._known and self.references:
            found = []
            for number, table in enumerate(self.references):
                self.tower.load(table)
                found.append(self._score(fold, number))
            self._known[fold.name] = tuple(found)
        return self._known.get(fold.name, ())

    def _score(self, fold: Fold, number: int) -> TaskScore:
        stream = self.streams[number]
        pixels, indices = stream.pixels, fold.judged_by[number] if fold.judged_by else ()
        if self.judges:
            pixels = self.judges[number]
            indices = tuple(range(len(pixels.dataset.samples)))
        return score(self.tower, pixels, indices, stream.head)

    def problem(self, fold: Fold) -> LabelledData:
        """What a stage learns."""
        return LabelledData(self.streams, fold.train, self.training)
