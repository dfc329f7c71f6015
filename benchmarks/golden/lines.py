"""Words that many command lines have in common."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from running import Case, case

ROOM = "--memory 8GB --threads 1"  # this process is in the budget
TINY = "--model builtin:tiny --threads 1"
QUICK = "--shots 2 --epochs 2 --min-steps 2 --batch-size 20 --augment none"
TWO = "--vectors builtin:textures builtin:signs"


def listed(group: str, common: str, table: Mapping[str, str], **more: Any) -> Iterator[Case]:
    """A case for each line of a table, with what is common to all and a folder to write."""
    for name, line in table.items():
        filled = line.replace("@", f"out/{group}-{name.replace(' ', '-')}")
        yield case(f"{group} {name}", f"{filled} {common}", **more)


def alone(cases: Iterable[Case]) -> Iterator[Case]:
    """Cases that meet nothing that others have written by mistake."""
    for one in cases:
        for path in (*Path("out").glob("x*"), Path("nowhere")):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        yield one


def lines_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line]


def as_yaml(found: Mapping[str, Any]) -> str:
    return json.dumps(found).replace("Infinity", ".inf")
