"""What files of others name: paths that stay in their folder, and nothing but regular files.

Models, indexes, archives and answers of the Hub name files. Every such name goes through `inside`.
"""

from __future__ import annotations

import os
import shutil
import stat
from io import BufferedReader
from pathlib import Path, PurePosixPath

from atlas_cli.errors import CheckpointError


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


def read_regular(path: Path, limit: int) -> bytes:
    """The bytes of a regular file, unless there are more than a limit."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > limit:
            raise OSError(0, f"is larger than {limit / 1e6:,.0f} MB", str(path))
        return file.read(limit)
