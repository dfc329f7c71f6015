"""Runs of bytes in a file that are read only when, and only as far as, they are needed."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

MAX_OPCODES = 1_000_000
MAX_TEXT = 32 * 2**20


class FlawError(Exception):
    """What is wrong with a file, as a clause that follows the name of the file."""


@dataclass(frozen=True)
class Span:
    """Bytes at a known place in a file, or in bytes already in memory, not read yet."""

    source: Path | bytes
    start: int
    length: int

    def part(self, start: int, length: int) -> Span:
        """The bytes from `start` on; raises FlawError if they are not all there."""
        if start < 0 or length < 0 or start + length > self.length:
            raise FlawError("is cut short, or declares more bytes than it has")
        return Span(self.source, self.start + start, length)

    def open(self) -> BinaryIO:
        """The source as a binary file, placed at the start of the span."""
        source = self.source
        file = io.BytesIO(source) if isinstance(source, bytes) else source.open("rb")
        file.seek(self.start)
        return file

    def read(self) -> bytearray:
        """All bytes of the span; raises FlawError if the file became shorter."""
        content = bytearray(self.length)
        with self.open() as file:
            if file.readinto(content) != self.length:  # type: ignore[attr-defined]
                raise FlawError("changed while it was being read")
        return content


def span_of(path: Path) -> Span:
    """The span of a whole file."""
    return Span(path, 0, path.stat().st_size)


class Allowance:
    """What reading one file may still cost, however its pickles are nested."""

    def __init__(self) -> None:
        self._opcodes = MAX_OPCODES
        self._text = MAX_TEXT

    def spend_opcodes(self, count: int) -> None:
        """Count pickle instructions, or work like theirs; raises FlawError for too many."""
        self._opcodes -= count
        if self._opcodes < 0:
            raise FlawError(
                f"has more than {MAX_OPCODES} pickle instructions, which no model needs"
            )

    def spend_text(self, length: int) -> None:
        """Count bytes brought into memory; raises FlawError when there were too many."""
        self._text -= length
        if self._text < 0:
            raise FlawError(f"has more than {MAX_TEXT} bytes of pickled text, which no model needs")


class Stream:
    """A cursor over a span that never reads, or makes room for, more than the span holds."""

    def __init__(self, span: Span, file: BinaryIO, allowance: Allowance) -> None:
        self.position = 0
        self._span = span
        self._file = file
        self._allowance = allowance

    def read(self, length: int) -> bytes:
        """Exactly `length` bytes; raises FlawError if there are fewer."""
        self._span.part(self.position, length)
        self._allowance.spend_text(length)
        content = self._file.read(length)
        self.position += length
        if len(content) != length:
            raise FlawError("changed while it was being read")
        return content

    def read_opcode(self) -> bytes:
        """One byte, counted as one pickle instruction."""
        self._allowance.spend_opcodes(1)
        return self.read(1)

    def readline(self) -> bytes:
        """Bytes up to and with the next newline, or up to the end of the span."""
        line = self._file.readline(min(self._span.length - self.position, MAX_TEXT))
        self._allowance.spend_text(len(line))
        self.position += len(line)
        return line

    def skip(self, length: int) -> Span:
        """The next `length` bytes as a span, unread."""
        span = self._span.part(self.position, length)
        self._file.seek(length, io.SEEK_CUR)
        self.position += length
        return span
