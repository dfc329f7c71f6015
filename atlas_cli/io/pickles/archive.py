"""The zip archives of torch.save and torch.jit.save, as spans of their members."""

from __future__ import annotations

import io
import stat
import struct
import zipfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from atlas_cli.io.pickles.policy import FlawError, Span, printable, span_of

_LARGEST_INDEX = 4 * 2**20
_LARGEST_PACKED = 64 * 2**20
_HEADER = struct.Struct("<4s22xHH")
_ENCRYPTED = 1
_BROKEN = (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError, struct.error)


class _IndexFile(io.BufferedReader):
    """A file that refuses to read at once more than the index of an archive can need."""

    def read(self, size: Any = -1) -> bytes:
        """As a file does, but raises FlawError for a larger piece than any index."""
        if size is not None and size > _LARGEST_INDEX:
            raise FlawError(f"has a zip index of more than {_LARGEST_INDEX} bytes")
        return super().read(size)


@dataclass(frozen=True)
class Archive:
    """The members of a zip archive below its one folder, checked but not read."""

    path: Path
    members: dict[str, zipfile.ZipInfo]

    def __contains__(self, name: object) -> bool:
        return name in self.members

    def member(self, name: str) -> Span:
        """The bytes of a member; raises FlawError if it is absent, packed or not all there."""
        if name not in self.members:
            raise FlawError(f"has no member {printable(name)}")
        info = self.members[name]
        stored_as_is = info.compress_type == zipfile.ZIP_STORED
        if not stored_as_is or info.flag_bits & _ENCRYPTED or info.compress_size != info.file_size:
            raise FlawError(f"has a compressed member {printable(name)}; torch.save never packs it")
        file = span_of(self.path)
        start, length = info.header_offset, _HEADER.size
        magic, name_length, extra = _HEADER.unpack(file.part(start, length).read())
        stored = file.part(start + length, name_length).read()
        if magic != b"PK\3\4" or stored != info.orig_filename.encode():
            raise FlawError(f"has a member {printable(name)} that is not where the index says")
        return file.part(start + length + name_length + extra, info.file_size)


def open_archive(path: Path) -> Archive:
    """The members of the archive at `path`; raises FlawError for anything torch does not write."""
    try:
        with _IndexFile(io.FileIO(path)) as file, zipfile.ZipFile(file) as archive:
            infos = archive.infolist()
    except _BROKEN as error:
        reason = printable(str(error))
        raise FlawError(f"is a broken or truncated zip archive ({reason})") from error
    for info in infos:
        _check_member(info)
    _check_total(infos, span_of(path).length)
    return Archive(path, _below_root(infos))


def _check_member(info: zipfile.ZipInfo) -> None:
    name = info.orig_filename
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or not name.isprintable():
        raise FlawError(f"has a member with the unsafe name {printable(name)}")
    if stat.S_ISLNK(info.external_attr >> 16):
        raise FlawError(f"has a member {printable(name)} that is a symbolic link")
    if info.compress_type != zipfile.ZIP_STORED and info.file_size > _LARGEST_PACKED:
        raise FlawError(f"has a member {printable(name)} that unpacks to {info.file_size} bytes")


def _check_total(infos: list[zipfile.ZipInfo], size: int) -> None:
    for name, count in Counter(info.filename for info in infos).items():
        if count > 1:
            raise FlawError(f"has {count} members with the name {printable(name)}")
    if sum(info.compress_size for info in infos) > size:
        raise FlawError("has members that overlap, or is cut short")


def _below_root(infos: list[zipfile.ZipInfo]) -> dict[str, zipfile.ZipInfo]:
    """Members by their name within the folder that holds data.pkl."""
    roots = [path.parts[0] for path in _paths(infos) if path.parts[1:] == ("data.pkl",)]
    if len(roots) != 1:
        raise FlawError("is a zip archive without a data.pkl, so not one of torch.save")
    prefix = f"{roots[0]}/"
    return {
        info.filename.removeprefix(prefix): info
        for info in infos
        if info.filename.startswith(prefix)
    }


def _paths(infos: list[zipfile.ZipInfo]) -> list[PurePosixPath]:
    return [PurePosixPath(info.filename) for info in infos]
