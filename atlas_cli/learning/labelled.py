"""Learning from labelled images of one task or of several, judged task by task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from atlas_cli.datasets.pixels import Pixels
from atlas_cli.learning.batches import Score, Stream, Streams, Training, score
from atlas_cli.learning.selection import Check, Stage
from atlas_cli.models.composed import Tower

Rule = Callable[[Sequence[Score], Sequence[Score]], Check]


@dataclass(frozen=True)
class Joint:
    """Streams of images that are learned from together.

    `rule` makes one check of the scores of all streams and of those they are compared with, which
    `references` gives: a table of coefficients for each stream. `judges` are other images to
    select on, if any, as many as there are streams.
    """

    tower: Tower
    streams: tuple[Stream, ...]
    training: Training
    rule: Rule
    start: torch.Tensor
    references: tuple[torch.Tensor, ...] = ()
    judges: tuple[Pixels, ...] = ()
    scaled: bool = False
    retreat: tuple[float, ...] = ()
    _known: dict[str, tuple[Score, ...]] = field(default_factory=dict, repr=False)

    def is_judged(self, stage: Stage) -> bool:
        """Whether any images judge a stage."""
        return bool(stage.judged_by or self.judges)

    def judge(self, stage: Stage, coefficients: torch.Tensor) -> Check:
        """Classify the images that judge a stage."""
        return self.rule(self.scores(stage, coefficients), self.reference(stage))

    def scores(self, stage: Stage, coefficients: torch.Tensor) -> tuple[Score, ...]:
        """How well the images of every stream are classified."""
        self.tower.load(coefficients)
        return tuple(self._score(stage, number) for number in range(len(self.streams)))

    def reference(self, stage: Stage) -> tuple[Score, ...]:
        """The scores that those of learned coefficients are compared with."""
        if stage.name not in self._known and self.references:
            found = []
            for number, table in enumerate(self.references):
                self.tower.load(table)
                found.append(self._score(stage, number))
            self._known[stage.name] = tuple(found)
        return self._known.get(stage.name, ())

    def _score(self, stage: Stage, number: int) -> Score:
        stream = self.streams[number]
        pixels, indices = stream.pixels, stage.judged_by[number] if stage.judged_by else ()
        if self.judges:
            pixels = self.judges[number]
            indices = tuple(range(len(pixels.dataset.samples)))
        return score(self.tower, pixels, indices, stream.head)

    def problem(self, stage: Stage) -> Streams:
        """What a stage learns."""
        return Streams(self.streams, stage.train, self.training)
