"""Images decoded once and kept as 8-bit pixels: the view of evaluation, and one to crop from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from PIL import Image

from atlas_cli.core import augment
from atlas_cli.datasets.dataset import Dataset, Sample, load
from atlas_cli.errors import DataError

Preprocess = Callable[[Image.Image], torch.Tensor]
_DECODERS = 4
_ROOM = 1.5  # a kept image has at most this many times the side that the model takes


@dataclass(frozen=True)
class View:
    """A model's evaluation transform in two parts: what happens to pixels, and to numbers."""

    frame: Callable[[Image.Image], Image.Image]
    size: int
    mean: torch.Tensor
    std: torch.Tensor

    def normalised(self, pixels: torch.Tensor) -> torch.Tensor:
        """(pixels / 255 - mean) / std, for pixels in 0..255, (images, 3, size, size)."""
        return (pixels.float() / 255 - self.mean.to(pixels.device)) / self.std.to(pixels.device)


def view_of(preprocess: Preprocess) -> View:
    """Take a transform apart where images become tensors."""
    steps: list[Any] = list(preprocess.transforms)  # type: ignore[attr-defined]
    *geometry, _, normalise = steps
    blank = Image.new("RGB", (64, 64))

    def frame(image: Image.Image) -> Image.Image:
        for step in geometry:
            image = step(image)
        return image

    mean, std = (
        torch.tensor(values, dtype=torch.float32).view(-1, 1, 1)
        for values in (normalise.mean, normalise.std)
    )
    return View(frame, frame(blank).height, mean, std)


class Pixels:
    """The images of a dataset, decoded when first asked for and kept while there is room.

    `budget` is in bytes; what does not fit is decoded anew each time. Kept pixels are in main
    memory; what is made of them is on `device`.
    """

    def __init__(
        self, dataset: Dataset, view: View, budget: int, device: torch.device | None = None
    ) -> None:
        self.dataset = dataset
        self._device = device or torch.device("cpu")
        self.view = view
        self._room = budget
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def labels(self) -> torch.Tensor:
        """The class of every image."""
        return torch.tensor([-1 if s.label is None else s.label for s in self.dataset.samples])

    def fixed(self, indices: Sequence[int]) -> torch.Tensor:
        """The images as evaluation sees them, normalised, (images, 3, size, size)."""
        stacked = torch.stack([pair[0] for pair in self._find(indices)])
        return self.view.normalised(stacked.to(self._device))

    def cropped(
        self,
        indices: Sequence[int],
        random: torch.Generator,
        *,
        mirror: bool,
        scale: tuple[float, float] = augment.SCALE,
    ) -> torch.Tensor:
        """A random crop of every image, perhaps mirrored, normalised."""
        stacked, sizes = augment.stack_images([pair[1] for pair in self._find(indices)])
        crops = augment.draw_crops(sizes, random, mirror=mirror, scale=scale)
        return self.view.normalised(augment.take(stacked.to(self._device), crops, self.view.size))

    def add(self, key: str) -> int:
        """One more image, and its number. Raises DataError, and adds none, if it is broken."""
        before, number = self.dataset, len(self.dataset.samples)
        self.dataset = replace(before, samples=(*before.samples, Sample(key, None)))
        try:
            self.fixed([number])
        except DataError:
            self.dataset = before
            raise
        return number

    def mild(self, indices: Sequence[int], random: torch.Generator) -> torch.Tensor:
        """Every image a little cropped, in other light and with noise, normalised."""
        stacked, sizes = augment.stack_images([pair[1] for pair in self._find(indices)])
        crops = augment.draw_crops(sizes, random, mirror=False, scale=augment.MILD)
        images = augment.take(stacked.to(self._device), crops, self.view.size)
        return self.view.normalised(augment.jitter(images, random))

    def _find(self, indices: Sequence[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        missing = sorted({index for index in indices if index not in self._kept})
        fresh: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        with ThreadPoolExecutor(_DECODERS) as pool:
            for index, pair in zip(missing, pool.map(self._decode, missing), strict=True):
                size = sum(part.numel() for part in pair)
                if size <= self._room:
                    self._room -= size
                    self._kept[index] = pair
                else:
                    fresh[index] = pair
        return (self._kept.get(index) or fresh[index] for index in indices)

    def _decode(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = load(self.dataset, self.dataset.samples[index])
        largest = round(_ROOM * self.view.size)
        ratio = largest / min(image.size)
        fixed = _tensor(self.view.frame(image))
        if ratio < 1:
            width, height = (max(largest, round(side * ratio)) for side in image.size)
            image = image.resize((width, height), Image.Resampling.BICUBIC)
        return fixed, _tensor(image)


def _tensor(image: Image.Image) -> torch.Tensor:
    """8-bit pixels, (3, height, width)."""
    return torch.from_numpy(np.array(image, dtype=np.uint8)).permute(2, 0, 1).contiguous()
