"""How a picture is drawn: the hand, the background, the light, the lens and the grain.

A style says how far a picture is from the clean pictures of pre-training. Tasks share shifts of
style, as real datasets do, so that learning one task can help with another.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from atlas_cli.datasets.builtin import canvas
from atlas_cli.datasets.builtin.canvas import GRID, Array

Range = tuple[float, float]


@dataclass(frozen=True)
class Style:
    """How a picture is drawn. The defaults are the clean pictures of pre-training.

    Pairs are ranges to draw from; single numbers are the largest value of a symmetric range.
    """

    palette: str = "colours"
    size: Range = (0.6, 0.8)
    offset: float = 0.12
    turn: float = 0.1
    slant: float = 0.08
    wobble: Range = (0.0, 0.02)
    pen: Range = (0.12, 0.2)
    uneven: float = 0.1
    clutter: int = 0
    neighbours: Range = (0.0, 0.0)
    dull: Range = (0.0, 0.0)
    contrast: Range = (0.9, 1.0)
    shade: float = 0.0
    cast: float = 0.0
    blur: Range = (0.0, 0.2)
    noise: Range = (0.0, 0.05)


CLEAN = Style()


def weather(image: Array, style: Style, rng: np.random.Generator) -> Array:
    """The picture under the light, the lens and the grain of a style."""
    image = image + rng.uniform(*style.dull) * (canvas.gray(image) - image)
    contrast = rng.uniform(*style.contrast)
    level = rng.uniform(0.35, 0.65)
    image = level + contrast * (image - level)
    if style.shade:
        slope = rng.uniform(-style.shade, style.shade, 2)
        image = image + slope[0] * GRID.x + slope[1] * GRID.y
    if style.cast:
        image = image + rng.uniform(-style.cast, style.cast, (3, 1, 1))
    image = canvas.blur(image, rng.uniform(*style.blur))
    return image + canvas.grain(rng, rng.uniform(*style.noise))
