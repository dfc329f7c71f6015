"""The cache folder, and in it the digests of files that were hashed before.

An entry holds the path, size and times of its files. No result depends on the cache: a digest whose
entry is missing, damaged or of other files is computed again, and an entry that cannot be written
is skipped.
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
    """ATLAS_CACHE, or `atlas` in the user's cache folder. Everything in it can be deleted."""
    if chosen := os.environ.get("ATLAS_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "atlas"


@dataclass(frozen=True)
class CachedDigest:
    """The digest of a file or of a block in hexadecimal, and the norm of a block."""

    digest: str
    norm: float = 0.0

    def is_sound(self, digits: int) -> bool:
        """Whether the values are ones that atlas writes, with a digest of so many digits."""
        number = type(self.norm) is float and math.isfinite(self.norm) and self.norm >= 0
        return number and len(self.digest) == digits and bool(_HEXADECIMAL.fullmatch(self.digest))


@dataclass(frozen=True)
class FileStats:
    """Path, device, inode, size and both times of some files, at one moment.

    `settled` says whether all files were old enough that any later change shows in their times.
    If one of them cannot be looked at, `files` is empty and `settled` is False.
    """

    files: tuple[tuple[str | int, ...], ...]
    settled: bool


def stat_files(paths: Sequence[Path]) -> FileStats:
    """The stats of files; to be taken before the files are read."""
    now = time.time_ns()
    try:
        seen = [(str(path.resolve()), path.stat()) for path in paths]
    except (OSError, RuntimeError):  # a loop of links
        return FileStats((), settled=False)
    youngest = max(max(status.st_mtime_ns, status.st_ctime_ns) for _, status in seen)
    files = tuple(
        (path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        for path, status in seen
    )
    return FileStats(files, settled=now - youngest > _SETTLED * 1e9)


def load_digests(
    what: str, stats: FileStats, names: Collection[str], digits: int = SHA256
) -> dict[str, CachedDigest]:
    """The cached digests of unchanged files under each of the names; empty unless all are there."""
    try:
        found = json.loads(_entry(what, stats).read_text("utf-8"))
        same = found["files"] == [list(file) for file in stats.files] != []
        digests = {name: CachedDigest(*found["known"][name]) for name in names}
        sound = all(one.is_sound(digits) for one in digests.values())
    except (OSError, RuntimeError, ValueError, LookupError, TypeError):
        return {}
    return digests if same and sound else {}


def save_digests(what: str, stats: FileStats, digests: Mapping[str, CachedDigest]) -> None:
    """Cache digests, unless the files have changed since their stats were taken."""
    files = [Path(str(file[0])) for file in stats.files]
    if not stats.settled or stat_files(files).files != stats.files:
        return
    lines = {name: (one.digest, one.norm) for name, one in digests.items()}
    text = json.dumps({"files": stats.files, "known": lines}, sort_keys=True)
    with contextlib.suppress(OSError, RuntimeError):
        entry = _entry(what, stats)
        entry.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(entry) as temporary:
            temporary.write_text(text, "utf-8")


def _entry(what: str, stats: FileStats) -> Path:
    """The entry of these paths, whatever the sizes and times: a new digest replaces an old one."""
    key = json.dumps([what, [file[0] for file in stats.files]])
    return cache_folder() / "digests" / f"{hashlib.sha256(key.encode()).hexdigest()}.json"
