"""How pictures of each task are drawn: the hand, the background, the light, the lens, the grain.

A style says how far a picture is from the clean pictures of pre-training. Tasks share shifts of
style, as real datasets do, so that learning one task can help with another.
"""

from __future__ import annotations

from dataclasses import dataclass

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
