"""Write docs/screens.md and docs/screens/*.svg: what the main commands show on a terminal.

python docs/build_screens.py

Every command runs on a terminal of its own, one after the other in one folder, and the screen is
drawn as it is when the command has ended. The only words that are changed are times, to `…`.
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import tempfile
import termios
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path

COLUMNS = 80
PAGE = Path(__file__).parent / "screens.md"
FOLDER = Path(__file__).parent / "screens"
INTRODUCTION = """# Screens

What the main commands show on a terminal of 80 columns, with the built-in model. This page and its
pictures are made by `python docs/build_screens.py`. In a pipe the same commands print CSV, a recipe
or a path, and `--json` prints one object ([commands](commands.md)).
"""
BASE = "--model builtin:tiny --vectors builtin:digits builtin:letters builtin:signs"
# Name of the picture, what it shows, and the command line.
SCREENS = {
    "help": ("All commands.", "atlas --help"),
    "fit": (
        "Learn coefficients from four images per class. Test images are scored before and after.",
        f"atlas fit builtin:house_numbers --shots 4 {BASE} --epochs 2 -o run",
    ),
    "merge": ("Merge what was learned.", "atlas merge run -o run-model"),
    "eval": (
        "Score models side by side; each is compared with the first.",
        "atlas eval builtin:tiny run-model --data builtin:house_numbers builtin:digits --shots 20",
    ),
    "tta": (
        "Adapt to images without labels, and say why with `-v`.",
        f"atlas tta builtin:house_numbers --split val {BASE} --epochs 1 -v -o adapted",
    ),
    "inspect": (
        "How task vectors relate to each other.",
        "atlas inspect builtin:digits builtin:letters builtin:signs",
    ),
    "report": ("Put runs on one page.", "atlas report run adapted -o report.html"),
    "mistake": (
        "A mistake is one line with the way out.",
        "atlas fit builtin:house_numbres --shots 4 --model builtin:tiny --vectors builtin:digits",
    ),
}
# rich's own template asks a server for a font; a picture needs no network.
FORMAT = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: "DejaVu Sans Mono", Menlo, Consolas, monospace;
  font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


@dataclass
class Screen:
    """What a terminal shows: rows of characters with their colours. Only what rich writes counts.

    The cursor moves up and to the start of a line, lines are erased, and colours change.
    """

    columns: int
    rows: list[list[tuple[str, str]]] = field(default_factory=lambda: [[]])
    row: int = 0
    column: int = 0
    colour: str = ""

    def write(self, text: str) -> None:
        """Show what a program writes."""
        for escape, number, kind, plain in re.findall(
            r"(\x1b\[\??([\d;]*)([A-Za-z]))|([^\x1b])", text
        ):
            if plain:
                self._put(plain)
            elif kind == "m":
                self.colour = "" if number in ("", "0") else self.colour + escape
            elif kind == "A":
                self.row = max(0, self.row - int(number or 1))
            elif kind == "K":
                self.rows[self.row] = [] if number == "2" else self.rows[self.row][: self.column]

    def _put(self, character: str) -> None:
        if character == "\r":
            self.column = 0
            return
        if character == "\n" or self.column == self.columns:
            self.row, self.column = self.row + 1, 0 if character != "\n" else self.column
            if self.row == len(self.rows):
                self.rows.append([])
        if character != "\n":
            line = self.rows[self.row]
            line += [(" ", "")] * (self.column + 1 - len(line))
            line[self.column] = (character, self.colour)
            self.column += 1

    def lines(self) -> list[str]:
        """The lines with their colours, without empty ones at the end."""
        found = []
        for row in self.rows:
            parts = [(c, "".join(x for x, _ in some)) for c, some in groupby(row, itemgetter(1))]
            found.append("".join(f"{c}{text}\x1b[0m" if c else text for c, text in parts))
        while found and not found[-1].strip():
            found.pop()
        return found

    def plain(self) -> str:
        """What there is to read."""
        return "\n".join("".join(c for c, _ in row).rstrip() for row in self.rows).strip("\n")


def show(line: str, folder: Path, columns: int = COLUMNS) -> Screen:
    """Run a command line on a terminal in a folder, and give the screen that it leaves."""
    reader, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = os.environ | {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
    for name in ("COLUMNS", "NO_COLOR"):
        environment.pop(name, None)
    words = [sys.executable, "-m", "atlas_cli", *shlex.split(line)[1:]]
    process = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=terminal,
        stderr=terminal,
        env=environment,
        cwd=folder,
    )
    os.close(terminal)
    said = b""
    with suppress(OSError):  # how the end of a terminal is told
        while piece := os.read(reader, 65536):
            said += piece
    process.wait()
    os.close(reader)
    screen = Screen(columns)
    screen.write(re.sub(r"\b\d+(\.\d+)? s\b", "… s", said.decode("utf-8")))
    return screen


def drawn(name: str, line: str, screen: Screen) -> str:
    """A screen as SVG, below the command line that made it."""
    from rich.console import Console
    from rich.text import Text

    console = Console(
        record=True,
        width=screen.columns,
        file=io.StringIO(),
        force_terminal=True,
        legacy_windows=False,
    )
    console.print(Text(f"$ {line}", style="bold"), soft_wrap=False)
    for text in screen.lines():
        console.print(Text.from_ansi(text), overflow="ignore", no_wrap=True)
    found: str = console.export_svg(title="atlas", code_format=FORMAT, unique_id=f"atlas-{name}")
    return "\n".join(part.rstrip() for part in found.splitlines()) + "\n"


def page() -> str:
    """The text of docs/screens.md."""
    sections = [
        f"\n## {name}\n\n{about}\n\n![{line}](screens/{name}.svg)\n"
        for name, (about, line) in SCREENS.items()
    ]
    return INTRODUCTION + "".join(sections)


def pictures(names: tuple[str, ...] = tuple(SCREENS)) -> dict[str, str]:
    """The pictures by name; those that are named, in their order."""
    with tempfile.TemporaryDirectory(prefix="atlas-screens-") as folder:
        found = {}
        for name in names:
            line = SCREENS[name][1]
            found[name] = drawn(name, line, show(line, Path(folder)))
        return found


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, picture in pictures().items():
        (FOLDER / f"{name}.svg").write_text(picture, "utf-8")
    PAGE.write_text(page(), "utf-8")
