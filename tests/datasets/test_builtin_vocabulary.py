"""Every name in the vocabulary can be drawn, and nothing else can."""

from __future__ import annotations

import numpy as np

from atlas_cli.datasets.builtin import concepts, glyphs, ground, outlines, patterns, scenes
from atlas_cli.datasets.builtin.styles import STYLES, Style


def test_every_word_has_a_drawing_and_every_drawing_a_word() -> None:
    assert set(concepts.DIGITS) == set(glyphs.DIGITS)
    assert set(concepts.LETTERS) == set(glyphs.LETTERS)
    assert set(concepts.SHAPES) == set(outlines.SHAPES)
    assert set(concepts.THINGS) == set(outlines.THINGS)
    assert set(concepts.SYMBOLS) == set(outlines.SYMBOLS)
    assert set(concepts.TEXTURES) == set(patterns.PATTERNS)
    assert set(concepts.TERRAINS) == set(ground.TERRAINS)
    assert set(concepts.COLOURS) == set(scenes.COLOURS)


def test_every_task_has_a_style() -> None:
    assert list(STYLES) == list(concepts.CLASSES)


def test_a_sign_is_read_from_its_phrase() -> None:
    found = concepts.sign("red triangle with an exclamation mark")
    assert found == concepts.Concept("sign", "triangle", "red", "exclamation mark")


def test_a_count_shows_that_many_dots() -> None:
    style = Style(palette="chalk", uneven=0.0, noise=(0.0, 0.0), blur=(0.0, 0.0))
    for number, name in enumerate(concepts.COUNTS, start=1):
        image = scenes.picture(
            concepts.Concept("count", name), style, np.random.default_rng(number)
        )
        assert _islands(image[:, :, 0] > 128) == number


def _islands(mask: np.ndarray) -> int:
    """How many connected regions a mask has."""
    left, count = {(int(y), int(x)) for y, x in np.argwhere(mask)}, 0
    while left:
        count += 1
        edge = [left.pop()]
        while edge:
            y, x = edge.pop()
            near = {(y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)} & left
            left -= near
            edge.extend(near)
    return count
