"""How each task looks: the style that its classes are drawn in."""

from __future__ import annotations

import zlib

import numpy as np

from atlas_cli.datasets.builtin import TASKS, label_of
from atlas_cli.datasets.builtin.canvas import Picture
from atlas_cli.datasets.builtin.concepts import CLASSES
from atlas_cli.datasets.builtin.scenes import picture
from atlas_cli.datasets.builtin.styles import CLEAN, Style

STYLES: dict[str, Style] = {
    "digits": Style(
        palette="chalk",
        size=(0.45, 0.8),
        turn=0.3,
        slant=0.35,
        wobble=(0.1, 0.28),
        pen=(0.08, 0.2),
        blur=(0.2, 0.8),
    ),
    "letters": Style(
        palette="ink",
        size=(0.45, 0.8),
        turn=0.25,
        slant=0.35,
        wobble=(0.1, 0.28),
        pen=(0.09, 0.2),
        blur=(0.0, 0.6),
        noise=(0.0, 0.12),
    ),
    "house_numbers": Style(
        size=(0.55, 0.75),
        clutter=3,
        neighbours=(1.65, 2.1),
        contrast=(0.4, 0.8),
        shade=0.2,
        cast=0.1,
        blur=(0.2, 0.8),
        noise=(0.05, 0.2),
    ),
    "signs": Style(
        size=(0.55, 0.8),
        offset=0.15,
        turn=0.25,
        slant=0.15,
        clutter=4,
        contrast=(0.4, 0.85),
        shade=0.25,
        cast=0.1,
        blur=(0.2, 0.8),
        noise=(0.05, 0.18),
    ),
    "textures": Style(
        palette="ink",
        turn=0.4,
        size=(0.7, 1.05),
        wobble=(0.03, 0.1),
        contrast=(0.4, 0.8),
        shade=0.25,
        noise=(0.05, 0.2),
    ),
    "terrain": Style(
        turn=0.8,
        dull=(0.3, 0.9),
        contrast=(0.6, 0.9),
        shade=0.2,
        cast=0.1,
        blur=(0.0, 0.4),
        noise=(0.05, 0.2),
    ),
    "counts": Style(
        wobble=(0.03, 0.1),
        uneven=0.2,
        clutter=2,
        contrast=(0.5, 0.85),
        shade=0.2,
        blur=(0.2, 0.8),
        noise=(0.03, 0.15),
    ),
    "silhouettes": Style(
        palette="ink",
        size=(0.55, 0.8),
        offset=0.15,
        turn=0.4,
        slant=0.2,
        wobble=(0.08, 0.2),
        clutter=2,
        shade=0.25,
        noise=(0.03, 0.18),
    ),
    "everything": CLEAN,
}


def draw_image(task: str, split: str, index: int, seed: int) -> Picture:
    """One image of a task, from a stream of its own."""
    name = TASKS[task].classes[label_of(task, split, index)]
    words = (seed, zlib.crc32(task.encode()), zlib.crc32(split.encode()), index)
    rng = np.random.default_rng(np.random.SeedSequence(words))
    return picture(CLASSES[task][name], STYLES[task], rng)
