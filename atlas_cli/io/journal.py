"""The journal of a staging folder: which pieces are in its files, and whether they still are."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import xxhash

JOURNAL = "journal"
MARK = "atlas merge "  # how a journal begins
_AT_ONCE = 1 << 20  # bytes of a piece that are looked at together
_LINE = re.compile(rb"(\d{1,9}) (\d{1,9}) (\d{1,18}) (\d{1,18}) ([0-9a-f]{16}) (.+)")

Digest = xxhash.xxh3_64  # of the bytes of a piece
Piece = tuple[int, int]  # the number of an output, and of a piece of it


@dataclass(frozen=True)
class Written:
    """Where the bytes of a piece are, and their digest."""

    file: str
    offset: int
    length: int
    digest: str


def read_pieces(journal: Path, skipped: int = 0) -> tuple[dict[Piece, Written], int, bool]:
    """The pieces of a journal, the bytes of its whole lines, and whether all of these are pieces.

    Its last line may have been cut short. There is nothing where there is no journal.
    """
    try:
        text = journal.read_bytes()
    except FileNotFoundError:
        return {}, 0, True
    end = text.rfind(b"\n") + 1
    lines = [_LINE.fullmatch(line) for line in text[:end].split(b"\n")[skipped:-1]]
    found = {
        (int(line[1]), int(line[2])): Written(
            line[6].decode("utf-8", "replace"), int(line[3]), int(line[4]), line[5].decode()
        )
        for line in lines
        if line
    }
    return found, end, all(lines)


def intact(folder: Path, pieces: Mapping[Piece, Written], files: Iterable[str]) -> set[Piece]:
    """The pieces whose bytes are in their files: a disk, or a loss of power, may have lost some."""
    found, buffer = set(), bytearray(_AT_ONCE)
    with contextlib.ExitStack() as stack:
        there = [name for name in files if (folder / name).is_file()]
        opened = {name: stack.enter_context((folder / name).open("rb")) for name in there}
        for piece, written in pieces.items():
            digest, left = Digest(), written.length
            file = opened.get(written.file)
            if file is None:
                continue
            file.seek(written.offset)
            while left and (size := file.readinto(memoryview(buffer)[: min(left, _AT_ONCE)])):
                digest.update(memoryview(buffer)[:size])
                left -= size
            if not left and digest.hexdigest() == written.digest:
                found.add(piece)
    return found
