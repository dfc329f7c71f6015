"""The figures by name: plain shapes, the symbols on signs, and outlines of things."""

from __future__ import annotations

import numpy as np

from atlas_cli.datasets.builtin.canvas import arc, segments
from atlas_cli.datasets.builtin.figures import Disc, Figure, Line, Polygon, disc, line, polygon


def _regular(sides: int, start: float, radius: float = 0.9) -> Polygon:
    angles = np.deg2rad(start + 360.0 * np.arange(sides) / sides)
    return polygon(*((radius * float(np.cos(a)), radius * float(np.sin(a))) for a in angles))


def _star(points: int, inner: float, outer: float = 0.95) -> Polygon:
    angles = np.deg2rad(-90.0 + 180.0 * np.arange(2 * points) / points)
    radii = [outer, inner] * points
    pairs = zip(radii, angles, strict=True)
    return polygon(*((r * float(np.cos(a)), r * float(np.sin(a))) for r, a in pairs))


def _petals(count: int) -> list[Disc]:
    angles = np.deg2rad(360.0 * np.arange(count) / count - 90.0)
    return [disc(0.42 * float(np.cos(a)), -0.3 + 0.42 * float(np.sin(a)), 0.25) for a in angles]


SHAPES: dict[str, Figure] = {
    "circle": (disc(0, 0, 0.85),),
    "square": (polygon((-0.75, -0.75), (0.75, -0.75), (0.75, 0.75), (-0.75, 0.75)),),
    "triangle": (polygon((0, -0.9), (0.92, 0.75), (-0.92, 0.75)),),
    "diamond": (polygon((0, -0.98), (0.8, 0), (0, 0.98), (-0.8, 0)),),
    "hexagon": (_regular(6, 0.0, 0.92),),
    "star": (_star(5, 0.4),),
    "ring": (disc(0, 0, 0.88), disc(0, 0, 0.5, cut=True)),
    "plus": (line((-0.75, 0), (0.75, 0), pen=0.2), line((0, -0.75), (0, 0.75), pen=0.2)),
    "heart": (
        disc(-0.4, -0.3, 0.45),
        disc(0.4, -0.3, 0.45),
        polygon((-0.8, -0.1), (0, -0.35), (0.8, -0.1), (0, 0.85)),
    ),
    "crescent": (disc(0, 0, 0.88), disc(0.42, -0.12, 0.72, cut=True)),
}

SYMBOLS: dict[str, Figure] = {
    "bar": (polygon((-0.95, -0.28), (0.95, -0.28), (0.95, 0.28), (-0.95, 0.28)),),
    "dot": (disc(0, 0, 0.55),),
    "cross": (
        line((-0.7, -0.7), (0.7, 0.7), pen=0.2),
        line((-0.7, 0.7), (0.7, -0.7), pen=0.2),
    ),
    "arrow": (
        line((0, -0.5), (0, 0.85), pen=0.2),
        polygon((0, -1.05), (0.75, -0.15), (-0.75, -0.15)),
    ),
    "exclamation mark": (line((0, -0.85), (0, 0.2), pen=0.22), disc(0, 0.8, 0.25)),
}

THINGS: dict[str, Figure] = {
    "fish": (
        disc(-0.2, 0, 0.68, 0.42),
        polygon((0.3, 0), (0.95, -0.5), (0.8, 0), (0.95, 0.5)),
        disc(-0.55, -0.1, 0.08, cut=True),
    ),
    "house": (
        polygon((-0.95, -0.1), (0, -0.9), (0.95, -0.1)),
        polygon((-0.7, -0.15), (0.7, -0.15), (0.7, 0.85), (-0.7, 0.85)),
        polygon((-0.2, 0.3), (0.2, 0.3), (0.2, 0.85), (-0.2, 0.85), cut=True),
    ),
    "tree": (
        disc(0, -0.4, 0.58),
        disc(-0.35, -0.1, 0.35),
        disc(0.35, -0.1, 0.35),
        polygon((-0.13, 0), (0.13, 0), (0.18, 0.95), (-0.18, 0.95)),
    ),
    "boat": (
        polygon((-0.95, 0.4), (0.95, 0.4), (0.6, 0.9), (-0.65, 0.9)),
        polygon((-0.05, -0.95), (-0.05, 0.25), (-0.75, 0.25)),
        polygon((0.08, -0.75), (0.7, 0.25), (0.08, 0.25)),
    ),
    "car": (
        polygon((-0.95, 0), (0.95, 0), (0.95, 0.45), (-0.95, 0.45)),
        polygon((-0.6, 0), (-0.35, -0.45), (0.35, -0.45), (0.65, 0)),
        disc(-0.5, 0.5, 0.24),
        disc(0.5, 0.5, 0.24),
        polygon((-0.3, -0.08), (-0.22, -0.3), (0.22, -0.3), (0.35, -0.08), cut=True),
    ),
    "cat": (
        disc(0, 0.2, 0.72, 0.62),
        polygon((-0.7, 0.1), (-0.65, -0.9), (-0.1, -0.3)),
        polygon((0.7, 0.1), (0.65, -0.9), (0.1, -0.3)),
        disc(-0.28, 0.1, 0.11, cut=True),
        disc(0.28, 0.1, 0.11, cut=True),
    ),
    "bird": (
        disc(0, 0.15, 0.55, 0.35),
        disc(-0.5, -0.3, 0.27),
        polygon((-0.7, -0.4), (-1, -0.22), (-0.7, -0.15)),
        polygon((0.35, 0), (1, -0.3), (0.9, 0.1), (0.4, 0.35)),
        line((-0.1, 0.4), (-0.1, 0.9), pen=0.06),
        line((0.15, 0.4), (0.15, 0.9), pen=0.06),
    ),
    "mushroom": (
        disc(0, -0.1, 0.9, 0.75),
        polygon((-1, -0.05), (1, -0.05), (1, 1), (-1, 1), cut=True),
        polygon((-0.25, -0.1), (0.25, -0.1), (0.32, 0.9), (-0.32, 0.9)),
    ),
    "key": (
        disc(-0.55, 0, 0.4),
        disc(-0.55, 0, 0.18, cut=True),
        line((-0.2, 0), (0.9, 0), pen=0.11),
        line((0.85, 0), (0.85, 0.38), pen=0.1),
        line((0.5, 0), (0.5, 0.32), pen=0.1),
    ),
    "cup": (
        disc(0.5, 0, 0.42),
        disc(0.5, 0, 0.22, cut=True),
        polygon((-0.75, -0.6), (0.5, -0.6), (0.4, 0.75), (-0.65, 0.75)),
    ),
    "umbrella": (
        disc(0, 0.05, 0.92, 0.9),
        polygon((-1, 0), (1, 0), (1, 1), (-1, 1), cut=True),
        Line(segments([(0, 0), (0, 0.7), *arc((0.2, 0.7), (0.2, 0.22), 180, 0)]), 0.08),
    ),
    "flower": (
        *_petals(5),
        disc(0, -0.3, 0.13, cut=True),
        line((0, 0.2), (0, 0.95), pen=0.08),
        disc(0.25, 0.62, 0.22, 0.1),
    ),
    "hammer": (
        polygon((-0.7, -0.85), (0.6, -0.85), (0.75, -0.35), (-0.7, -0.35)),
        line((0, -0.4), (0, 0.85), pen=0.13),
    ),
    "bottle": (
        polygon((-0.15, -0.95), (0.15, -0.95), (0.15, -0.4), (-0.15, -0.4)),
        polygon(
            (-0.15, -0.5), (0.15, -0.5), (0.4, -0.05), (0.4, 0.95), (-0.4, 0.95), (-0.4, -0.05)
        ),
    ),
    "butterfly": (
        disc(-0.48, -0.35, 0.45, 0.45),
        disc(0.48, -0.35, 0.45, 0.45),
        disc(-0.38, 0.42, 0.34, 0.36),
        disc(0.38, 0.42, 0.34, 0.36),
        line((0, -0.7), (0, 0.75), pen=0.09),
    ),
    "airplane": (
        line((-0.85, 0), (0.85, 0), pen=0.13),
        polygon((0.25, 0), (-0.25, -0.95), (-0.5, -0.95), (-0.2, 0)),
        polygon((0.25, 0), (-0.25, 0.95), (-0.5, 0.95), (-0.2, 0)),
        polygon((-0.65, 0), (-1, -0.4), (-0.85, 0), (-1, 0.4)),
    ),
}
