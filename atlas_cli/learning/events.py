"""What happens in a run, for whoever calls a verb to show, to log or to ignore."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atlas_cli.learning.batches import Step
    from atlas_cli.learning.finetune import Finetuned


@dataclass(frozen=True)
class Event:
    """Something that happened in a run."""


@dataclass(frozen=True)
class Warned(Event):
    """Something that may surprise."""

    text: str


@dataclass(frozen=True)
class Noted(Event):
    """Something worth knowing: where a task vector came from, or why it was left out."""

    text: str


@dataclass(frozen=True)
class Planned(Event):
    """Everything is open; in words, what is about to be learned, and what was decided before."""

    lines: tuple[str, ...]
    details: tuple[str, ...] = ()


@dataclass(frozen=True)
class PhaseStarted(Event):
    """The work of another kind begins, such as to hash the images."""

    name: str


@dataclass(frozen=True)
class TrainingStarted(Event):
    """From now on a stop is heeded after every step. A search has no number of steps."""

    steps: int | None = None
    epochs: int = 0  # 0 if that is not known


@dataclass(frozen=True)
class StepTaken(Event):
    """A step; `measure` is what its accuracy is called."""

    step: Step
    batch_size: int
    measure: str = "top1"


@dataclass(frozen=True)
class TrainingEnded(Event):
    """Nothing more is learned; the result is still to be worked out and written."""


@dataclass(frozen=True)
class EpochScored(Event):
    """Fine-tuning: the accuracy in percent after an epoch, of which number 0 is zero-shot."""

    task: str
    epoch: int
    accuracy: float
    images: str  # which, in words


@dataclass(frozen=True)
class TaskFinished(Event):
    """Fine-tuning: a task of several is done, and this was written."""

    result: Finetuned


@dataclass(frozen=True)
class Predicted(Event):
    """Online adaptation: an image was classified, or could not be read."""

    image: str
    prediction: str | None = None
    probability: float | None = None
    error: str | None = None


@dataclass(frozen=True)
class Saving(Event):
    """Online adaptation: what was learned is being written; an interrupt would lose it."""


Listener = Callable[[Event], None]


def ignore(event: Event) -> None:
    """Listen to nothing."""


def never() -> bool:
    """Do not stop."""
    return False


def agreed(stop: Callable[[], bool]) -> Callable[[], bool]:
    """Whether to stop, in a run of several processes: all of them give one answer."""
    from atlas_cli.learning import ranks

    return ranks.agreed(stop)
