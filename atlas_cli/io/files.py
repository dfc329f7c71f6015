"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from atlas_cli.errors import AtlasError

try:
    import fcntl
except ImportError:  # Windows has no flock: two merges into one folder go unnoticed there
    fcntl = None  # type: ignore[assignment]

_JOURNAL = "journal"
_WRITTEN = 1 << 16  # bytes at a time; for more, Linux takes large pages, which may be slow to come
_OPEN = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0)

Piece = tuple[int, int]  # the number of an output, and of a piece of it


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` that takes its name at the end, or vanishes on an error."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_text(path: Path, text: str) -> None:
    """Write a text file, or say in one line why it cannot be written."""
    try:
        with whole_file(path) as temporary:
            temporary.write_text(text, "utf-8")
    except OSError as problem:
        raise AtlasError(f"{path}: cannot be written: {problem.strerror}") from problem


class StagingFolder:
    """A folder beside the target, with files of their final length and a journal of pieces.

    A piece is in the journal once its bytes are in its file. Made again for the same work, the
    folder goes on from there; for any other work it starts anew.
    """

    def __init__(self, target: Path, identity: str, files: Mapping[str, int]) -> None:
        self.target = target
        self.folder = target.absolute().parent / f".{target.name}.part"
        self.folder.mkdir(exist_ok=True)
        self._journal = os.open(self.folder / _JOURNAL, _OPEN | os.O_APPEND)
        self._files: dict[str, int] = {}
        self._lock = threading.Lock()
        self._writing = {name: threading.Lock() for name in files}
        self._claim()
        try:
            self.done = self._resume(identity, files)
            for name, length in files.items():
                self._files[name] = os.open(self.folder / name, _OPEN, 0o666)
                _reserve(self._files[name], length)
        except OSError:
            self.abandon()
            raise

    def _claim(self) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as problem:
            raise AtlasError(f"{self.target}: another atlas merge is writing it") from problem

    def _resume(self, identity: str, files: Mapping[str, int]) -> set[Piece]:
        """The pieces that an earlier run of the same work finished; else an empty folder."""
        text = (self.folder / _JOURNAL).read_text("utf-8")
        first, *lines = text.split("\n")
        here = all(
            (self.folder / name).is_file() and (self.folder / name).stat().st_size == length
            for name, length in files.items()
        )
        same = bool(lines) and first == identity and here
        # Companion files are written last, and anew: one may have been cut short.
        kept = {_JOURNAL, *files} if same else {_JOURNAL}
        for path in self.folder.iterdir():
            if path.name not in kept:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        if same:  # the last line may be cut short: it is no piece
            return {(int(a), int(b)) for a, b in (line.split() for line in lines[:-1])}
        os.ftruncate(self._journal, 0)
        os.write(self._journal, f"{identity}\n".encode())
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

    def note(self, piece: Piece) -> None:
        """Say that a piece is in its file."""
        with self._lock:
            os.write(self._journal, f"{piece[0]} {piece[1]}\n".encode())

    def close(self) -> None:
        """Let go of the files, and leave them for another run."""
        for handle in (*self._files.values(), self._journal):
            with contextlib.suppress(OSError):
                os.close(handle)

    def abandon(self) -> None:
        """Remove all that was written."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def finish(self) -> None:
        """Give the folder its name; a folder that is replaced goes last."""
        (self.folder / _JOURNAL).unlink()
        self.close()
        old = self.folder.with_suffix(".old")
        if self.target.exists():
            shutil.rmtree(old, ignore_errors=True)
            self.target.rename(old)
        self.folder.rename(self.target)
        shutil.rmtree(old, ignore_errors=True)


def check_space(target: Path, wanted: int) -> None:
    """Raise if the disk has no room for what is still to be written."""
    folder = target.absolute().parent
    kept = folder / f".{target.name}.part"
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


def _reserve(file: int, length: int) -> None:
    """Have the room of a file at once where the file system can, which makes writing it cheaper."""
    try:
        if length and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, length)
    except OSError as problem:
        if problem.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
    os.ftruncate(file, length)
