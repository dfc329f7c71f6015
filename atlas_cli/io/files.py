"""Files: read where others named them, written whole or not at all, locked, and told by digests.

Models, indexes, archives and answers of the Hub name files. Every such name goes through `inside`.
Digests are cached with the path, size and times of their files. No result depends on the cache: a
digest whose entry is missing, damaged or of other files is computed again, and an entry that cannot
be written is skipped.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import Any

from atlas_cli.errors import AtlasError, CheckpointError

try:
    import fcntl
except ImportError:  # Windows has no flock: two writers of one folder go unnoticed there
    fcntl = None  # type: ignore[assignment]

OPEN = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0)
LOCK = ".atlas.lock"
_MOST = 1 << 30  # bytes of a file that is read at once
STALE = 60.0  # seconds for which nobody has written a temporary file that nobody holds


# Reading --------------------------------------------------------------------------------------


def inside(folder: Path, name: object, where: str) -> Path:
    """The file of that name in a folder. Raises CheckpointError if it leads out, also by links.

    A snapshot in the cache of the Hub's client links to the blobs of its repository, which count
    as inside.
    """
    if not is_plain(name):
        raise CheckpointError(f"{where}: names a file outside its folder: {name}")
    path = folder / str(name)
    found = Path(os.path.realpath(path))
    if not any(found.is_relative_to(home) for home in _homes(folder)):
        raise CheckpointError(
            f"{where}: {name} is a link out of its folder; put a copy of the file in its place"
        )
    return path


def is_plain(name: object) -> bool:
    """Whether a text can name a file below a folder: relative, without `..`, printable."""
    if not isinstance(name, str) or not name or "\\" in name or not name.isprintable():
        return False
    path = PurePosixPath(name)
    if len(name) > 1000 or any(len(part) > 200 for part in path.parts):
        return False
    return not path.is_absolute() and ".." not in path.parts and not Path(name).drive


def _homes(folder: Path) -> list[Path]:
    home = Path(os.path.realpath(folder))
    snapshots = next((path for path in home.parents if path.name == "snapshots"), None)
    return [home, snapshots.parent / "blobs"] if snapshots else [home]


def copy_folder(source: Path, target: Path, where: str) -> None:
    """Copy a folder with all that is in it, links as what they lead to, which has to be inside."""
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source).as_posix()
        if not inside(source, name, where).is_dir():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            copy_file(path, target / name)


def copy_file(source: Path, target: Path) -> None:
    """Copy the bytes of a regular file."""
    with open_regular(source) as file, target.open("wb") as copy:
        shutil.copyfileobj(file, copy)


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file to read it. A pipe or a device, which might never answer, is an error."""
    handle = os.open(path, os.O_RDONLY | _AT_ONCE)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(0, "is not a regular file", str(path))
    return os.fdopen(handle, "rb")


_AT_ONCE = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def read_regular(path: Path, limit: int = _MOST) -> bytes:
    """The bytes of a regular file, unless there are more than a limit."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > limit:
            raise OSError(0, f"is larger than {limit / 1e6:,.0f} MB", str(path))
        return file.read(limit)


# Writing --------------------------------------------------------------------------------------


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` that takes its name at the end, or vanishes on an error.

    What a run that was killed left of an earlier one is removed first.
    """
    prefix, suffix = f".{path.name}.atlas-", ".part"
    sweep_files(path.parent, lambda name: name.startswith(prefix) and name.endswith(suffix))
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=prefix, suffix=suffix)
    temporary = Path(name)
    try:
        if not hold(handle):  # Windows renames no open file
            os.close(handle)
            handle = -1
        yield temporary
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
        if handle >= 0:
            os.close(handle)


def hold(handle: int) -> bool:
    """Lock a file for this process, as long as the handle is open; whether that was possible."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def sweep_files(folder: Path, is_ours: Callable[[str], object]) -> None:
    """Remove temporary files of ours that are old and that no process holds."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in filter(lambda entry: is_ours(entry.name), entries):
            with contextlib.suppress(OSError):
                handle = os.open(entry.path, OPEN & ~os.O_CREAT)
                try:
                    old = time.time() - os.fstat(handle).st_mtime > STALE
                    if old and hold(handle):
                        Path(entry.path).unlink()
                finally:
                    os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_text(path: Path, text: str) -> None:
    """Write a text file, or say in one line why it cannot be written."""
    try:
        with whole_file(path) as temporary:
            # Bytes of file names that are no UTF-8 become escapes, which JSON and YAML read back.
            temporary.write_text(text, "utf-8", "backslashreplace")
    except OSError as problem:
        raise AtlasError(f"{path}: cannot be written: {problem.strerror}") from problem


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait until no other process holds this lock, and hold it meanwhile."""
    with path.open("a") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


class FolderLock:
    """One folder, one writer: a file with process and host, locked as long as that process lives.

    A lock whose process has ended on this host is stale and taken over.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        self._handle: int | None = None

    def take(self) -> None:
        """Lock the folder until `release`, or until the process ends. Raises AtlasError."""
        handle = os.open(self._path, OPEN, 0o666)
        same = False
        try:
            self._refuse_others(handle)
            same = self._path.exists() and os.path.samestat(os.fstat(handle), self._path.stat())
            os.ftruncate(handle, 0)
            os.lseek(handle, 0, os.SEEK_SET)
            os.write(handle, f"{os.getpid()} {platform.node()}\n".encode())
        except (AtlasError, OSError):
            with contextlib.suppress(OSError):
                self._path.unlink() if same else None  # an empty lock would stay for good
            os.close(handle)
            raise
        if not same:  # removed by its last holder, between opening and locking it here
            os.close(handle)
            self.take()
        else:
            self._handle = handle

    def check(self) -> None:
        """Raise AtlasError if another process has locked the folder; remove a stale lock."""
        with contextlib.suppress(FileNotFoundError):
            handle = os.open(self._path, OPEN & ~os.O_CREAT)
            try:
                self._refuse_others(handle)
                if fcntl is not None:
                    self._path.unlink()
            finally:
                os.close(handle)

    def _refuse_others(self, handle: int) -> None:
        if not stat.S_ISREG(os.fstat(handle).st_mode):  # to read from a pipe is to wait
            raise AtlasError(f"{self._path}: is in the way, and is no file; remove it")
        free = hold(handle) or fcntl is None
        process, _, host = os.read(handle, 300).decode("utf-8", "replace").strip().partition(" ")
        here = host in ("", platform.node())
        if free and (here or not process.isdigit()):
            return
        raise AtlasError(
            f"{self._path.parent}: process {process} on {host} writes it; wait until that has "
            f"ended{'' if here else f', or remove {self._path} if it has'}"
        )

    def release(self) -> None:
        """Let others write the folder."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
            os.close(handle)


# Digests --------------------------------------------------------------------------------------

_WINDOW = 1 << 18  # bytes of a file that are hashed at a time: they stay in the cache of a core
_SETTLED = 2.0  # seconds; the coarsest clock that a file system keeps
_HEXADECIMAL = re.compile(r"[0-9a-f]+")
SHA256, XXH3 = 64, 32  # hexadecimal digits of a digest


def sha256_of(path: Path) -> str:
    """The sha256 of a file's bytes, in hexadecimal."""
    return _hashed(path, hashlib.sha256())


def blake3_of(path: Path) -> str:
    """The BLAKE3 of a file's bytes, in hexadecimal.

    Several files are hashed at a time, each by one thread: threads that share a file cost more.
    """
    from blake3 import blake3

    return _hashed(path, blake3())


def _hashed(path: Path, found: Any) -> str:
    try:
        # Read, not mapped: a mapped file that another program cuts short ends this one.
        with open_regular(path) as file:
            room = memoryview(bytearray(min(_WINDOW, os.fstat(file.fileno()).st_size)))
            while count := file.readinto(room):
                found.update(room[:count])
    except OSError as problem:
        raise CheckpointError(f"{path}: cannot be read: {problem.strerror}") from problem
    return str(found.hexdigest())


DIGESTS = {"blake3": blake3_of, "sha256": sha256_of}  # kinds; all have 64 digits


def named_sha256(path: Path) -> str | None:
    """The sha256 that the Hub's cache has named a file by; None for any other file.

    The cache holds links from a snapshot to blobs, and names those of large files by their sha256.
    """
    if path.is_symlink():
        blob = path.resolve()
        if blob.parent.name == "blobs" and re.fullmatch("[0-9a-f]{64}", blob.name):
            return blob.name
    return None


def digest_kind(path: Path) -> str:
    """The kind of digest that is quickest to come by."""
    return "sha256" if named_sha256(path) else "blake3"


def digest_of(path: Path, kind: str) -> str:
    """A digest of a file, from the name or from the cache if it is known."""
    if kind == "sha256" and (known := named_sha256(path)):
        return known
    what = "files" if kind == "sha256" else f"{kind} of files"
    stats = stat_files([path])
    found = load_digests(what, stats, [path.name])
    if not found:
        found = {path.name: CachedDigest(DIGESTS[kind](path))}
        save_digests(what, stats, found)
    return found[path.name].digest


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
        found = json.loads(read_regular(_entry(what, stats)))
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
