"""The zoo: published fine-tuned models that become task vectors, by short names."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atlas_cli.errors import UsageError, nearest
from atlas_cli.recipes.text import parse_mapping

ZOO = "zoo:"
_OURS = Path(__file__).parent / "zoo.yaml"
_NEEDED = ("base", "repository", "format", "tasks")
_KNOWN = {*_NEEDED, "of", "file", "licence", "megabytes", "source"}


@dataclass(frozen=True)
class ZooEntry:
    """The fine-tuned model of one task: where it is, and what is known of it."""

    set: str
    task: str
    base: str
    repository: str
    file: str | None
    format: str
    licence: str | None
    megabytes: float | None
    source: str

    @property
    def name(self) -> str:
        """What names this entry alone."""
        return f"{ZOO}{self.set}/{self.task}"

    @property
    def address(self) -> str:
        """Where the model is on the Hub, or in a file or folder of the user's own."""
        return "/".join(filter(None, (self.repository, self.file)))


def user_file() -> Path:
    """Where users add sets of their own."""
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(home) / "atlas" / "zoo.yaml"


def read_zoo() -> dict[str, tuple[ZooEntry, ...]]:
    """Every set by its name: those of atlas, then those of the user, which may replace them."""
    sets = _tables(_OURS)
    places = dict.fromkeys(sets, _OURS)
    own = user_file()
    if own.is_file():
        found = _tables(own)
        sets |= found
        places |= dict.fromkeys(found, own)
    return {name: tuple(_entries(name, sets, places[name])) for name in sets}


def find_entries(text: str) -> tuple[ZooEntry, ...]:
    """The entries of zoo:SET, or the one of zoo:SET/TASK."""
    name, zoo = text.removeprefix(ZOO), read_zoo()
    if name in zoo:
        return zoo[name]
    part, _, task = name.rpartition("/")
    entries = {entry.task: entry for entry in zoo.get(part, ())}
    if task in entries:
        return (entries[task],)
    if entries:
        listed = ", ".join(entries)
        raise UsageError(f"unknown task '{text}'{nearest(task, entries)} ({part} has: {listed})")
    listed = ", ".join(f"{ZOO}{one}" for one in zoo)
    raise UsageError(f"unknown set '{text}'{nearest(name, zoo)} (there are: {listed})")


# Reading --------------------------------------------------------------------------------------


def _tables(path: Path) -> dict[str, Mapping[str, Any]]:
    """The sets of a file. Raises UsageError for what is no table of sets."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise UsageError(f"{path}: cannot be read as UTF-8 text") from problem
    found = parse_mapping(text, str(path)).get("sets")
    if not isinstance(found, dict) or not all(isinstance(one, dict) for one in found.values()):
        raise UsageError(f"{path}: expected the key 'sets' with keys and values for every set")
    return {str(name): one for name, one in found.items()}


def _entries(name: str, sets: Mapping[str, Mapping[str, Any]], path: Path) -> Iterator[ZooEntry]:
    table = _whole(name, sets, path)
    where = f"{path}: {name}"
    if unknown := [key for key in table if key not in _KNOWN]:
        raise UsageError(f"{where}: unknown key '{unknown[0]}'{nearest(unknown[0], _KNOWN)}")
    if missing := [key for key in _NEEDED if not table.get(key)]:
        raise UsageError(f"{where}: key '{missing[0]}' is missing")
    tasks, size = table["tasks"], table.get("megabytes")
    if not isinstance(tasks, list) or not all(isinstance(task, str) for task in tasks):
        raise UsageError(f"{where}: tasks: expected a list of names")
    if len(set(tasks)) < len(tasks):
        raise UsageError(f"{where}: tasks: a task is listed twice")
    if size is not None and not isinstance(size, int | float):
        raise UsageError(f"{where}: megabytes: expected a number")
    for task in tasks:
        yield ZooEntry(
            set=name,
            task=task,
            base=str(table["base"]),
            repository=str(table["repository"]).replace("{task}", task),
            file=str(table["file"]).replace("{task}", task) if table.get("file") else None,
            format=str(table["format"]),
            licence=str(table["licence"]) if table.get("licence") else None,
            megabytes=float(size) if size is not None else None,
            source=str(table.get("source") or path),
        )


def _whole(name: str, sets: Mapping[str, Mapping[str, Any]], path: Path) -> dict[str, Any]:
    """A set with what it takes from another."""
    seen: list[str] = []
    table: dict[str, Any] = {}
    current: object = name
    while current is not None:
        if current in seen or not isinstance(current, str) or current not in sets:
            raise UsageError(f"{path}: {name}: of: there is no other set '{current}'")
        seen.append(current)
        table = {**sets[current], **table}
        current = sets[current].get("of")
    return {key: value for key, value in table.items() if key != "of"}
