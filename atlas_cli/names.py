"""What a task is called, and by which name it is known again."""

from __future__ import annotations

import re
from pathlib import Path

from atlas_cli.data import Dataset

_SPLIT = re.compile(r"(val|valid|validation|train|test)$")


def task_name(dataset: Dataset) -> str:
    """What a task is called: the name of its folder, of its table or of the built-in task."""
    name = Path(dataset.name.removeprefix("csv:")).stem
    return dataset.drawn or name or dataset.root.resolve().name


def plain_name(name: str) -> str:
    """A name by which the same task is known: small letters, and no word for a split at its end."""
    return _SPLIT.sub("", re.sub(r"[^a-z0-9]", "", name.lower()))
