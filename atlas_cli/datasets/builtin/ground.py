"""The ground from above: for each kind of terrain, a function that paints a picture of it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from atlas_cli.datasets.builtin.canvas import (
    GRID,
    SIZE,
    Array,
    Colour,
    Points,
    blend,
    clouds,
    ink,
    pick,
    place,
    plain,
    wobble,
)

Painter = Callable[[Points, np.random.Generator], Array]

MEADOW: Colour = (0.42, 0.62, 0.28)
WOOD: Colour = (0.1, 0.3, 0.12)
WATER: Colour = (0.14, 0.34, 0.66)
SAND: Colour = (0.87, 0.76, 0.5)
ASPHALT: Colour = (0.36, 0.36, 0.39)
SOIL: Colour = (0.6, 0.44, 0.28)
FOAM: Colour = (0.93, 0.95, 0.95)


def _patchy(colour: Colour, rng: np.random.Generator, amount: float = 0.08) -> Array:
    """One colour, lighter and darker in places."""
    return plain(colour) + amount * clouds(rng, 7)


def _hash(points: Points, rng: np.random.Generator) -> Array:
    """A random number in [0, 1) for each unit cell."""
    table = rng.random((16, 16))
    column = np.floor(points.x).astype(np.int64) % 16
    row = np.floor(points.y).astype(np.int64) % 16
    return np.asarray(table[row, column])


def _boxes(points: Points, across: float, down: float) -> Array:
    """The distance to a box in the middle of each unit cell, negative inside."""
    x = np.abs(points.x - np.floor(points.x) - 0.5) - across
    y = np.abs(points.y - np.floor(points.y) - 0.5) - down
    return np.asarray(np.maximum(x, y))


def _forest(points: Points, rng: np.random.Generator) -> Array:
    crowns = clouds(rng, 16) + 0.5 * clouds(rng, 9)
    return blend(plain(WOOD), (0.22, 0.48, 0.2), np.clip(0.4 + 0.6 * crowns, 0.0, 1.0))


def _river(points: Points, rng: np.random.Generator) -> Array:
    bend, phase = rng.uniform(0.15, 0.4), rng.uniform(0.0, 6.3)
    middle = points.y - bend * np.sin(2.8 * points.x + phase)
    bank = np.abs(middle) - rng.uniform(0.13, 0.22)
    return blend(_patchy(MEADOW, rng), WATER, ink(bank, points))


def _highway(points: Points, rng: np.random.Generator) -> Array:
    width = rng.uniform(0.2, 0.3)
    land = MEADOW if rng.random() < 0.6 else SOIL
    road = blend(_patchy(land, rng), ASPHALT, ink(np.abs(points.y) - width, points))
    dashes = np.where(np.sin(9.0 * points.x) > -0.3, np.abs(points.y) - 0.035, 1.0)
    return blend(road, FOAM, ink(dashes, points))


def _fields(points: Points, rng: np.random.Generator) -> Array:
    cells = Points(points.x * 1.3 + 9.0, points.y * 1.9 + 9.0, points.unit)
    choice = _hash(cells, rng)[None]
    colours = [np.array(c)[:, None, None] for c in (SOIL, (0.78, 0.72, 0.3), MEADOW)]
    land = np.where(choice < 0.35, colours[0], np.where(choice < 0.65, colours[1], colours[2]))
    furrows = 0.06 * np.sin(np.where(choice[0] < 0.5, points.x, points.y) * 22.0)
    return np.asarray(land + furrows)


def _houses(points: Points, rng: np.random.Generator) -> Array:
    cells = place(points, (rng.uniform(-0.2, 0.2), 0.0), 0.5)
    street = np.abs(points.y) - 0.1
    ground = blend(_patchy(MEADOW, rng), ASPHALT, ink(street, points))
    light = 0.25 * (_hash(cells, rng) - 0.5)
    roofs = plain((0.72, 0.3, 0.2)) + light
    rows = Points(cells.x, cells.y + np.where(points.y > 0.0, -0.25, 0.25), cells.unit)
    return blend(ground, roofs, ink(_boxes(rows, 0.33, 0.3), cells))


def _lake(points: Points, rng: np.random.Generator) -> Array:
    shore = wobble(points, rng, 0.22)
    radius = np.sqrt(shore.x * shore.x + 1.5 * shore.y * shore.y)
    return blend(_patchy(MEADOW, rng), WATER, ink(radius - rng.uniform(0.5, 0.7), points))


def _beach(points: Points, rng: np.random.Generator) -> Array:
    line = points.y + 0.1 * clouds(rng, 5) + rng.uniform(-0.2, 0.2)
    image = blend(_patchy(SAND, rng, 0.05), FOAM, ink(line - 0.08, points))
    return blend(image, WATER, ink(line + 0.04, points))


def _desert(points: Points, rng: np.random.Generator) -> Array:
    ridge = points.y * 1.8 + 0.35 * clouds(rng, 5) + 0.1 * np.sin(3.0 * points.x)
    slope = ridge - np.floor(ridge)
    return np.asarray(plain(SAND) + (0.14 - 0.26 * slope) + 0.02 * clouds(rng, 16))


def _orchard(points: Points, rng: np.random.Generator) -> Array:
    cells = place(points, (0.0, 0.0), rng.uniform(0.34, 0.42))
    x = cells.x - np.floor(cells.x) - 0.5
    y = cells.y - np.floor(cells.y) - 0.5
    crowns = np.sqrt(x * x + y * y) - 0.32
    return blend(_patchy(SOIL, rng, 0.05), (0.16, 0.42, 0.16), ink(crowns, cells))


def _factories(points: Points, rng: np.random.Generator) -> Array:
    cells = place(points, (rng.uniform(-0.5, 0.5), rng.uniform(-0.5, 0.5)), 0.9)
    image = _patchy(ASPHALT, rng, 0.04)
    light = 0.25 * (_hash(cells, rng) - 0.7)
    roofs = plain((0.8, 0.81, 0.84)) + light - 0.1 * (np.sin(20.0 * points.x) > 0.3)
    return blend(image, roofs, ink(_boxes(cells, 0.36, 0.3), cells))


TERRAINS: dict[str, Painter] = {
    "a forest": _forest,
    "a river": _river,
    "a highway": _highway,
    "crop fields": _fields,
    "houses": _houses,
    "a lake": _lake,
    "a beach": _beach,
    "a desert": _desert,
    "an orchard": _orchard,
    "factories": _factories,
}


def paint_ground(name: str, rng: np.random.Generator, turn: float) -> Array:
    """A picture of this terrain, seen from a random place and side."""
    quarter = 0.5 * np.pi * pick(rng, 4)
    centre = (rng.uniform(-0.25, 0.25), rng.uniform(-0.25, 0.25))
    image = TERRAINS[name](place(GRID, centre, 1.0, quarter + turn), rng)
    assert image.shape == (3, SIZE, SIZE)
    return image
