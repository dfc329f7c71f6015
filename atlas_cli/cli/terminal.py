"""What only a terminal is shown: tables that fit its width, a bar, and the summary of a run.

Nothing here writes a result: console.py does.
"""

from __future__ import annotations

import io
import os
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from shlex import quote
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.table import Table

    from atlas_cli.learning.results import LearningResult

_FOLDED, _BETWEEN = 6, 2  # characters: of a folded column at least, between two columns
_WHOLE = 12  # characters of a cell that are cut only if there is no other way
_NARROW = 70  # columns below which a bar leaves out numbers
_WORD = r"""(?:'[^']*'|"[^"]*"|\S)+"""
_ARGUMENT = re.compile(
    f"(?:-{_WORD}|>) (?![->]){_WORD}|{_WORD}"
)  # an option stays with its first value


def _no_color() -> bool | None:
    """Whether colours are unwanted; None leaves that to the terminal."""
    return bool(os.environ.get("NO_COLOR")) or None


def fit(text: str, width: int | None) -> str:
    """Lines broken between words. What follows `$` can still be copied, and `#` is repeated."""
    if width is None:
        return text
    return "\n".join(_fit_line(line, width) for line in text.split("\n"))


def _fit_line(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    if not line.startswith("$ "):
        indent = "# " if line.startswith("# ") else "  "
        return textwrap.fill(
            line,
            width,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
    rows = [""]
    for word in _ARGUMENT.findall(line):
        if len(rows[-1]) + len(word) + len("  \\") > width and rows[-1].strip(" $"):
            rows.append("   ")
        rows[-1] += f" {word}" if rows[-1] else word
    return " \\\n".join(rows)


# Tables ---------------------------------------------------------------------------------------


def draw_table(
    rows: Sequence[Mapping[str, str]],
    caption: str,
    width: int | None = None,
    *,
    plain: bool = False,
) -> str:
    """Rows as a table, with colours unless it is plain. A column without any text is left out."""
    from rich.console import Console
    from rich.text import Text

    columns = [name for name in rows[0] if any(row[name] for row in rows)]
    console = Console(
        file=io.StringIO(),
        force_terminal=not plain,
        no_color=_no_color(),
        width=width or _width_of(sys.stdout),
    )
    least = sum(_least_width(name, rows) + _BETWEEN for name in columns) + _BETWEEN
    shortened = _shortened(columns, rows, console.width) if least <= console.width else None
    if shortened:
        console.print(_side_by_side(columns, shortened))
    else:
        console.print(_below_each_other(columns, rows, console.width))
    if caption:  # as wide as the terminal, not as the table
        console.print(Text(caption, style="table.caption"))
    drawn: str = console.file.getvalue()  # type: ignore[attr-defined]
    return drawn


def _width_of(stream: TextIO) -> int | None:
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError):
        return None


def _shortened(
    columns: Sequence[str], rows: Sequence[Mapping[str, str]], width: int
) -> list[dict[str, str]] | None:
    """The rows with long names cut in the middle; None if different names would look alike."""
    widest = {name: max(len(text) for text in (name, *(r[name] for r in rows))) for name in columns}
    texts = sorted((n for n in columns if not _is_numeric(n, rows)), key=lambda name: widest[name])
    room = width - _BETWEEN * (len(columns) + 1)
    room -= sum(widest[name] for name in columns if name not in texts)
    limits = {}
    for number, name in enumerate(texts):
        limits[name] = min(widest[name], max(_FOLDED, room // (len(texts) - number)))
        room -= limits[name]
    cut = [_cut([row[name] for row in rows], limits.get(name, widest[name])) for name in columns]
    if None in cut:
        return None
    return [dict(zip(columns, row, strict=True)) for row in zip(*filter(None, cut), strict=True)]


def _cut(texts: Sequence[str], limit: int) -> list[str] | None:
    """Names of so many letters at most, or None if different ones would look alike.

    What is left out is as near to the middle as it can be: related names often begin alike, and
    end alike. What has spaces is wrapped instead.
    """
    middle = (limit - 1) // 2
    for end in sorted(range(limit), key=lambda end: abs(end - middle)):
        found = [
            text
            if len(text) <= limit or " " in text
            else f"{text[: limit - 1 - end]}…{text[len(text) - end :]}"
            for text in texts
        ]
        if len(set(found)) == len(set(texts)):
            return found
    return None


def _least_width(name: str, rows: Sequence[Mapping[str, str]]) -> int:
    """The least width of a column: numbers are never cut, text is folded."""
    widest = max(len(text) for text in (name, *(row[name] for row in rows)))
    return widest if _is_numeric(name, rows) else min(widest, _FOLDED)


def _is_numeric(name: str, rows: Sequence[Mapping[str, str]]) -> bool:
    return all(row[name][:1] in "+-0123456789" for row in rows)


def _side_by_side(columns: Sequence[str], rows: Sequence[Mapping[str, str]]) -> Table:
    """A line for every row."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True)
    for name in columns:
        is_number = _is_numeric(name, rows)
        table.add_column(
            name, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold"
        )
    for row in rows:
        table.add_row(*(Text(row[name]) for name in columns))
    return table


def _below_each_other(
    columns: Sequence[str], rows: Sequence[Mapping[str, str]], width: int
) -> Table:
    """A line for every cell that has something in it, where rows would be too wide."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE, show_header=False)
    table.add_column("", overflow="fold", style="bold")
    table.add_column("", overflow="fold")
    blanks = 7  # around and between the two
    longest_word = max(len(word) for name in columns for word in name.split())
    room = width - blanks - max(map(len, columns))
    room = max(room, min(_WHOLE, width - blanks - longest_word))  # rather a name in two lines
    cells = {name: [row[name] for row in rows] for name in columns}
    cut = {name: _cut(texts, max(room, _FOLDED)) or texts for name, texts in cells.items()}
    for number, row in enumerate(rows):
        for name in columns:
            if row[name]:
                table.add_row(name, Text(cut[name][number]))
        table.add_section()
    return table


# Progress -------------------------------------------------------------------------------------


class Bar:
    """A bar on stderr for the phase that a command is in. It goes when it is stopped."""

    def __init__(self) -> None:
        self._progress = _open_bar()
        self._task: Any = None
        self._label = ""
        self._progress.start()

    def phase(self, label: str, total: int | None) -> None:
        """Begin a phase, of so many pieces if that is known."""
        if self._task is not None:
            self._progress.refresh()  # how far the phase before came, however short it was
            self._progress.remove_task(self._task)
        self._label = label
        self._task = self._progress.add_task(label, total=total, text="")
        self._progress.refresh()

    def advance(self, count: int, text: str, label: str) -> None:
        """Move on by some pieces; `text` is about the last one."""
        if self._task is None:
            return
        changed, self._label = label != self._label, label
        self._progress.update(self._task, advance=count, text=text, description=label)
        if changed:
            self._progress.refresh()

    def stop(self) -> None:
        """Remove the bar."""
        self._progress.stop()


def _open_bar() -> Any:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    wide = Console(stderr=True, no_color=_no_color())
    columns: list[Any] = [TextColumn("{task.description}"), BarColumn(None)]
    if wide.width >= _NARROW:
        columns += [MofNCompleteColumn(), TextColumn("{task.fields[text]}"), TimeRemainingColumn()]
    return Progress(*columns, console=wide, transient=True, expand=True)


# Runs -----------------------------------------------------------------------------------------


def summarise(result: LearningResult) -> tuple[list[dict[str, str]], str]:
    """What a person wants to see of a run: a table of how it does; where it is and what is next."""
    rows = [
        {
            "task": one.task,
            "on": f"{one.on} test images",
            "zero-shot": f"{one.zero_shot:.2f}",
            "learned": f"{one.learned:.2f}",
        }
        for one in result.tests
    ]
    folder, model, page = (quote(f"{result.folder}{end}") for end in ("", "-model", ".html"))
    lines = [
        f"The run is in {result.folder}. Next:",
        *([f"$ atlas merge {folder} -o {model}"] if result.improved else []),
        f"$ atlas report {folder} -o {page}",
    ]
    return rows, fit("\n".join(lines), _width_of(sys.stdout))
