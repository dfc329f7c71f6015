"""Built-in images made worse: noise, blur, contrast or rotation, each at three strengths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageEnhance, ImageFilter

from atlas_cli.datasets.builtin import TASKS, draw, label_of

Shift = Callable[[Image.Image, float, int], Image.Image]


def noise(image: Image.Image, strength: float, seed: int) -> Image.Image:
    """Gaussian noise of a standard deviation, of 255."""
    pixels = np.asarray(image, np.float32)
    drawn = np.random.default_rng(seed).normal(0, strength, pixels.shape)
    return Image.fromarray((pixels + drawn).clip(0, 255).astype(np.uint8))


def blur(image: Image.Image, strength: float, seed: int) -> Image.Image:
    """A Gaussian blur of a radius in pixels."""
    return image.filter(ImageFilter.GaussianBlur(strength))


def contrast(image: Image.Image, strength: float, seed: int) -> Image.Image:
    """A share of the contrast."""
    return ImageEnhance.Contrast(image).enhance(strength)


def rotation(image: Image.Image, strength: float, seed: int) -> Image.Image:
    """Turned by an angle in degrees, to the left or to the right."""
    side = 1 if seed % 2 else -1
    middle = tuple(int(value) for value in np.asarray(image).reshape(-1, 3).mean(axis=0))
    return image.rotate(side * strength, Image.Resampling.BICUBIC, fillcolor=middle)


SHIFTS: dict[str, tuple[Shift, tuple[float, float, float]]] = {
    "noise": (noise, (20, 40, 60)),
    "blur": (blur, (0.7, 1.2, 1.8)),
    "contrast": (contrast, (0.5, 0.3, 0.15)),
    "rotation": (rotation, (10, 20, 30)),
}
CONDITIONS = ("clean", *(f"{name} {number}" for name in SHIFTS for number in (1, 2, 3)))


def write_task(folder: Path, task: str, split: str, condition: str, count: int) -> None:
    """The first images of a task as a flat folder, with nothing in it that tells a class."""
    if (folder / "templates.txt").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    name, _, number = condition.partition(" ")
    for index in range(count):
        image = Image.fromarray(draw(task, split, index))
        if name in SHIFTS:
            change, strengths = SHIFTS[name]
            image = change(image, strengths[int(number) - 1], index)
        image.save(folder / f"{index:05d}.png")
    (folder / "classnames.txt").write_text("\n".join(TASKS[task].classes))
    (folder / "templates.txt").write_text("\n".join(TASKS[task].templates))


def labels_of(task: str, split: str, count: int) -> list[int]:
    """The classes of those images, which only the one who scores may see."""
    return [label_of(task, split, index) for index in range(count)]
