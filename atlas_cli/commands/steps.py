"""Steps of learning as a command takes them: shown, recorded, saved, and stopped when asked."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Protocol, TypeVar

from atlas_cli.commands import output
from atlas_cli.commands.learning_options import Wishes

if TYPE_CHECKING:
    import torch

    from atlas_cli.learn import Step
    from atlas_cli.runs import Run, Saved

_SAVE_EVERY = 1.0  # seconds, or if saving takes long:
_SAVE_SHARE = 0.02  # of the time

Moment = TypeVar("Moment")


class Course(Protocol[Moment]):
    """A way of learning: where it begins, what comes after, and how that is written down."""

    @property
    def steps(self) -> int:
        """How many steps there are from beginning to end."""

    @property
    def batch_size(self) -> int:
        """The images of a step."""

    def begin(self) -> Moment:
        """Before the first step."""

    def learn(self, moment: Moment, /) -> Iterator[Moment]:
        """What comes after a moment, step by step."""

    def step_of(self, moment: Moment, /) -> Step:
        """The last step."""

    def is_over(self, moment: Moment, /) -> bool:
        """Whether there is nothing more to learn."""

    def row(self, moment: Moment, /) -> dict[str, object]:
        """One line of metrics.jsonl."""

    def to_saved(self, moment: Moment, /) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
        """What a run's folder keeps of a moment."""

    def from_saved(self, saved: Saved, /) -> Moment:
        """The moment that was saved."""


def walk(
    course: Course[Moment],
    folder: Run | None,
    wishes: Wishes,
    stop: list[int],
    *,
    measure: str = "accuracy",
    heard: Callable[[Moment], None] = lambda moment: None,
) -> Moment:
    """Take steps until the end, or until someone stops it. `heard` is told of every moment."""
    saved = folder.restore() if folder and wishes.resume else None
    start = moment = course.from_saved(saved) if saved else course.begin()
    heard(moment)
    clock, pause = time.monotonic(), _SAVE_EVERY
    with output.training(course.steps, quiet=wishes.quiet) as show:
        for moment in course.learn(start):
            step = course.step_of(moment)
            show(f"loss {step.loss:.3f}  {measure} {100 * step.accuracy:.1f}", course.batch_size)
            heard(moment)
            if folder:
                folder.record(course.row(moment))
                began = time.monotonic()
                if began - clock > pause or course.is_over(moment):
                    folder.save(*course.to_saved(moment))
                    clock = time.monotonic()
                    pause = max(_SAVE_EVERY, (clock - began) / _SAVE_SHARE)
            if stop:
                break
    if folder and moment is not start and not course.is_over(moment):
        folder.save(*course.to_saved(moment))  # stopped, or its last stage had no step to take
    return moment


@contextmanager
def stoppable() -> Iterator[list[int]]:
    """An interrupt asks for an end after the step at hand; a second one ends at once."""
    asked: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)
