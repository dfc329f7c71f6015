"""Filled figures, and how far each point lies from them.

A figure is a list of parts in a box from -1 to 1, y pointing down. Parts are joined in order;
a part with `cut=True` is taken away from what was joined before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from atlas_cli.datasets.builtin.canvas import Array, Points, segments, stroke

Corner = tuple[float, float]


@dataclass(frozen=True)
class Disc:
    """An ellipse."""

    centre: Corner
    radii: Corner
    cut: bool = False

    def distance(self, points: Points) -> Array:
        """About the distance to the rim, negative inside."""
        x = (points.x - self.centre[0]) / self.radii[0]
        y = (points.y - self.centre[1]) / self.radii[1]
        return np.asarray((np.sqrt(x * x + y * y) - 1.0) * min(self.radii))


@dataclass(frozen=True)
class Polygon:
    """The inside of a closed line, by the even-odd rule."""

    edges: Array
    cut: bool = False

    def distance(self, points: Points) -> Array:
        """The distance to the nearest edge, negative inside."""
        x, y, dx, dy = (column[:, None, None] for column in self.edges.T)
        spans = (y > points.y) != (y + dy > points.y)
        flat = np.where(dy == 0.0, 1.0, dy)
        left = points.x < x + dx * (points.y - y) / flat
        inside = np.logical_xor.reduce(spans & left, axis=0)
        return np.where(inside, -1.0, 1.0) * stroke(points, self.edges)


@dataclass(frozen=True)
class Line:
    """A polyline drawn with a round pen of this half-width."""

    pieces: Array
    pen: float
    cut: bool = False

    def distance(self, points: Points) -> Array:
        """The distance to the edge of the line, negative inside."""
        return stroke(points, self.pieces) - self.pen


Part = Disc | Polygon | Line
Figure = tuple[Part, ...]


def distance(points: Points, figure: Figure) -> Array:
    """The distance to the border of a figure, negative inside."""
    result = figure[0].distance(points)
    for part in figure[1:]:
        piece = part.distance(points)
        result = np.maximum(result, -piece) if part.cut else np.minimum(result, piece)
    return result


def disc(x: float, y: float, across: float, down: float = 0.0, cut: bool = False) -> Disc:
    """An ellipse by its centre and radii; one radius makes a circle."""
    return Disc((x, y), (across, down or across), cut)


def polygon(*corners: Corner, cut: bool = False) -> Polygon:
    """The inside of the closed line through the corners."""
    return Polygon(segments([*corners, corners[0]]), cut)


def line(*corners: Corner, pen: float = 0.1, cut: bool = False) -> Line:
    """An open line through the corners."""
    return Line(segments(corners), pen, cut)
