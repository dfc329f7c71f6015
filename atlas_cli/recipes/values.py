"""Values that recipes write as text, such as 2GiB, 0.9:1 or l2:0.01, and their parsers."""

from __future__ import annotations

import math
import re

_UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(text: str) -> int | None:
    """A size in bytes from text such as 2GiB, 500MB or 1000; None if the text is not a size."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.lower())
    return int(float(found[1]) * _UNITS[found[2]]) if found and found[2] in _UNITS else None


def parse_shots(text: str | int | float) -> int | float | None:
    """Images per class, a fraction of each class, or None for all; 0 if it is none of these."""
    if text == "all":
        return None
    try:
        number = float(text)
    except ValueError:
        return 0
    if 0 < number < 1:
        return number
    return int(number) if number >= 1 and number.is_integer() else 0


def parse_penalty(text: str) -> tuple[int, float]:
    """The order of a norm and its weight; order 0 if the text is not l1:WEIGHT or l2:WEIGHT."""
    found = re.fullmatch(r"l([12]):(\d*\.?\d+(?:e-?\d+)?)", text)
    return (int(found[1]), float(found[2])) if found else (0, 0.0)


def parse_clamp(text: str) -> tuple[float, float] | None:
    """Two bounds from text such as 0:1; None if the text is not LOW:HIGH."""
    low, _, high = text.partition(":")
    try:
        found = float(low), float(high)
    except ValueError:
        return None
    return found if found[0] < found[1] else None


def parse_schedule(text: str) -> tuple[float, float] | None:
    """START and END within 0 and 1 from text such as 0.9:1; 0.9 alone is both. None if neither."""
    start, _, end = text.partition(":")
    try:
        found = float(start), float(end or start)
    except ValueError:
        return None
    return found if all(0 <= value <= 1 for value in found) else None


def parse_shares(text: str) -> list[float] | None:
    """Positive numbers from text such as 0.9,0.1; None if the text is not a list of them."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        return None
    return found if all(0 < share < math.inf for share in found) else None


def parse_individual(text: str) -> tuple[str, float] | None:
    """A data reference and an accuracy between 0 and 1 from DATA=PERCENT; None if it is neither."""
    name, _, percent = text.rpartition("=")
    try:
        found = float(percent) / 100
    except ValueError:
        return None
    return (name, found) if name and 0 < found <= 1 else None


def is_pattern(text: str) -> bool:
    """Whether a text is a regular expression."""
    try:
        re.compile(text)
    except re.error:
        return False
    return True
