"""Random crops of many images at once: two small matrices per image, on any device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_TRIES = 10
SCALE = (0.5, 1.0)  # share of the area that a crop keeps
_RATIO = (3 / 4, 4 / 3)  # width over height of a crop
MILD = (0.9, 1.0)  # the same for crops that keep what an image shows
_CONTRAST, _BRIGHTNESS, _NOISE = 0.3, 25.0, 12.0  # the most that other light changes, of 255
_CUBIC = -0.5  # Pillow's bicubic filter


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
