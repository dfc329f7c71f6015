"""Images decoded once and kept as 8-bit pixels: as evaluation sees them, and in random views."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from PIL import Image

from atlas_cli.datasets.dataset import Dataset, Sample, load
from atlas_cli.errors import DataError

Preprocess = Callable[[Image.Image], torch.Tensor]
_DECODERS = 4
_ROOM = 1.5  # a kept image has at most this many times the side that the model takes

_TRIES = 10
SCALE = (0.5, 1.0)  # share of the area that a crop keeps
_RATIO = (3 / 4, 4 / 3)  # width over height of a crop
MILD = (0.9, 1.0)  # the same for crops that keep what an image shows
_CONTRAST, _BRIGHTNESS, _NOISE = 0.3, 25.0, 12.0  # the most that other light changes, of 255
_CUBIC = -0.5  # Pillow's bicubic filter


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
        self,
        dataset: Dataset,
        view: View,
        budget: int,
        device: torch.device | None = None,
        workers: int | None = None,
    ) -> None:
        self.dataset = dataset
        self._device = device or torch.device("cpu")
        self.view = view
        self._room = budget
        self._workers = _DECODERS if workers is None else workers
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
        scale: tuple[float, float] = SCALE,
    ) -> torch.Tensor:
        """A random crop of every image, perhaps mirrored, normalised."""
        stacked, sizes = stack_images([pair[1] for pair in self._find(indices)])
        crops = draw_crops(sizes, random, mirror=mirror, scale=scale)
        return self.view.normalised(take(stacked.to(self._device), crops, self.view.size))

    def add(self, key: str) -> int:
        """One more image, and its number. Raises DataError, and adds none, if it is broken."""
        before, number = self.dataset, len(self.dataset.samples)
        self.dataset = replace(before, samples=(*before.samples, Sample(key, None)))
        try:
            self._keep(number, self._decode(number))
        except DataError:
            self.dataset = before
            raise
        return number

    def mild(self, indices: Sequence[int], random: torch.Generator) -> torch.Tensor:
        """Every image a little cropped, in other light and with noise, normalised."""
        stacked, sizes = stack_images([pair[1] for pair in self._find(indices)])
        crops = draw_crops(sizes, random, mirror=False, scale=MILD)
        images = take(stacked.to(self._device), crops, self.view.size)
        return self.view.normalised(jitter(images, random))

    def _find(self, indices: Sequence[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        missing = sorted({index for index in indices if index not in self._kept})
        fresh: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        try:
            for index, pair in zip(missing, self._decoded(missing), strict=True):
                if not self._keep(index, pair):
                    fresh[index] = pair
        except DataError as problem:
            raise DataError(f"{problem} (--skip-broken leaves such images out)") from problem
        return (self._kept.get(index) or fresh[index] for index in indices)

    def _decoded(self, indices: Sequence[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        if self._workers == 0:
            yield from map(self._decode, indices)
            return
        with ThreadPoolExecutor(self._workers) as pool:
            yield from pool.map(self._decode, indices)

    def _keep(self, index: int, pair: tuple[torch.Tensor, torch.Tensor]) -> bool:
        """Keep a decoded image if there is room for it, and say whether there was."""
        size = sum(part.numel() for part in pair)
        if size > self._room:
            return False
        self._room -= size
        self._kept[index] = pair
        return True

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


# Random views: two small matrices per image, on any device -------------------------------------


@dataclass(frozen=True)
class Crops:
    """A box of every image, in pixels, and whether it is mirrored; each of shape (images,)."""

    top: torch.Tensor
    left: torch.Tensor
    height: torch.Tensor
    width: torch.Tensor
    mirrored: torch.Tensor


def whole_images(sizes: torch.Tensor) -> Crops:
    """Every image as it is. `sizes` holds heights and widths, (images, 2)."""
    zero = torch.zeros(len(sizes), dtype=torch.long)
    return Crops(zero, zero, sizes[:, 0], sizes[:, 1], zero.bool())


def draw_crops(
    sizes: torch.Tensor,
    generator: torch.Generator,
    *,
    mirror: bool = True,
    scale: tuple[float, float] = SCALE,
) -> Crops:
    """A random box for every image, and a mirror image for half of them if `mirror` says so.

    The share of the area is uniform within `scale`, half to all of the image by default, and the
    ratio of sides log-uniform; of ten draws the first that fits is taken, else the largest centred
    box of an allowed ratio.
    """
    # One row of numbers per image: a batch drawn in parts is the same as drawn at once.
    drawn = torch.rand(len(sizes), 2 * _TRIES + 3, generator=generator)
    low, high = (math.log(ratio) for ratio in _RATIO)
    area = scale[0] + (scale[1] - scale[0]) * drawn[:, :_TRIES]
    ratio = (low + (high - low) * drawn[:, _TRIES : 2 * _TRIES]).exp()
    places = drawn[:, 2 * _TRIES : -1]
    mirrored = drawn[:, -1] < (0.5 if mirror else 0.0)
    height, width = sizes[:, :1].float(), sizes[:, 1:].float()
    pixels = area * height * width
    widths, heights = (pixels * ratio).sqrt().round(), (pixels / ratio).sqrt().round()
    fits = (widths >= 1) & (widths <= width) & (heights >= 1) & (heights <= height)
    first = fits.int().argmax(dim=1, keepdim=True)
    chosen = fits.any(dim=1, keepdim=True)
    wide = torch.where(chosen, widths.gather(1, first), width.minimum(height * _RATIO[1]).round())
    tall = torch.where(chosen, heights.gather(1, first), height.minimum(width / _RATIO[0]).round())
    centred = torch.where(chosen, places, torch.full_like(places, 0.5))
    top = (centred[:, :1] * (height - tall + 1)).floor().minimum(height - tall)
    left = (centred[:, 1:] * (width - wide + 1)).floor().minimum(width - wide)
    box = [part.long().squeeze(1) for part in (top, left, tall, wide)]
    return Crops(box[0], box[1], box[2], box[3], mirrored)


def stack_images(images: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (3, height, width) of any sizes as one (images, 3, H, W) tensor, and their sizes."""
    sizes = torch.tensor([image.shape[1:] for image in images])
    height, width = sizes.amax(dim=0).tolist()
    stacked = torch.zeros(len(images), 3, height, width, dtype=images[0].dtype)
    for number, image in enumerate(images):
        stacked[number, :, : image.shape[1], : image.shape[2]] = image
    return stacked, sizes


def take(images: torch.Tensor, crops: Crops, size: int) -> torch.Tensor:
    """The boxes of 8-bit images resized to `size` pixels square, as float32 in 0..255.

    rows @ image @ columns^T, with the antialiased bicubic filter of Pillow in both matrices.
    """
    device = images.device
    still = torch.zeros_like(crops.mirrored)
    rows = _filter(crops.top, crops.height, still, (size, images.shape[2])).to(device)
    columns = _filter(crops.left, crops.width, crops.mirrored, (size, images.shape[3])).to(device)
    resized = rows[:, None] @ images.float() @ columns[:, None].transpose(2, 3)
    return resized.clamp_(0, 255)


def jitter(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Other light and some noise: (x - mean) * contrast + mean + brightness + noise, in 0..255.

    Contrast, brightness and the strength of the noise are drawn for every image.
    """
    drawn = torch.rand(len(images), 3, 1, 1, 1, generator=generator)
    noise = torch.empty(images.shape).normal_(generator=generator)
    drawn, noise = drawn.to(images.device), noise.to(images.device)
    mean = images.mean(dim=(1, 2, 3), keepdim=True)
    contrast = 1 + _CONTRAST * (2 * drawn[:, 0] - 1)
    brightness = _BRIGHTNESS * (2 * drawn[:, 1] - 1)
    changed = (images - mean) * contrast + mean + brightness
    return (changed + _NOISE * drawn[:, 2] * noise).clamp_(0, 255)


def _filter(
    start: torch.Tensor, length: torch.Tensor, mirrored: torch.Tensor, shape: tuple[int, int]
) -> torch.Tensor:
    """How much each pixel of a line counts in each pixel of its resized part, (images, *shape)."""
    size, pixels = shape
    places = torch.arange(size).expand(len(start), size)
    places = torch.where(mirrored[:, None], size - 1 - places, places)
    step = (length / size)[:, None]
    centre = start[:, None] + (places + 0.5) * step
    line = torch.arange(pixels)
    distance = (line + 0.5 - centre[..., None]) / step.clamp(min=1)[..., None]
    inside = (line >= start[:, None]) & (line < (start + length)[:, None])
    weights = _cubic(distance.abs()) * inside[:, None]
    return weights / weights.sum(dim=2, keepdim=True)


def _cubic(x: torch.Tensor) -> torch.Tensor:
    near = ((_CUBIC + 2) * x - (_CUBIC + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * _CUBIC
    return torch.where(x < 1, near, torch.where(x < 2, far, torch.zeros_like(x)))
