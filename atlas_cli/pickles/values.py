"""What a pickle holds besides scalars, text and lists: inert objects and safe dictionaries."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from atlas_cli.pickles.policy import Global


@dataclass(eq=False, slots=True)
class Object:
    """What a pickle would have built by calling a name; inert."""

    made_by: Global | None
    args: tuple[Any, ...] = ()
    state: Any = None
    entries: dict[Any, Any] = field(default_factory=dict)


def entries_of(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """A dict with keys that are quick to compare; a key that can name no tensor is kept apart.

    Hashing what a file chose, say tuples of tuples or colliding integers, could take forever.
    """
    return {_key(key): value for key, value in pairs}


def _key(key: Any) -> Any:
    if type(key) is int and abs(key) < 2**63:
        return str(key)
    return key if isinstance(key, str) else object()
