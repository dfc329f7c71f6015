"""Textures: for each name, a field in [0, 1] over the sheet that mixes two colours."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from atlas_cli.datasets.builtin.canvas import PIXEL, SIZE, Array, Points, clouds, pick

Field = Callable[[Points, np.random.Generator], Array]


def _step(signed: Array, unit: float) -> Array:
    """1 where positive, 0 where negative, with an edge of one pixel."""
    return np.clip(0.5 + signed * unit / PIXEL, 0.0, 1.0)


def _saw(phase: Array) -> Array:
    """A triangle wave between -0.5 and 0.5 with period 1."""
    return np.asarray(2.0 * np.abs(phase - np.floor(phase + 0.5)) - 0.5)


def _lattice(points: Points) -> tuple[Array, Array]:
    """The offset from the middle of the unit cell each point lies in."""
    return points.x - np.floor(points.x) - 0.5, points.y - np.floor(points.y) - 0.5


def _striped(points: Points, rng: np.random.Generator) -> Array:
    return _step(0.5 * _saw(points.x), points.unit)


def _checkered(points: Points, rng: np.random.Generator) -> Array:
    first = _step(_saw(0.5 * points.x), points.unit)
    second = _step(_saw(0.5 * points.y), points.unit)
    return first + second - 2.0 * first * second


def _dotted(points: Points, rng: np.random.Generator) -> Array:
    x, y = _lattice(points)
    return _step(0.3 - np.sqrt(x * x + y * y), points.unit)


def _zigzagged(points: Points, rng: np.random.Generator) -> Array:
    bent = Points(points.x + 0.9 * _saw(0.55 * points.y), points.y, points.unit)
    return _striped(bent, rng)


def _wavy(points: Points, rng: np.random.Generator) -> Array:
    bent = Points(points.x + 0.45 * np.sin(2.6 * points.y), points.y, points.unit)
    return _striped(bent, rng)


def _grid(points: Points, rng: np.random.Generator) -> Array:
    x, y = _lattice(points)
    return _step(np.maximum(np.abs(x), np.abs(y)) - 0.38, points.unit)


def _woven(points: Points, rng: np.random.Generator) -> Array:
    x, y = _lattice(points)
    upright = (np.floor(points.x) + np.floor(points.y)) % 2.0 == 0.0
    across = np.where(upright, np.abs(x), np.abs(y))
    along = np.where(upright, np.abs(y), np.abs(x))
    thread = _step(0.3 - across, points.unit) * (0.75 + 0.5 * (0.25 - along))
    return np.asarray(np.where(upright, thread, 0.55 * thread))


def _spiralled(points: Points, rng: np.random.Generator) -> Array:
    radius = np.sqrt(points.x * points.x + points.y * points.y)
    turns = np.arctan2(points.y, points.x) / (2.0 * np.pi)
    hand = 1.0 if rng.random() < 0.5 else -1.0
    return _step(0.5 * _saw(0.9 * radius + hand * turns), points.unit)


def _blotchy(points: Points, rng: np.random.Generator) -> Array:
    return np.clip(0.5 + 2.5 * clouds(rng, 6 + pick(rng, 3)), 0.0, 1.0)


def _speckled(points: Points, rng: np.random.Generator) -> Array:
    spots = rng.random((SIZE, SIZE))
    return np.clip((spots - 0.82) * 12.0, 0.0, 1.0)


def _seeds(points: Points, rng: np.random.Generator, count: int) -> Array:
    """Distances (count, 32, 32) from each point to seeds scattered over the whole sheet."""
    edge = 1.2 / points.unit
    x = rng.uniform(-edge, edge, (count, 1, 1))
    y = rng.uniform(-edge, edge, (count, 1, 1))
    return np.asarray(np.sqrt((points.x - x) ** 2 + (points.y - y) ** 2))


def _cracked(points: Points, rng: np.random.Generator) -> Array:
    nearest = np.partition(_seeds(points, rng, 14), 1, axis=0)
    return _step(0.16 - (nearest[1] - nearest[0]), points.unit)


def _bubbly(points: Points, rng: np.random.Generator) -> Array:
    radii = rng.uniform(0.35, 0.95, (11, 1, 1))
    rims = np.abs(_seeds(points, rng, 11) - radii).min(axis=0)
    return _step(0.12 - rims, points.unit)


PATTERNS: dict[str, Field] = {
    "striped": _striped,
    "checkered": _checkered,
    "dotted": _dotted,
    "zigzagged": _zigzagged,
    "wavy": _wavy,
    "grid": _grid,
    "woven": _woven,
    "spiralled": _spiralled,
    "blotchy": _blotchy,
    "speckled": _speckled,
    "cracked": _cracked,
    "bubbly": _bubbly,
}
