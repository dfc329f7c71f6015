"""A staging folder that several processes write at once, each its own slice of the pieces.

Beside the files stands one journal per slice, so that no process waits for another one, on this
machine or on others that share the file system. Each may be stopped and started again on its own.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path

from atlas_cli.errors import AtlasError
from atlas_cli.io.files import OPEN
from atlas_cli.io.journal import JOURNAL, MARK, Piece, intact, read_pieces
from atlas_cli.io.staging import (
    MODEL,
    StagingFolder,
    check_staging,
    claim,
    remove_all_but,
    reserve,
    staging_home,
    temporary_folder,
)

_HEAD = re.compile(re.escape(MARK) + r"([0-9a-f]+) in (\d+) slices")


class SliceFolder(StagingFolder):
    """The staging folder of `target`, as the process of one slice sees it.

    `mine` are the pieces of the slice. `done` has all pieces that need not be made here: those of
    other slices, and those that an earlier run of this slice finished.
    """

    def __init__(
        self, target: Path, identity: str, files: Mapping[str, int], number: int, count: int
    ) -> None:
        self._begin(target, files)
        check_staging(target)
        _make_home(target, f"{MARK}{identity} in {count} slices\n")
        self._shared = os.open(self._home / JOURNAL, OPEN & ~os.O_CREAT)
        try:
            # Shared by all slices; a merge that is not sliced, and --finish, want it alone.
            claim(self._shared, target, shared=True)
            _check_head(target, identity, count)
            self._journal = os.open(self._home / _name(number, count), OPEN | os.O_APPEND, 0o666)
            claim(self._journal, target, f"slice {number}/{count} of ")
            pieces, end, _ = read_pieces(self._home / _name(number, count))
            os.ftruncate(self._journal, end)  # a line may be cut short
            self._open(files)
            self.done = intact(self.folder, pieces, files)
        except BaseException:
            self.close()
            raise

    def _begin(self, target: Path, files: Mapping[str, int]) -> None:
        self.target = target
        self._home = staging_home(target)
        self.folder = self._home / MODEL
        self._journal = self._shared = -1
        self._files: dict[str, int] = {}
        self._lock = threading.Lock()
        self._writing = {name: threading.Lock() for name in files}

    def _open(self, files: Mapping[str, int]) -> None:
        for name, length in files.items():
            self._files[name] = os.open(self.folder / name, OPEN, 0o666)
            if os.fstat(self._files[name]).st_size != length:
                reserve(self._files[name], length)

    def flush(self) -> None:
        """Have the bytes on the disk: another machine is to read them."""
        for handle in self._files.values():
            os.fsync(handle)

    def close(self) -> None:
        """Let go of the files, and leave them for other runs."""
        super().close()
        with contextlib.suppress(OSError):
            os.close(self._shared)
        self._shared = -1


class SlicedFolder(SliceFolder):
    """The staging folder of `target` once its slices are written: `pieces` are in its files."""

    def __init__(self, target: Path, identity: str, files: Mapping[str, int]) -> None:
        self._begin(target, files)
        check_staging(target)
        head = _read_head(target)
        if head is None:
            raise AtlasError(f"{target}: has no slices to finish; write them with --slice I/N")
        self.count = int(head[2])
        self._journal = os.open(self._home / JOURNAL, OPEN & ~os.O_CREAT)
        try:
            claim(self._journal, target)
            _check_head(target, identity, self.count)
            self.done: set[Piece] = set()
            for number in range(1, self.count + 1):
                pieces, _, _ = read_pieces(self._home / _name(number, self.count))
                self.done |= intact(self.folder, pieces, files)
        except BaseException:
            self.close()
            raise
        self._sizes = dict(files)

    def begin(self) -> None:
        """Open the files; companion files are written anew, since one may have been cut short."""
        remove_all_but(self.folder, self._sizes)
        self._open(self._sizes)


def _name(number: int, count: int) -> str:
    return f"slice-{number}-of-{count}"


def _make_home(target: Path, head: str) -> None:
    """Make the folder with its journal at once, unless another slice has done so."""
    home = staging_home(target)
    if home.exists() and any(home.iterdir()):
        return
    with temporary_folder(target) as made:
        (made / JOURNAL).write_text(head, "utf-8")
        (made / MODEL).mkdir()
        with contextlib.suppress(FileExistsError, OSError):
            made.rename(home)  # fails if it is there and not empty


def _read_head(target: Path) -> re.Match[str] | None:
    journal = staging_home(target) / JOURNAL
    if not journal.is_file():
        return None
    return _HEAD.fullmatch(journal.read_text("utf-8", "replace").partition("\n")[0])


def _check_head(target: Path, identity: str, count: int) -> None:
    head, home = _read_head(target), staging_home(target)
    if head is None:
        raise AtlasError(f"{target}: a stopped merge without slices is there; remove {home}")
    if int(head[2]) != count:
        raise AtlasError(f"{target}: was begun in {head[2]} slices, not {count}; or remove {home}")
    if head[1] != identity:
        raise AtlasError(
            f"{target}: slices of another recipe, of other inputs or on another kind of device are "
            f"there; go on with those, or remove {home}"
        )
