"""The sheet that everything is drawn on: pixels as points, distances as ink, light and grain.

Only `Generator.random` and `Generator.uniform` are used, the two draws that are plain arithmetic
on the bit stream, so that an image is the same on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Picture = npt.NDArray[np.uint8]
Colour = tuple[float, float, float]

SIZE = 32
PIXEL = 2.0 / SIZE


@dataclass(frozen=True)
class Points:
    """Where each pixel lies in the coordinates of a figure, and how long their unit is."""

    x: Array
    y: Array
    unit: float = 1.0


def _grid() -> Points:
    centres = (np.arange(SIZE) + 0.5) * PIXEL - 1.0
    across, down = np.meshgrid(centres, centres)
    return Points(across, down)


GRID = _grid()


def place(
    points: Points,
    centre: tuple[float, float],
    size: float,
    turn: float = 0.0,
    slant: float = 0.0,
) -> Points:
    """The points as seen by a figure of this size, turned by radians and sheared."""
    x, y = (points.x - centre[0]) / size, (points.y - centre[1]) / size
    cosine, sine = float(np.cos(turn)), float(np.sin(turn))
    across, down = cosine * x + sine * y, cosine * y - sine * x
    return Points(across + slant * down, down, points.unit * size)


def pick(rng: np.random.Generator, count: int) -> int:
    """A number from 0 to count - 1."""
    return int(rng.random() * count)


def _weights(cells: int) -> Array:
    """How much each pixel of a row takes from each knot: a smooth step between neighbours."""
    position = (np.arange(SIZE) + 0.5) / SIZE * (cells - 1)
    gap = np.clip(np.abs(position[:, None] - np.arange(cells)[None, :]), 0.0, 1.0)
    return np.asarray(1.0 - gap * gap * (3.0 - 2.0 * gap))


_WEIGHTS = {cells: _weights(cells) for cells in range(2, 21)}


def clouds(rng: np.random.Generator, cells: int) -> Array:
    """Smooth noise in [-1, 1], with `cells` knots along each side."""
    knots = rng.uniform(-1.0, 1.0, (cells, cells))
    return np.asarray(_WEIGHTS[cells] @ knots @ _WEIGHTS[cells].T)


def wobble(points: Points, rng: np.random.Generator, amount: float, cells: int = 4) -> Points:
    """The points pushed about smoothly, as by an unsteady hand."""
    if amount == 0.0:
        return points
    return Points(
        points.x + amount * clouds(rng, cells), points.y + amount * clouds(rng, cells), points.unit
    )


def ink(distance: Array, points: Points, edge: float = 1.0) -> Array:
    """How much of each pixel lies inside; `edge` is the width of the border in pixels."""
    return np.clip(0.5 - distance * (points.unit / (PIXEL * edge)), 0.0, 1.0)


def plain(colour: Colour) -> Array:
    """A picture (3, 32, 32) of one colour."""
    return np.broadcast_to(np.array(colour)[:, None, None], (3, SIZE, SIZE)).copy()


def blend(under: Array, over: Array | Colour, cover: Array) -> Array:
    """The picture `under` with `over`, a picture or a colour, where `cover` is 1."""
    top = np.array(over)
    if top.ndim == 1:
        top = top[:, None, None]
    return under + cover * (top - under)


def _blur_matrix() -> Array:
    matrix = 0.5 * np.eye(SIZE) + 0.25 * (np.eye(SIZE, k=1) + np.eye(SIZE, k=-1))
    return np.asarray(matrix / matrix.sum(axis=1, keepdims=True))


_BLUR = _blur_matrix()


def blur(image: Array, amount: float) -> Array:
    """The picture mixed with its neighbours; an amount of 1 is a (1, 2, 1) filter."""
    return image + amount * (_BLUR @ image @ _BLUR.T - image)


def gray(image: Array) -> Array:
    """The brightness of each pixel (32, 32)."""
    return np.asarray(0.3 * image[0] + 0.59 * image[1] + 0.11 * image[2])


def grain(rng: np.random.Generator, amount: float) -> Array:
    """Noise for every pixel and channel: mostly shared by the channels, triangular."""
    shared = rng.random((1, SIZE, SIZE)) + rng.random((1, SIZE, SIZE)) - 1.0
    return amount * (shared + 0.5 * (rng.random((3, SIZE, SIZE)) - 0.5))


def finish(image: Array) -> Picture:
    """The picture as bytes (32, 32, 3)."""
    return np.rint(np.clip(image, 0.0, 1.0) * 255.0).astype(np.uint8).transpose(1, 2, 0).copy()


def arc(
    centre: tuple[float, float], radii: tuple[float, float], start: float, stop: float
) -> list[tuple[float, float]]:
    """Points along an ellipse; degrees run clockwise from the right, one point every 30."""
    steps = max(2, round(abs(stop - start) / 30.0))
    angles = np.deg2rad(np.linspace(start, stop, steps + 1))
    across, down = np.cos(angles), np.sin(angles)
    return [
        (centre[0] + radii[0] * float(a), centre[1] + radii[1] * float(b))
        for a, b in zip(across, down, strict=True)
    ]


def segments(*lines: Sequence[tuple[float, float]]) -> Array:
    """Polylines as rows (x, y, dx, dy), one for each piece."""
    rows = [
        (*first, second[0] - first[0], second[1] - first[1])
        for line in lines
        for first, second in pairwise(line)
        if math.dist(first, second) > 1e-9
    ]
    return np.array(rows, dtype=np.float64)


def stroke(points: Points, pieces: Array) -> Array:
    """The distance from each point to the nearest of the pieces.

    With r the place of the foot of a point p along a piece from a, as a share of its vector d,
    and t = r held in [0, 1], the square is |p|^2 + |a|^2 - 2 a.p + |d|^2 t (t - 2 r).
    """
    x, y, dx, dy = pieces.T
    length = dx * dx + dy * dy
    seen = np.stack([np.ones(points.x.size), points.x.ravel(), points.y.ravel()])
    foot = np.stack([-(x * dx + y * dy) / length, dx / length, dy / length], axis=1) @ seen
    held = np.minimum(np.maximum(foot, 0.0), 1.0)
    squares = np.stack([x * x + y * y, -2.0 * x, -2.0 * y], axis=1) @ seen
    squares += length[:, None] * held * (held - 2.0 * foot)
    nearest = squares.min(axis=0) + seen[1] * seen[1] + seen[2] * seen[2]
    return np.asarray(np.sqrt(np.maximum(nearest, 0.0)).reshape(points.x.shape))
