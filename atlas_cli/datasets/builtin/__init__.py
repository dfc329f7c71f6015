"""The built-in tasks: images that are drawn on the spot, with no download.

Importing this is cheap; numpy is imported by the first image that is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atlas_cli.datasets.builtin.concepts import CLASSES
from atlas_cli.datasets.dataset import Dataset, Sample
from atlas_cli.errors import UsageError, nearest
from atlas_cli.registry import dataset_kind

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
    from atlas_cli.datasets.builtin.scenes import draw_concept

    concept = CLASSES[task][TASKS[task].classes[label_of(task, split, index)]]
    return draw_concept(concept, task, split, index, seed)


@dataclass(frozen=True)
class DrawnImage:
    """An image that is drawn when it is asked for."""

    task: str
    split: str
    index: int

    def __call__(self) -> npt.NDArray[np.uint8]:
        """The pixels, (32, 32, 3)."""
        return draw(self.task, self.split, self.index)


def _splits(address: str) -> Mapping[str, int]:
    return TASKS[address].sizes


def _expand(address: str) -> list[str]:
    if address == "all":
        return [f"builtin:{name}" for name in TASKS]
    if address not in TASKS:
        known = [*TASKS, "all"]
        raise UsageError(
            f"unknown data 'builtin:{address}'{nearest(address, known)} "
            f"({', '.join(f'builtin:{name}' for name in known)})"
        )
    return [f"builtin:{address}"]


@dataset_kind("builtin", splits=_splits, expand=_expand, chooses_split=True)
def open_task(address: str, split: str | None, preferred: Sequence[str]) -> Dataset:
    """A built-in task. Its splits always exist, so the first of the preferred ones is taken."""
    task, split = TASKS[address], split or preferred[0]
    if split not in task.sizes:
        raise UsageError(f"builtin:{address} has no split '{split}'{nearest(split, task.sizes)}")
    samples = tuple(
        Sample(f"{index:05d}", label_of(address, split, index), DrawnImage(address, split, index))
        for index in range(task.sizes[split])
    )
    return Dataset(
        split=split,
        classes=task.classes,
        templates=task.templates,
        samples=samples,
        keys_identify=True,
    )
