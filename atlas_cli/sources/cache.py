"""What atlas can compute again: where it is kept, and what is known of files seen before.

Digests are kept with the place, the size and the times of their files. No result depends on it:
an entry that is missing, damaged or of other files is computed again, and one that cannot be
written is not kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from atlas_cli.io.files import whole_file

_SETTLED = 2.0  # seconds; the coarsest clock that a file system keeps
_HEXADECIMAL = re.compile(r"[0-9a-f]+")
SHA256, XXH3 = 64, 32  # hexadecimal digits of a digest


def cache_folder() -> Path:
    """Where atlas keeps what it can compute again: ATLAS_CACHE, or the user's cache folder."""
    if chosen := os.environ.get("ATLAS_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "atlas"


@dataclass(frozen=True)
class Known:
    """What is remembered of a file or of a block: its digest in hexadecimal, and its norm."""

    digest: str
    norm: float = 0.0

    def is_sound(self, digits: int) -> bool:
        """Whether it can have been written here, with a digest of so many digits."""
        number = type(self.norm) is float and math.isfinite(self.norm) and self.norm >= 0
        return number and len(self.digest) == digits and bool(_HEXADECIMAL.fullmatch(self.digest))


@dataclass(frozen=True)
class Sighting:
    """Files as they were at a moment: path, device, inode, size and both times of each.

    `settled` says whether all were old enough then for any later change to show in a time. It is
    False, and there are no files, if one of them could not be looked at.
    """

    files: tuple[tuple[str | int, ...], ...]
    settled: bool


def sight(paths: Sequence[Path]) -> Sighting:
    """Look at files, before they are read."""
    now = time.time_ns()
    try:
        seen = [(str(path.resolve()), path.stat()) for path in paths]
    except (OSError, RuntimeError):  # a loop of links
        return Sighting((), settled=False)
    youngest = max(max(status.st_mtime_ns, status.st_ctime_ns) for _, status in seen)
    files = tuple(
        (path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        for path, status in seen
    )
    return Sighting(files, settled=now - youngest > _SETTLED * 1e9)


def recall(
    what: str, sighting: Sighting, names: Collection[str], digits: int = SHA256
) -> dict[str, Known]:
    """What was remembered of the same files under each of the names; empty if not all is there."""
    try:
        found = json.loads(_entry(what, sighting).read_text("utf-8"))
        same = found["files"] == [list(file) for file in sighting.files] != []
        known = {name: Known(*found["known"][name]) for name in names}
        sound = all(one.is_sound(digits) for one in known.values())
    except (OSError, RuntimeError, ValueError, LookupError, TypeError):
        return {}
    return known if same and sound else {}


def remember(what: str, sighting: Sighting, known: Mapping[str, Known]) -> None:
    """Keep what is known for the next time, if the files have not changed since the sighting."""
    files = [Path(str(file[0])) for file in sighting.files]
    if not sighting.settled or sight(files).files != sighting.files:
        return
    lines = {name: (one.digest, one.norm) for name, one in known.items()}
    text = json.dumps({"files": sighting.files, "known": lines}, sort_keys=True)
    with contextlib.suppress(OSError, RuntimeError):
        entry = _entry(what, sighting)
        entry.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(entry) as temporary:
            temporary.write_text(text, "utf-8")


def _entry(what: str, sighting: Sighting) -> Path:
    """One file for the same files under whatever sizes and times: a new digest replaces an old."""
    key = json.dumps([what, [file[0] for file in sighting.files]])
    return cache_folder() / "digests" / f"{hashlib.sha256(key.encode()).hexdigest()}.json"
