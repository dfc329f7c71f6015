"""What two files differ in, and which of it is allowed.

A file of allowed differences is a list in YAML. An entry has a pattern, or several, of CASE/FIELD
or CASE/files/NAME, and a reason. As it stands, anything may differ there. With `form`, `old` or
`new` it allows less: both sides are brought into that form, what `old` and `new` say is replaced in
the text of before and after, and then both have to be equal. `only: after` is for what was not
there before. All entries that fit a difference are used together:

    - where: "fit*/files/*/result.json"
      why: accuracies are in percent
      form: percent
      new: {'^unit = "percent"\n': ""}
"""

from __future__ import annotations

import difflib
import fnmatch
import importlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forms import FORMS

KEYS = {"where", "why", "only", "form", "old", "new"}
SIDES = ("before", "after")


@dataclass
class Entry:
    """A reason why something may differ, and how far."""

    where: Sequence[str]
    why: str
    only: str = ""
    form: str = ""
    old: Mapping[str, str] = field(default_factory=dict)
    new: Mapping[str, str] = field(default_factory=dict)
    used: int = 0

    def allows(self, old: Any, new: Any) -> bool:
        """Whether two values may differ as they stand."""
        if self.only:
            return old is None if self.only == "after" else new is None
        return not (self.form or self.old or self.new)


def compare(first: Path, second: Path, allowed: Path | None) -> int:
    """Print every difference, and what is allowed in vain; 1 if there is either."""
    entries = read_allowed(allowed) if allowed else []
    known, unknown = 0, 0
    before, after = (_flat(json.loads(path.read_text("utf-8"))) for path in (first, second))
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if old == new:
            continue
        fitting = [entry for entry in entries if entry_fits(entry, name)]
        left = list(difference(old, new, fitting))
        if not left:
            known += 1
            continue
        unknown += 1
        reasons = "".join(f"  (beside: {entry.why})" for entry in fitting)
        print(f"{name}{reasons}", *(f"    {line}" for line in left), sep="\n")
    idle = [entry for entry in entries if not entry.used]
    for entry in idle:
        print(f"allowed in vain: {', '.join(entry.where)} ({entry.why})")
    print(f"{unknown} differences" + (f", and {known} that are allowed" if known else ""))
    return int(unknown > 0 or bool(idle))


def entry_fits(entry: Entry, name: str) -> bool:
    """Whether an entry is about a field of a case."""
    return any(name == glob or fnmatch.fnmatchcase(name, glob) for glob in entry.where)


def difference(old: Any, new: Any, entries: Sequence[Entry]) -> Iterator[str]:
    """The lines in which two values differ beyond what is allowed."""
    free = [entry for entry in entries if entry.allows(old, new)]
    if free:
        free[0].used += 1
        return
    texts = [value if isinstance(value, str) else None for value in (old, new)]
    if entries and None not in texts:
        old, new = _rewritten(str(old), str(new), entries)
    if old != new:
        yield from _both(old, new)


def _rewritten(old: str, new: str, entries: Sequence[Entry]) -> tuple[str, str]:
    """Both texts after all that entries allow. An entry that changes one of them is used."""
    if wanted := [form for form in FORMS if form in {entry.form for entry in entries}]:
        form = FORMS[wanted[-1]]
        old, new = form(old, True), form(new, False)
    for entry in entries:
        changed = _replaced(old, entry.old), _replaced(new, entry.new)
        entry.used += bool(entry.form) or changed != (old, new)
        old, new = changed
    return old, new


def _replaced(text: str, table: Mapping[str, str]) -> str:
    for pattern, instead in table.items():
        text = re.sub(pattern, instead, text, flags=re.MULTILINE)
    return text


def read_allowed(path: Path) -> list[Entry]:
    """The entries of a file, checked."""
    found = importlib.import_module("yaml").safe_load(path.read_text("utf-8")) or []
    entries = []
    for one in found:
        where = one.get("where")
        where = [where] if isinstance(where, str) else where
        if not where or not one.get("why") or one.keys() - KEYS:
            raise SystemExit(f"{path}: expected {', '.join(sorted(KEYS))}, found {one}")
        if one.get("form", "json") not in FORMS or one.get("only", "after") not in SIDES:
            raise SystemExit(f"{path}: expected {', '.join((*FORMS, *SIDES))}, found {one}")
        entries.append(Entry(**{**one, "where": where}))
    return entries


def _flat(found: Mapping[str, Any]) -> dict[str, Any]:
    """CASE/FIELD -> value, and CASE/files/NAME -> text of the file, or digest."""
    contents = found.get("contents", {})
    flat = {f"metadata/{key}": value for key, value in found["metadata"].items()}
    for name, entry in found["cases"].items():
        for key, value in entry.items():
            if key == "files":
                files = {f"{name}/files/{file}": digest for file, digest in value.items()}
                flat |= {file: contents.get(digest, digest) for file, digest in files.items()}
            else:
                flat[f"{name}/{key}"] = value
    return flat


def _both(old: Any, new: Any) -> Iterator[str]:
    if isinstance(old, str) and isinstance(new, str) and "\n" in old + new:
        lines = difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=0)
        yield from itertools.islice(lines, 2, None)
    else:
        yield f"- {old!r}"
        yield f"+ {new!r}"
