"""What pre-training shows and says: any concept of the vocabulary, and captions for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from atlas_cli.datasets.builtin.concepts import (
    COLOURS,
    COUNTS,
    DIGITS,
    LETTERS,
    PLATES,
    SHAPES,
    SYMBOLS,
    TERRAINS,
    TEXTURES,
    THINGS,
    Concept,
    dots,
)

if TYPE_CHECKING:
    import numpy as np

_NAMES = {
    "glyph": (*DIGITS, *LETTERS),
    "shape": SHAPES,
    "sign": PLATES,
    "count": COUNTS,
    "texture": TEXTURES,
    "terrain": TERRAINS,
    "thing": THINGS,
}
_KINDS = ("glyph", "glyph", "glyph", "shape", "sign", "count", "texture", "terrain", "thing")
_FRAMES = ("a photo of {}.", "a picture of {}.", "a drawing of {}.", "{}.", "{}")
_FROM_ABOVE = ("an aerial photo of {}.", "a satellite image of {}.", "{} from above.")


def one_of(choices: Sequence[str], rng: np.random.Generator) -> str:
    """One of the choices, each as likely as the next."""
    return choices[int(rng.random() * len(choices))]


def any_concept(rng: np.random.Generator) -> Concept:
    """Anything the world can draw; all but the ground in a colour of its own."""
    kind = one_of(_KINDS, rng)
    name = one_of(_NAMES[kind], rng)
    colour = "" if kind == "terrain" else one_of(COLOURS, rng)
    return Concept(kind, name, colour, one_of(SYMBOLS, rng) if kind == "sign" else "")


def say(shown: Concept, rng: np.random.Generator) -> tuple[str, Concept]:
    """A caption for a concept, and the concept as far as the caption tells it."""
    keeps_colour = shown.kind == "sign" or rng.random() < 0.4
    told = shown if keeps_colour else replace(shown, colour="")
    above = shown.kind == "terrain" and rng.random() < 0.6
    frame = one_of(_FROM_ABOVE if above else _FRAMES, rng)
    return frame.format(_phrase(told, rng)), told


def _phrase(told: Concept, rng: np.random.Generator) -> str:
    if told.kind == "glyph":
        return _glyph_phrase(told, rng)
    if told.kind == "sign":
        lead = one_of(("a", "a", "a road sign, a"), rng)
        article = "an" if told.symbol[0] in "ae" else "a"
        return f"{lead} {told.colour} {told.name} with {article} {told.symbol}"
    if told.kind == "terrain":
        return told.name
    if told.kind == "count":
        return dots(told.name).replace(" ", f" {told.colour} " if told.colour else " ")
    words = f"{told.colour} {told.name}".strip()
    if told.kind == "texture":
        return f"a {words} {one_of(('texture', 'pattern'), rng)}"
    return ("an " if words[0] in "aou" and rng.random() < 0.5 else "a ") + words


def _glyph_phrase(told: Concept, rng: np.random.Generator) -> str:
    how = one_of(("", "", "handwritten", "printed"), rng)
    noun, place = "letter", ""
    if told.name in DIGITS:
        noun = one_of(("number", "digit"), rng)
        place = one_of(("", "", "", "on a house", "on a wall"), rng)
    words = ("the", told.colour, how, noun, told.name, place)
    return " ".join(word for word in words if word)
