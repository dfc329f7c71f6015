"""The vocabulary: everything that can be drawn, by name, and the concept behind every class."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Concept:
    """What a picture shows. Without a colour, any colour will do."""

    kind: str
    name: str
    colour: str = ""
    symbol: str = ""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


DIGITS = tuple("0123456789")
LETTERS = tuple("ABCDEFGHJKLMNPRSTUXY")
COUNTS = ("one", "two", "three", "four", "five", "six", "seven", "eight")
SHAPES = _words("circle square triangle diamond hexagon star ring plus heart crescent")
THINGS = _words(
    "fish house tree boat car cat bird mushroom key cup umbrella flower hammer bottle "
    "butterfly airplane"
)
TEXTURES = _words(
    "striped checkered dotted zigzagged wavy grid woven spiralled blotchy speckled cracked bubbly"
)
TERRAINS = (
    "a forest",
    "a river",
    "a highway",
    "crop fields",
    "houses",
    "a lake",
    "a beach",
    "a desert",
    "an orchard",
    "factories",
)
COLOURS = _words("red orange yellow green blue purple pink brown black white")
PLATES = ("circle", "square", "triangle", "diamond")
SYMBOLS = ("bar", "dot", "cross", "arrow", "exclamation mark")
SIGNS = (
    "red circle with a bar",
    "red circle with a cross",
    "red triangle with an exclamation mark",
    "white circle with a cross",
    "blue circle with an arrow",
    "blue circle with a dot",
    "blue square with a cross",
    "blue square with an arrow",
    "yellow diamond with a dot",
    "yellow diamond with an exclamation mark",
    "yellow triangle with an arrow",
    "green square with a bar",
)


def sign(phrase: str) -> Concept:
    """The sign that a phrase such as "red circle with a bar" describes."""
    colour, shape, _, _, symbol = phrase.split(" ", 4)
    return Concept("sign", shape, colour, symbol)


def dots(count: str) -> str:
    """The phrase for this many dots."""
    return f"{count} dot" if count == "one" else f"{count} dots"


def _all(kind: str, names: tuple[str, ...]) -> dict[str, Concept]:
    return {name: Concept(kind, name) for name in names}


def _control() -> dict[str, Concept]:
    """Some of every kind, each with the article or noun that makes it a phrase."""
    coloured = "red circle,blue square,yellow star,green triangle,purple heart,black ring"
    pairs = [phrase.split() for phrase in coloured.split(",")]
    return {
        **{f"the number {name}": Concept("glyph", name) for name in "03478"},
        **{f"the letter {name}": Concept("glyph", name) for name in "AHKST"},
        **{f"a {colour} {name}": Concept("shape", name, colour) for colour, name in pairs},
        **{dots(name): Concept("count", name) for name in ("two", "four", "seven")},
        **{f"a {phrase}": sign(phrase) for phrase in (SIGNS[2], SIGNS[4], SIGNS[11])},
        **{f"a {name} texture": Concept("texture", name) for name in TEXTURES[::2]},
        **_all("terrain", TERRAINS[:3] + TERRAINS[6:9]),
        **{f"a {name}": Concept("thing", name) for name in ("fish", "house", "tree", "cat")},
        **{"an airplane": Concept("thing", "airplane"), "a key": Concept("thing", "key")},
    }


CLASSES: dict[str, dict[str, Concept]] = {
    "digits": _all("glyph", DIGITS),
    "letters": _all("glyph", LETTERS),
    "house_numbers": _all("glyph", DIGITS),
    "signs": {phrase: sign(phrase) for phrase in SIGNS},
    "textures": _all("texture", TEXTURES),
    "terrain": _all("terrain", TERRAINS),
    "counts": {dots(name): Concept("count", name) for name in COUNTS},
    "silhouettes": _all("thing", THINGS),
    "everything": _control(),
}
