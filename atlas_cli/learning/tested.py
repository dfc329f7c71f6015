"""What was learned, scored on test images: an honest number beside that on training images."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from atlas_cli.datasets.dataset import Dataset, Sample, draw_samples, has_split, open_dataset
from atlas_cli.datasets.pixels import Pixels
from atlas_cli.learning.batches import predict
from atlas_cli.learning.run_folder import RunFolder
from atlas_cli.learning.selection import Selection
from atlas_cli.learning.setup import PreparedRun
from atlas_cli.recipes.model import as_percent

SHOTS = 48  # images of a task that are remembered as learned from
MOST = 500  # test images of a task: more would take longer than learning from a few
_PIXELS = 2**28  # bytes


@dataclass(frozen=True)
class TestScore:
    """Top-1 in percent on `images` of all `of` test images of a task."""

    __test__ = False  # for pytest: no class of tests

    task: str
    images: int
    of: int
    zero_shot: float
    learned: float

    @property
    def on(self) -> str:
        """The images, in words."""
        return f"{self.images} of {self.of}" if self.images < self.of else f"all {self.images}"

    def __str__(self) -> str:
        changed = f"{self.zero_shot:.2f} -> {self.learned:.2f}"
        return f"{self.task}: test top-1 {changed} on {self.on} test images"


@dataclass(frozen=True)
class Tested:
    """A task's test images, what is predicted for them before and after, and the scores."""

    dataset: Dataset
    before: Sequence[int]
    after: Sequence[int]
    score: TestScore


def test_run(ready: PreparedRun, selection: Selection, folder: RunFolder) -> tuple[TestScore, ...]:
    """The scores on test images; what is predicted for them goes to the folder."""
    found = score_test_images(ready, selection)
    shown = [line for data in ready.inputs.datasets for line in _shot_lines(data)]
    folder.write_images([*shown, *prediction_lines(found)])
    return tuple(one.score for one in found)


def score_test_images(ready: PreparedRun, selection: Selection) -> list[Tested]:
    """Score the test split of every task that has one and was not learned from it."""
    found = []
    heads = (selection.head,) if selection.head else ready.setup.heads
    for task, dataset in enumerate(ready.inputs.datasets):
        whole = _test_split(dataset)
        if whole is None:
            continue
        drawn = replace(whole, samples=draw_samples(whole.samples, MOST))
        pixels = Pixels(drawn, ready.setup.tasks[task].view, _PIXELS, ready.setup.clip.device)
        before = _classes(ready, ready.setup.table(), ready.setup.heads[task], pixels)
        after = _classes(ready, selection.coefficients, heads[task], pixels)
        labels = pixels.labels
        top1 = [as_percent((some == labels).float().mean().item()) for some in (before, after)]
        score = TestScore(dataset.name, len(drawn.samples), len(whole.samples), *top1)
        found.append(Tested(drawn, before.tolist(), after.tolist(), score))
    return found


def _test_split(dataset: Dataset) -> Dataset | None:
    if dataset.split == "test" or not has_split(dataset.name, "test"):
        return None
    found = open_dataset(dataset.name, split="test", templates=dataset.templates)
    usable = found.labelled and found.samples and found.classes == dataset.classes
    return found if usable else None


def _classes(
    ready: PreparedRun, coefficients: torch.Tensor, head: object, pixels: Pixels
) -> torch.Tensor:
    model = ready.setup.model
    model.load(coefficients)
    with model.features_for(head):  # type: ignore[arg-type]
        every = range(len(pixels.dataset.samples))
        return predict(model, pixels, every, head).argmax(dim=1).cpu()  # type: ignore[arg-type]


def _shot_lines(dataset: Dataset) -> Iterator[str]:
    """One JSON object for some of the images that were learned from."""
    for sample in draw_samples(dataset.samples, SHOTS):
        yield _line(dataset, sample, {})


def prediction_lines(found: Iterable[Tested]) -> Iterator[str]:
    """One JSON object per test image: its class, and what is predicted before and after."""
    for one in found:
        names, data = one.dataset.classes, one.dataset
        for sample, before, after in zip(data.samples, one.before, one.after, strict=True):
            yield _line(data, sample, {"zero_shot": names[before], "learned": names[after]})


def _line(dataset: Dataset, sample: Sample, predicted: Mapping[str, str]) -> str:
    label = dataset.classes[sample.label or 0]
    row = {"data": dataset.name, "split": dataset.split, "image": sample.key, "label": label}
    return json.dumps({**row, **predicted}, ensure_ascii=False) + "\n"
