"""What learning does to every class: its accuracy before and after, on the images that judge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import torch

from atlas_cli.datasets.pixels import Pixels
from atlas_cli.learning.batches import hits, predict
from atlas_cli.learning.setup import PreparedRun


class ClassAccuracy(TypedDict):
    """A class: how many images it has, and the share of them that are recognised."""

    images: int
    zero_shot: float
    learned: float


class TaskClasses(TypedDict):
    """The classes of a task, and in words which images were looked at."""

    task: str
    on: str
    classes: dict[str, ClassAccuracy]


def by_class(ready: PreparedRun, coefficients: torch.Tensor) -> list[TaskClasses]:
    """Zero-shot and with coefficients, for every class of every task that has images."""
    setting = ready.setting
    chosen = [_images(ready, task) for task in range(len(setting.tasks))]
    before = _hits(ready, setting.table(), chosen)
    after = _hits(ready, coefficients, chosen)
    return [
        {
            "task": ready.inputs.datasets[task].name,
            "on": words,
            "classes": _classes(pixels, indices, before[task], after[task]),
        }
        for task, (pixels, indices, words) in enumerate(chosen)
    ]


_Chosen = tuple[Pixels, Sequence[int], str]


def _images(ready: PreparedRun, task: int) -> _Chosen:
    """The images that judge a task; where only folds are judged, those that it learned from."""
    setting = ready.setting
    if setting.judges:
        pixels = setting.judges[task]
        count = len(pixels.dataset.samples)
        return pixels, range(count), f"{count} images of {pixels.dataset.name} to select on"
    pixels, fold = setting.tasks[task], ready.plan[-1]
    everything = range(len(pixels.dataset.samples))
    indices = fold.judged_by[task] if fold.judged_by else everything
    held = set(indices).isdisjoint(fold.train[task])
    words = "images held out" if held else "images that it learned from"
    return pixels, indices, f"{len(indices)} {words}"


def _hits(
    ready: PreparedRun, coefficients: torch.Tensor, chosen: Sequence[_Chosen]
) -> list[torch.Tensor]:
    tower, heads = ready.setting.tower, ready.setting.heads
    tower.load(coefficients)
    return [
        hits(predict(tower, pixels, indices, head), pixels.labels[list(indices)])
        for (pixels, indices, _), head in zip(chosen, heads, strict=True)
    ]


def _classes(
    pixels: Pixels, indices: Sequence[int], before: torch.Tensor, after: torch.Tensor
) -> dict[str, ClassAccuracy]:
    labels = pixels.labels[list(indices)]
    found: dict[str, ClassAccuracy] = {}
    for number, name in enumerate(pixels.dataset.classes):
        members = labels == number
        if count := int(members.sum().item()):
            found[name] = {
                "images": count,
                "zero_shot": before[members].sum().item() / count,
                "learned": after[members].sum().item() / count,
            }
    return found
