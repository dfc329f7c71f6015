"""What a pickle holds besides scalars, text and lists: inert objects and safe dictionaries."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

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


class ByteStream:
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


PACKAGES = ("torch.", "torchvision.", "open_clip.", "clip.", "src.", "__torch__.")

_BUILTINS = "bool complex dict float frozenset int list object range set slice str tuple"
_PATHS = "Path PosixPath PurePath PurePosixPath PureWindowsPath WindowsPath"
_SCALARS = "bool_ float16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64"
NAMES = frozenset(
    [f"builtins.{name}" for name in _BUILTINS.split()]
    + [f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in _PATHS.split()]
    + [f"numpy.{name}" for name in ("dtype", "ndarray", *_SCALARS.split())]
    + [
        f"numpy.{core}.multiarray.{name}"
        for core in ("core", "_core")
        for name in ("_reconstruct", "scalar")
    ]
    + ["argparse.Namespace", "collections.OrderedDict", "collections.defaultdict"]
    + ["_codecs.encode", "copyreg._reconstructor"]
)
GETATTR = "builtins.getattr"
_PYTHON_2 = {"__builtin__": "builtins", "copy_reg": "copyreg"}
_LONGEST = 300
_MOST_REFUSED = 100
_SHOWN = 5


@dataclass(frozen=True)
class Global:
    """A name that a pickle mentions; a word, not the thing that it stands for."""

    module: str
    qualname: str

    def __str__(self) -> str:
        return f"{self.module}.{self.qualname}"


def printable(text: str, longest: int = 200) -> str:
    """`text` on one line, with anything that could upset a terminal escaped."""
    shown = text if len(text) <= longest else text[:longest] + "..."
    return shown if shown.isprintable() else shown.encode("unicode_escape").decode()


@dataclass(frozen=True)
class GlobalsPolicy:
    """The names that are accepted, and those met in this file that are not."""

    allow: Collection[str] = ()
    refused: dict[str, None] = field(default_factory=dict)

    def admit(self, module: str, qualname: str) -> Global:
        """The name as a word, noted as refused if it is not accepted."""
        if len(module) + len(qualname) > _LONGEST:
            raise FlawError(f"mentions a name of more than {_LONGEST} letters")
        name = Global(_PYTHON_2.get(module, module), qualname)
        if not self._accepts(name):
            self.refuse(name)
        return name

    def refuse(self, name: Global) -> None:
        """Note a name that this file must not mention."""
        if str(name) not in self.allow:
            self.refused[str(name)] = None
        if len(self.refused) > _MOST_REFUSED:
            raise FlawError("mentions too many names")

    def complaint(self) -> str:
        """A clause that names what was refused and the way out, or nothing."""
        names = [printable(name) for name in self.refused]
        if not names:
            return ""
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        options = " ".join(f"--allow-global {name}" for name in names[:_SHOWN])
        them, are = ("it", "it is") if len(names) == 1 else ("them", "they are")
        return (
            f"refuses to load {', '.join(names[:_SHOWN])}{more}; if you trust the file allow "
            f"{them} by name with {options} ({are} still never called)"
        )

    def _accepts(self, name: Global) -> bool:
        if "." in name.qualname and not _in_a_class(name.qualname):
            return False
        full = str(name)
        return full in NAMES or full == GETATTR or full.startswith(PACKAGES)


def _in_a_class(qualname: str) -> bool:
    """Whether a dotted name can be that of a class inside a class, as `Outer.Inner` is."""
    return qualname[:1].isupper() and all(part.isidentifier() for part in qualname.split("."))


@dataclass(eq=False, slots=True)
class Object:
    """What a pickle would have built by calling a name; inert."""

    made_by: Global | None
    args: tuple[Any, ...] = ()
    state: Any = None
    entries: dict[Any, Any] = field(default_factory=dict)


def entries_of(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """A dict with keys that are quick to compare; a key that can name no tensor is kept apart.

    Hashing what a file chose, say tuples of tuples or colliding integers, could take forever.
    """
    return {_key(key): value for key, value in pairs}


def _key(key: Any) -> Any:
    if type(key) is int and abs(key) < 2**63:
        return str(key)
    return key if isinstance(key, str) else object()
