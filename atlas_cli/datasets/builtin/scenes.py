"""A scene is a concept seen in a style: what is drawn, and how.

The concepts are shared by all tasks and by pre-training; the styles are what differs.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np

from atlas_cli.datasets.builtin import canvas, figures
from atlas_cli.datasets.builtin.canvas import GRID, Array, Colour, Points
from atlas_cli.datasets.builtin.concepts import COUNTS, Concept
from atlas_cli.datasets.builtin.glyphs import DIGITS, GLYPHS
from atlas_cli.datasets.builtin.ground import paint_ground
from atlas_cli.datasets.builtin.outlines import SHAPES, SYMBOLS, THINGS
from atlas_cli.datasets.builtin.patterns import PATTERNS
from atlas_cli.datasets.builtin.styles import STYLES, Range, Style

COLOURS: dict[str, Colour] = {
    "red": (0.86, 0.13, 0.13),
    "orange": (0.97, 0.55, 0.1),
    "yellow": (0.97, 0.89, 0.18),
    "green": (0.13, 0.62, 0.24),
    "blue": (0.13, 0.29, 0.86),
    "purple": (0.54, 0.18, 0.7),
    "pink": (0.97, 0.6, 0.76),
    "brown": (0.47, 0.29, 0.15),
    "black": (0.07, 0.07, 0.08),
    "white": (0.95, 0.95, 0.94),
}


def _jitter(colour: Colour, rng: np.random.Generator, amount: float = 0.06) -> Colour:
    red, green, blue = np.array(colour) + rng.uniform(-amount, amount, 3)
    return float(red), float(green), float(blue)


def _gray(low: float, high: float, rng: np.random.Generator) -> Colour:
    level = rng.uniform(low, high)
    return level, level, level


def _apart(first: Colour, second: Colour) -> float:
    return float(np.abs(np.array(first) - np.array(second)).sum())


def _pair(colour: str, style: Style, rng: np.random.Generator) -> tuple[Colour, Colour]:
    """The colours of a figure and of what lies behind it."""
    if style.palette == "chalk":
        return _gray(0.85, 1.0, rng), _gray(0.02, 0.1, rng)
    if style.palette == "ink":
        return _gray(0.06, 0.24, rng), _gray(0.68, 0.94, rng)
    front = colour or list(COLOURS)[canvas.pick(rng, len(COLOURS))]
    choices = [c for n, c in COLOURS.items() if n != front and _apart(c, COLOURS[front]) > 0.8]
    back = choices[canvas.pick(rng, len(choices))]
    return _jitter(COLOURS[front], rng), _jitter(back, rng)


def _any_colour(rng: np.random.Generator) -> Colour:
    red, green, blue = rng.random(3)
    return float(red), float(green), float(blue)


def _spot(style: Style, rng: np.random.Generator) -> Points:
    """The sheet as seen by a figure, placed and pushed about as the style says."""
    unsteady = canvas.wobble(GRID, rng, rng.uniform(*style.wobble))
    centre = rng.uniform(-style.offset, style.offset, 2)
    return canvas.place(
        unsteady,
        (float(centre[0]), float(centre[1])),
        rng.uniform(*style.size),
        rng.uniform(-style.turn, style.turn),
        rng.uniform(-style.slant, style.slant),
    )


def _behind(colour: Colour, style: Style, rng: np.random.Generator) -> Array:
    """The background: one colour, and bands and blots of others if the style is cluttered."""
    image = canvas.plain(colour)
    for _ in range(style.clutter):
        centre = rng.uniform(-1.0, 1.0, 2)
        spot = canvas.place(GRID, (centre[0], centre[1]), 1.0, rng.uniform(0.0, 3.14))
        length, width = rng.uniform(0.2, 1.0), rng.uniform(0.03, 0.3)
        box = np.maximum(np.abs(spot.x) - length, np.abs(spot.y) - width)
        image = canvas.blend(image, _any_colour(rng), rng.uniform(0.2, 0.6) * canvas.ink(box, spot))
    return image


def _glyph(concept: Concept, style: Style, rng: np.random.Generator) -> Array:
    front, back = _pair(concept.colour, style, rng)
    image = _behind(back, style, rng)
    spot = _spot(style, rng)
    pen = rng.uniform(*style.pen)
    if style.neighbours[1]:
        image = _add_neighbours(image, spot, front, pen, style.neighbours, rng)
    cover = canvas.ink(canvas.stroke(spot, GLYPHS[concept.name]) - pen, spot)
    return canvas.blend(image, front, cover)


def _add_neighbours(
    image: Array,
    spot: Points,
    colour: Colour,
    pen: float,
    away: Range,
    rng: np.random.Generator,
) -> Array:
    """The picture with other digits to the left and right of where the figure will be."""
    for side in (-1.0, 1.0):
        pieces = list(DIGITS.values())[canvas.pick(rng, len(DIGITS))]
        columns = slice(0, 14) if side < 0.0 else slice(-14, None)
        shift = side * rng.uniform(*away)
        part = Points(spot.x[:, columns] - shift, spot.y[:, columns], spot.unit)
        cover = canvas.ink(canvas.stroke(part, pieces) - pen, part)
        image[:, :, columns] = canvas.blend(image[:, :, columns], colour, cover)
    return image


def _figure(concept: Concept, style: Style, rng: np.random.Generator) -> Array:
    parts = {"shape": SHAPES, "thing": THINGS}[concept.kind][concept.name]
    front, back = _pair(concept.colour, style, rng)
    spot = _spot(style, rng)
    if concept.kind == "thing" and rng.random() < 0.5:
        spot = Points(-spot.x, spot.y, spot.unit)
    cover = canvas.ink(figures.distance(spot, parts), spot)
    return canvas.blend(_behind(back, style, rng), front, cover)


def _sign(concept: Concept, style: Style, rng: np.random.Generator) -> Array:
    front, back = _pair(concept.colour, style, rng)
    spot = _spot(style, rng)
    image = _behind(back, style, rng)
    plate = figures.distance(spot, SHAPES[concept.name])
    image = canvas.blend(image, front, canvas.ink(plate, spot))
    low = 0.22 if concept.name == "triangle" else 0.0
    inner = canvas.place(spot, (0.0, low), 0.5)
    mark = (0.08, 0.08, 0.08) if concept.colour in ("yellow", "white") else (0.96, 0.96, 0.96)
    cover = canvas.ink(figures.distance(inner, SYMBOLS[concept.symbol]), inner)
    return canvas.blend(image, _jitter(mark, rng, 0.04), cover)


def _count(concept: Concept, style: Style, rng: np.random.Generator) -> Array:
    """Blobs in different cells of a three by three board, so that they never touch."""
    number = COUNTS.index(concept.name) + 1
    front, back = _pair(concept.colour, style, rng)
    cells = np.argsort(rng.random(9), kind="stable")[:number]
    spread = rng.uniform(-0.1, 0.1, (2, number))
    x = ((cells % 3) - 1) * 0.62 + spread[0]
    y = ((cells // 3) - 1) * 0.62 + spread[1]
    radius = rng.uniform(0.16, 0.22) * (1.0 + rng.uniform(-style.uneven, style.uneven, number))
    spot = canvas.wobble(GRID, rng, rng.uniform(*style.wobble))
    gap = np.sqrt((spot.x - x[:, None, None]) ** 2 + (spot.y - y[:, None, None]) ** 2)
    cover = canvas.ink((gap - radius[:, None, None]).min(axis=0), spot)
    return canvas.blend(_behind(back, style, rng), front, cover)


def _texture(concept: Concept, style: Style, rng: np.random.Generator) -> Array:
    front, back = _pair(concept.colour, style, rng)
    wide = canvas.wobble(GRID, rng, rng.uniform(*style.wobble))
    scale = rng.uniform(0.3, 0.45) * rng.uniform(*style.size) / 0.7
    centre = rng.uniform(-0.3, 0.3, 2)
    turn = rng.uniform(-style.turn, style.turn)
    spot = canvas.place(wide, (centre[0], centre[1]), scale, turn)
    return canvas.blend(canvas.plain(back), front, PATTERNS[concept.name](spot, rng))


def _terrain(concept: Concept, style: Style, rng: np.random.Generator) -> Array:
    return paint_ground(concept.name, rng, rng.uniform(-style.turn, style.turn))


_PAINTERS: dict[str, Callable[[Concept, Style, np.random.Generator], Array]] = {
    "glyph": _glyph,
    "shape": _figure,
    "thing": _figure,
    "sign": _sign,
    "count": _count,
    "texture": _texture,
    "terrain": _terrain,
}


def picture(concept: Concept, style: Style, rng: np.random.Generator) -> canvas.Picture:
    """The scene as bytes (32, 32, 3)."""
    return canvas.finish(weather(_PAINTERS[concept.kind](concept, style, rng), style, rng))


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


def draw_concept(concept: Concept, task: str, split: str, index: int, seed: int) -> canvas.Picture:
    """One image of a task. Its random numbers depend on nothing but the arguments."""
    words = (seed, zlib.crc32(task.encode()), zlib.crc32(split.encode()), index)
    rng = np.random.default_rng(np.random.SeedSequence(words))
    return picture(concept, STYLES[task], rng)
