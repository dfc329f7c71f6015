"""The built-in world: image tasks drawn on the spot and one small model, with no download.

Importing this is cheap; numpy is imported by the first call of `draw`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atlas_cli.datasets.builtin.concepts import CLASSES

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

CONTROL = "everything"


@dataclass(frozen=True)
class Task:
    """A classification task: class names, prompt templates, and images per split."""

    name: str
    summary: str
    classes: tuple[str, ...]
    templates: tuple[str, ...]
    sizes: Mapping[str, int]


def _task(name: str, summary: str, *templates: str) -> Task:
    sizes = {"train": 3000, "val": 500, "test": 1000}
    return Task(name, summary, tuple(CLASSES[name]), templates, sizes)


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        _task(
            "digits",
            "handwritten digits, white on black",
            "a photo of the number {}.",
            "the handwritten digit {}.",
        ),
        _task(
            "letters",
            "handwritten letters, ink on paper",
            "a photo of the letter {}.",
            "the handwritten letter {}.",
        ),
        _task(
            "house_numbers",
            "a digit on a cluttered wall, between other digits",
            "a photo of the number {}.",
            "the number {} on a house.",
        ),
        _task(
            "signs",
            "road signs in bad weather",
            "a photo of a {}.",
            "a road sign, a {}.",
        ),
        _task(
            "textures",
            "grainy gray textures under uneven light",
            "a photo of a {} texture.",
            "a {} pattern.",
        ),
        _task(
            "terrain",
            "the ground from above, through haze",
            "an aerial photo of {}.",
            "a satellite image of {}.",
        ),
        _task(
            "counts",
            "how many blobs there are",
            "a photo of {}.",
            "a picture of {}.",
        ),
        _task(
            "silhouettes",
            "dark outlines of things, turned and bent",
            "a photo of a {}.",
            "a drawing of a {}.",
        ),
        _task(
            CONTROL,
            "a bit of everything, as clean as in pre-training",
            "a photo of {}.",
            "a picture of {}.",
        ),
    )
}


def label_of(task: str, split: str, index: int) -> int:
    """The class of an image, as a position in the classes of its task."""
    return index % len(TASKS[task].classes)


def draw(task: str, split: str, index: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """One image of a task as bytes (32, 32, 3): the same on every machine, in any order."""
    from atlas_cli.datasets.builtin.tasks import draw_image

    return draw_image(task, split, index, seed)
