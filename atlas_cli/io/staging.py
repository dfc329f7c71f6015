"""Folders that appear whole or not at all; one of large files goes on where it was stopped."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from atlas_cli.errors import AtlasError
from atlas_cli.io.files import OPEN, STALE, hold, sweep_files
from atlas_cli.io.journal import JOURNAL, MARK, Piece, Written, intact, read_pieces

try:
    import fcntl
except ImportError:  # Windows has no flock: two merges into one folder go unnoticed there
    fcntl = None  # type: ignore[assignment]

MODEL, _REPLACED = "model", "replaced"
_PART, _OLD = ".part", ".old"  # how names of temporary folders end, and of those they replace
_DISCARDED = re.compile(r"\.atlas-\d+-\d+\.part$")  # the names that `_renamed` gives
_TEMPORARY = re.compile(r"\..+\.atlas-[^.]+\.part")
_WRITTEN = 1 << 16  # bytes at a time; for more, Linux takes large pages, which may be slow to come


@contextmanager
def temporary_folder(folder: Path) -> Iterator[Path]:
    """A new folder beside `folder`, for the caller to rename once it is complete; else it vanishes.

    What a run that was killed left is put right first: a folder that it was about to replace gets
    its name back, and all else is removed.
    """
    _put_right(folder)
    home, prefix = folder.absolute().parent, _prefix(folder)
    temporary = Path(tempfile.mkdtemp(dir=home, prefix=prefix, suffix=_PART))
    handle = None
    try:
        handle = _hold_folder(temporary)
        yield temporary
    finally:
        if handle is not None:
            os.close(handle)  # first: the last descriptor may be needed to remove the folder
        remove(temporary)


def remove(folder: Path) -> None:
    """Remove a folder of ours, as far as possible; one free descriptor is enough."""
    shutil.rmtree(folder, ignore_errors=True)  # which needs a few of them
    for place, _, files in os.walk(folder, topdown=False):
        with contextlib.suppress(OSError):
            for name in files:
                Path(place, name).unlink()
            Path(place).rmdir()


def _prefix(folder: Path) -> str:
    return f".{folder.name}.atlas-"


def _put_right(folder: Path) -> None:
    """Remove or give back what runs that were killed left beside a folder."""
    for path in folder.absolute().parent.iterdir():
        if path.name.startswith(_prefix(folder)) and path.name.endswith(_PART):
            _remove_stale(path)
        elif path.name.startswith(_prefix(folder)) and path.name.endswith(_OLD):
            _restore(path, folder)


def sweep(folder: Path) -> None:
    """Remove what runs that were killed left in a folder, under whatever name they wrote it."""
    sweep_files(folder, _TEMPORARY.fullmatch)
    for path in folder.iterdir():
        if _TEMPORARY.fullmatch(path.name):
            _remove_stale(path)


def exchange(temporary: Path, folder: Path) -> None:
    """Give a temporary folder its name; the folder that has it steps aside, and is removed last.

    A run that is killed in between leaves the old one under a name that the next run knows.
    """
    if not os.path.lexists(folder):
        temporary.rename(folder)
        return
    aside = temporary.with_suffix(_OLD)
    # Held before it is moved, so that no other process takes it for one that a kill left.
    handle = _hold_folder(folder)
    try:
        folder.rename(aside)
        temporary.rename(folder)
    finally:
        _settle(aside, folder)
        if handle is not None:
            os.close(handle)


def _settle(aside: Path, folder: Path) -> None:
    """Give a folder that was moved aside its name back, or remove it if it was replaced."""
    if not os.path.lexists(folder):
        aside.rename(folder)
    else:
        remove(aside)


def _restore(aside: Path, folder: Path) -> None:
    """Settle what a run that was killed had moved aside, unless a process still holds it."""
    with contextlib.suppress(OSError):
        handle = _hold_folder(aside)
        if handle is not None or fcntl is None:
            if not hasattr(os, "geteuid") or aside.lstat().st_uid == os.geteuid():
                _settle(aside, folder)
            if handle is not None:
                os.close(handle)


def _hold_folder(path: Path) -> int | None:
    """A handle that marks a folder as used by this process, if nobody else has marked it."""
    if fcntl is None:  # Windows opens no folder
        return None
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    if hold(handle):
        return handle
    os.close(handle)
    return None


def _remove_stale(path: Path) -> None:
    """Remove a temporary folder of ours that is old or discarded, and that no process holds."""
    with contextlib.suppress(OSError):
        # Too young, it may be one that another process has made and not yet marked. One that was
        # about to be removed is of no use to anybody.
        old = time.time() - path.lstat().st_mtime > STALE or _DISCARDED.search(path.name)
        if old and (handle := _hold_folder(path)) is not None:
            if os.fstat(handle).st_uid == os.geteuid():
                shutil.rmtree(path, ignore_errors=True)
            os.close(handle)


class StagingFolder:
    """A folder beside the target: files of their final length in it, and a journal of pieces.

    It holds the journal, the model as far as it is written, and while names are exchanged the
    folder that is replaced. A piece is in the journal once its bytes are in its file. Made again
    for the same work, it goes on from there with the pieces whose bytes are still what they were;
    for any other work it starts anew. What atlas did not write is never removed, and links are not
    followed.
    """

    def __init__(self, target: Path, identity: str, files: Mapping[str, int]) -> None:
        self.target = target
        self._home = staging_home(target)
        self.folder = self._home / MODEL
        check_staging(target)
        self._home.mkdir(exist_ok=True)
        self._journal = os.open(self._home / JOURNAL, OPEN | os.O_APPEND, 0o666)
        self._files: dict[str, int] = {}
        self._lock = threading.Lock()
        self._writing = {name: threading.Lock() for name in files}
        try:
            claim(self._journal, target)
            self.done = self._resume(identity, files)
            for name, length in files.items():
                self._files[name] = os.open(self.folder / name, OPEN, 0o666)
                reserve(self._files[name], length)
        except AtlasError:
            self.close()
            raise
        except OSError:
            self.abandon()
            raise

    def _resume(self, identity: str, files: Mapping[str, int]) -> set[Piece]:
        """The pieces that an earlier run of the same work finished; else an empty folder."""
        first, end, _ = (self._home / JOURNAL).read_bytes().partition(b"\n")
        here = all(_is_file(self.folder / name, length) for name, length in files.items())
        if end and first == (MARK + identity).encode() and here:
            pieces, _, sound = read_pieces(self._home / JOURNAL, skipped=1)
            if sound:
                # Companion files are written last, and anew: one may have been cut short.
                remove_all_but(self.folder, files)
                return intact(self.folder, pieces, files)
        remove_all_but(self._home, [JOURNAL])
        self.folder.mkdir()
        os.ftruncate(self._journal, 0)
        os.write(self._journal, f"{MARK}{identity}\n".encode())
        return set()

    def write(self, file: str, offset: int, content: memoryview | bytes) -> None:
        """Put bytes at an offset of a file.

        The system lets one thread at a time write to a file, and the others spin meanwhile: with a
        lock of our own they sleep.
        """
        with self._writing[file]:
            os.lseek(self._files[file], offset, os.SEEK_SET)  # Windows has no pwrite
            while len(content):
                content = content[os.write(self._files[file], content[:_WRITTEN]) :]

    def note(self, piece: Piece, written: Written) -> None:
        """Say that a piece is in its file."""
        place = f"{written.offset} {written.length} {written.digest} {written.file}"
        with self._lock:
            os.write(self._journal, f"{piece[0]} {piece[1]} {place}\n".encode())

    def close(self) -> None:
        """Let go of the files, and leave them for another run."""
        handles = [*self._files.values(), self._journal]
        self._files, self._journal = {}, -1
        for handle in handles:
            with contextlib.suppress(OSError):
                os.close(handle)

    def abandon(self) -> None:
        """Remove all that was written."""
        self._discard()

    def _discard(self) -> None:
        """Remove the staging folder under another name: a kill leaves no half of it in the way."""
        if fcntl is None:  # Windows renames no folder of open files
            self.close()
        aside = _renamed(self._home, self.target)
        self.close()  # all descriptors are free, and the name is another's
        remove(aside)

    def finish(self) -> None:
        """Give the folder its name; a folder that is replaced goes last.

        A run that is killed in between is put right by the next one: see `recover`.
        """
        if fcntl is None:
            self.close()
        if self.target.exists():
            self.target.rename(self._home / _REPLACED)
        self.folder.rename(self.target)
        self._discard()


def _renamed(home: Path, target: Path) -> Path:
    """The new name of a staging folder that is to be removed; the next run knows it."""
    aside = home.with_name(f"{_prefix(target)}{os.getpid()}-{time.time_ns()}{_PART}")
    try:
        return home.rename(aside)
    except OSError:
        return home


def staging_home(target: Path) -> Path:
    return target.absolute().parent / f".{target.name}.part"


def check_staging(target: Path) -> None:
    """Raise AtlasError if the place of the staging folder is taken by what atlas did not make."""
    home = staging_home(target)
    if not os.path.lexists(home):
        return
    status = home.lstat()
    foreign = hasattr(os, "geteuid") and status.st_uid != os.geteuid()
    if foreign or not stat.S_ISDIR(status.st_mode) or not _is_ours(home):
        raise AtlasError(
            f"{home}: is in the way, and was not left by atlas merge; remove it or give it another "
            "name"
        )


def _is_ours(home: Path) -> bool:
    """Whether a folder is empty, has just been made, or has a journal that atlas merge wrote."""
    names = {path.name for path in home.iterdir()}
    journal = home / JOURNAL
    if JOURNAL not in names:
        return not names
    if journal.is_symlink() or not journal.is_file():
        return False
    with journal.open("rb") as file:
        head = file.read(len(MARK))
    return head == MARK.encode() or (not head and names == {JOURNAL})


def recover(target: Path) -> None:
    """Put right what a kill left between two renames: a folder that was to be replaced returns.

    If the new one has its name already, the rest of the staging folder is removed.
    """
    home = staging_home(target)
    with contextlib.suppress(OSError):  # what cannot be looked at is told when it is written
        _put_right(target)
    if not os.path.lexists(home):
        return
    check_staging(target)
    replaced = home / _REPLACED
    journal = os.open(home / JOURNAL, OPEN) if (home / JOURNAL).exists() else None
    try:
        if journal is None:
            return
        claim(journal, target)
        if replaced.is_dir() and not os.path.lexists(target):
            replaced.rename(target)
        elif target.is_dir() and not (home / MODEL).exists():
            remove(_renamed(home, target))
    finally:
        if journal is not None:
            os.close(journal)


def claim(journal: int, target: Path, part: str = "", *, shared: bool = False) -> None:
    """Hold a journal for this process, or together with others; raise AtlasError if one has it."""
    if fcntl is None:
        return
    try:
        fcntl.flock(journal, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as problem:
        raise AtlasError(f"{part}{target}: another atlas merge is writing it") from problem


def _is_file(path: Path, length: int) -> bool:
    return path.is_file() and not path.is_symlink() and path.stat().st_size == length


def remove_all_but(folder: Path, kept: Iterable[str]) -> None:
    for path in folder.iterdir():
        if path.name not in set(kept):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def check_space(target: Path, wanted: int) -> None:
    """Raise if the disk has no room for what is still to be written."""
    folder = target.absolute().parent
    kept = staging_home(target) / MODEL
    there = sum(_on_disk(path) for path in kept.glob("*")) if kept.is_dir() else 0
    free = shutil.disk_usage(folder).free
    if wanted - there > free:
        raise AtlasError(
            f"{target}: needs {wanted / 1e6:,.0f} MB of disk, and {free / 1e6:,.0f} MB are free"
        )


def _on_disk(path: Path) -> int:
    """The bytes of disk that a file takes: fewer than its length while parts were not written."""
    status = path.stat()
    return status.st_blocks * 512 if hasattr(status, "st_blocks") else status.st_size


def reserve(file: int, length: int) -> None:
    """Have the room of a file at once where the file system can, which makes writing it cheaper."""
    try:
        if length and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, length)
    except OSError as problem:
        if problem.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
    os.ftruncate(file, length)
