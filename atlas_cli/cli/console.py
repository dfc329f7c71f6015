"""The terminal and the pipes: results on stdout, messages on stderr, stdin, interrupts."""

from __future__ import annotations

import dataclasses
import io
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, BinaryIO, TextIO

from atlas_cli.errors import AtlasError, CheckpointError, ClosedError, UsageError

if TYPE_CHECKING:
    from rich.table import Table


CLOSED = "stdout was closed before everything was written"
_LAYOUT = "\n\t"
_said = [0.0]  # when stderr was last written
_PIECE = 1 << 15  # half of what a pipe holds
_FOLDED, _BETWEEN = 6, 2  # characters: of a folded column at least, between two columns


def emit(result: object, *, as_json: bool = False) -> None:
    """Write a result to stdout: as JSON, or as its own text."""
    if as_json:
        import json

        value = dataclasses.asdict(result) if dataclasses.is_dataclass(result) else result  # type: ignore[arg-type]
        write(printable(json.dumps(value, indent=2, ensure_ascii=False), "\n") + "\n")
    else:
        text = str(result)
        write(f"{printable(text, _LAYOUT) if is_terminal() else text}\n")


def emit_rows(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write rows to stdout as CSV."""
    import csv

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    written = text.getvalue()
    write(printable(written, _LAYOUT) if is_terminal() else written)


def emit_table(rows: Sequence[Mapping[str, str]], caption: str) -> None:
    """Draw rows on the terminal. A column in which every cell is empty is left out."""
    from rich.console import Console

    rows = [{name: printable(cell) for name, cell in row.items()} for row in rows]
    columns = [name for name in rows[0] if any(row[name] for row in rows)]
    console = Console(file=io.StringIO(), force_terminal=True, no_color=no_color(), width=_width())
    least = sum(_least_width(name, rows) + _BETWEEN for name in columns) + _BETWEEN
    if least <= console.width:
        shortened = _shortened(columns, rows, console.width)
        console.print(_side_by_side(columns, shortened, caption))
    else:
        console.print(_below_each_other(columns, rows, caption))
    write(console.file.getvalue())  # type: ignore[attr-defined]


def _shortened(
    columns: Sequence[str], rows: Sequence[Mapping[str, str]], width: int
) -> list[dict[str, str]]:
    """The rows with long names cut in the middle, since related names often begin alike."""
    widest = {name: max(len(text) for text in (name, *(r[name] for r in rows))) for name in columns}
    texts = sorted((n for n in columns if not _is_numeric(n, rows)), key=lambda name: widest[name])
    room = width - _BETWEEN * (len(columns) + 1)
    room -= sum(widest[name] for name in columns if name not in texts)
    limits = {}
    for number, name in enumerate(texts):
        limits[name] = min(widest[name], max(_FOLDED, room // (len(texts) - number)))
        room -= limits[name]
    return [{name: _cut(row[name], limits.get(name)) for name in columns} for row in rows]


def _cut(text: str, limit: int | None) -> str:
    """A name of so many letters at most, without its middle; what has spaces is wrapped instead."""
    if limit is None or len(text) <= limit or " " in text:
        return text
    end = (limit - 1) // 2
    return f"{text[: limit - 1 - end]}…{text[len(text) - end :]}"


def _least_width(name: str, rows: Sequence[Mapping[str, str]]) -> int:
    """The least width of a column: numbers are never cut, text is folded."""
    widest = max(len(text) for text in (name, *(row[name] for row in rows)))
    return widest if _is_numeric(name, rows) else min(widest, _FOLDED)


def _is_numeric(name: str, rows: Sequence[Mapping[str, str]]) -> bool:
    return all(row[name][:1] in "+-0123456789" for row in rows)


def _side_by_side(columns: Sequence[str], rows: Sequence[Mapping[str, str]], caption: str) -> Table:
    """A line for every row."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    style = box.SIMPLE_HEAD
    table = Table(caption=caption, caption_justify="left", box=style, collapse_padding=True)
    for name in columns:
        is_number = _is_numeric(name, rows)
        table.add_column(
            name, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold"
        )
    for row in rows:
        table.add_row(*(Text(row[name]) for name in columns))
    return table


def _below_each_other(
    columns: Sequence[str], rows: Sequence[Mapping[str, str]], caption: str
) -> Table:
    """A line for every cell, where rows would be too wide."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    style = box.SIMPLE
    table = Table(caption=caption, caption_justify="left", box=style, show_header=False)
    table.add_column("", overflow="fold", style="bold")
    table.add_column("", overflow="fold")
    for row in rows:
        for name in columns:
            table.add_row(name, Text(row[name]))
        table.add_section()
    return table


def write(text: str) -> None:
    """Write text to stdout. Raises AtlasError unless all of it is written."""
    with _stdout() as stdout:
        for start in range(0, len(text), _PIECE):  # a reader that left is noticed between pieces
            stdout.write(text[start : start + _PIECE])
            stdout.flush()


def write_file(file: BinaryIO) -> None:
    """Copy a file to stdout. Raises AtlasError unless all of it is written."""
    with _stdout() as stdout:
        shutil.copyfileobj(file, stdout.buffer, _PIECE)


@contextmanager
def _stdout() -> Iterator[TextIO]:
    if sys.stdout is None:
        raise AtlasError(CLOSED)
    try:
        yield sys.stdout
        sys.stdout.flush()
    except BrokenPipeError as problem:
        _drop_stdout()
        raise ClosedError(CLOSED) from problem
    except OSError as problem:
        _drop_stdout()
        raise AtlasError(f"stdout: cannot be written: {problem.strerror}") from problem


def _drop_stdout() -> None:
    """Point stdout at the null device, so that closing it at exit does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def printable(text: str, keep: str = "") -> str:
    """A text without what controls a terminal: such characters are written as escapes.

    Names come from files of strangers. Line ends would forge messages, escape sequences and marks
    of direction would change what is shown, and halves of surrogate pairs cannot be encoded.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        c if c in keep or c.isprintable() or c in _BLANKS else ascii(c)[1:-1] for c in text
    )


_BLANKS = "\u00a0\u3000"  # spaces that Python does not count as printable


def is_terminal() -> bool:
    """Whether stdout is a terminal."""
    return sys.stdout is not None and sys.stdout.isatty()


# Messages and progress ------------------------------------------------------------------------


def say(text: str) -> None:
    """Write lines to stderr. A result does not depend on whether anybody hears of it."""
    with suppress(OSError, ValueError):
        if sys.stderr is not None:
            sys.stderr.write(f"{printable(text, _LAYOUT)}\n")
            sys.stderr.flush()
            _said[0] = time.monotonic()


def last_said() -> float:
    """When the last message was written, by the monotonic clock."""
    return _said[0]


def note(text: str) -> None:
    """Write a message to stderr, in one line behind the name of the program."""
    say(f"atlas: {printable(text)}")


def error(text: str) -> None:
    """Write an error to stderr."""
    note(f"error: {text}")


def warn(text: str) -> None:
    """Write a warning to stderr."""
    note(f"warning: {text}")


def warner(*, quiet: bool) -> Callable[[str], None]:
    """What writes warnings, or nothing if it is to be quiet."""
    return (lambda text: None) if quiet else warn


def tell_table(rows: Sequence[Mapping[str, str]]) -> None:
    """Write rows to stderr, one line each, in columns."""
    if sys.stderr is None:
        return
    lines = [[printable(cell) for cell in line] for line in (rows[0], *(r.values() for r in rows))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for first, *others in lines:
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        say(f"  {'  '.join(cells).rstrip()}")


def no_color() -> bool | None:
    """Whether colours are unwanted; None leaves that to the terminal."""
    return bool(os.environ.get("NO_COLOR")) or None


def _width() -> int | None:
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or None
    except (OSError, ValueError):
        return None


def percent(value: float | None) -> str:
    """Percent with two decimals; nothing for None."""
    return "" if value is None else f"{value:.2f}"


# stdin ----------------------------------------------------------------------------------------


@contextmanager
def spooled_stdin(suffix: str) -> Iterator[Path]:
    """A temporary file with the content of stdin, for readers that must seek.

    A CheckpointError says "stdin" in place of the file's name, which means nothing to the user.
    """
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError("- reads stdin, which is no pipe and no file")
    import tempfile

    with tempfile.TemporaryDirectory(prefix="atlas-") as folder:
        path = Path(folder) / f"stdin{suffix}"
        try:
            with path.open("wb") as file:
                shutil.copyfileobj(sys.stdin.buffer, file, 1 << 20)
        except OSError as problem:
            raise AtlasError(
                f"stdin: cannot be kept in {Path(folder).parent}: {problem.strerror}; "
                "set TMPDIR to a folder with room"
            ) from problem
        if not path.stat().st_size:
            raise CheckpointError("stdin: is empty")
        try:
            yield path
        except CheckpointError as problem:
            raise CheckpointError(str(problem).replace(str(path), "stdin")) from problem


def read_stdin() -> str:
    """The text of stdin. Raises UsageError if it is closed, too long, or no text."""
    if sys.stdin is None:
        raise UsageError("stdin: is closed")
    try:
        content = sys.stdin.buffer.read(_MOST_TEXT + 1)
        if len(content) > _MOST_TEXT:
            raise UsageError(f"stdin: is longer than {_MOST_TEXT / 1e6:.0f} MB of text")
        return content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise UsageError("stdin: cannot be read as UTF-8 text") from problem


_MOST_TEXT = 16_000_000  # bytes


def read_text(name: str) -> tuple[str, str]:
    """The text of a recipe, from a file or, for -, from stdin; and the name that errors use."""
    from atlas_cli.io.files import read_regular

    try:
        if name == "-":
            return read_stdin(), "stdin"
        return read_regular(Path(name), _MOST_TEXT).decode("utf-8"), name
    except FileNotFoundError as problem:
        raise UsageError(f"no such recipe: {name}") from problem
    except (OSError, ValueError) as problem:
        raise UsageError(f"{name}: cannot be read as UTF-8 text") from problem


# Interrupts ----------------------------------------------------------------------------------


@contextmanager
def stoppable() -> Iterator[list[int]]:
    """Collect the first interrupt in the list that is given; a second one ends the process."""
    asked: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def interrupted_once() -> Iterator[None]:
    """Raise KeyboardInterrupt at once and only once, until `ignore_interrupts` ends that, too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def ignore_interrupts() -> None:
    """Ignore interrupts from now on. One that is pending is raised here."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
