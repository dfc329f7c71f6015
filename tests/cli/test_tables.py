"""Tables on a terminal of any width: no number is cut, and no line is too long."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from pathlib import Path
from types import SimpleNamespace

import pytest

from atlas_cli.cli import terminal

ROWS = [
    {"model": "builtin:tiny", "images": "1,000", "top-1": "36.90", "delta": "", "p": ""},
    {"model": "models/learned", "images": "1,000", "top-1": "75.70", "delta": "+38.8", "p": "1e-9"},
]
SCRIPT = f"from atlas_cli.cli import console; console.emit_table({ROWS!r}, 'split: test')"
ROOT = Path(__file__).parent.parent.parent


TOLD = [{"top-1 in percent": "learned", "target builtin:signs": 25.0, "control builtin:all": 97.5}]
MESSAGES = f"""
from atlas_cli.cli import console
console.note("validation top-1 on images held out: zero-shot 35.00 -> learned 80.00")
console.note("error: something is not there; run: pip install 'this>=1' 'that>=2'")
console.tell_table({TOLD!r})
"""


def drawn(width: int, script: str = SCRIPT) -> list[str]:
    """The lines that a terminal of a width is given."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    environment = {**os.environ, "NO_COLOR": "1", "PYTHONPATH": str(ROOT)}
    environment.pop("COLUMNS", None)
    program = [sys.executable, "-c", script]
    subprocess.run(program, stdout=theirs, stderr=theirs, env=environment, check=True)
    os.close(theirs)
    found = os.read(ours, 1 << 16).decode()
    os.close(ours)
    return re.sub(r"\x1b\[[0-9;]*m", "", found).replace("\r\n", "\n").splitlines()


@pytest.mark.parametrize("width", [24, 40, 60, 120])
def test_every_number_is_whole_and_every_line_fits(width: int) -> None:
    lines = drawn(width)
    assert max(map(len, lines)) <= width
    words = " ".join(lines).split()
    for row in ROWS:
        assert {row[name] for name in ("images", "top-1", "delta", "p")} - {""} <= set(words)


def test_a_wide_terminal_has_a_line_for_every_row_and_a_narrow_one_for_every_cell() -> None:
    assert "  builtin:tiny     1,000  36.90               " in drawn(80)
    narrow = [line.split() for line in drawn(30)[1:6]]
    assert narrow[:3] == [["model", "builtin:tiny"], ["images", "1,000"], ["top-1", "36.90"]]
    assert narrow[3:] == [[], ["model", "models/learned"]]  # no line for what is empty
    assert drawn(24)[1].split() == ["model", "built…:tiny"]


def test_messages_keep_their_words_whole_and_errors_their_commands() -> None:
    """Tables among them are drawn as those on stdout are."""
    lines = drawn(40, MESSAGES)
    assert lines[:2] == [
        "atlas: validation top-1 on images held",
        "  out: zero-shot 35.00 -> learned 80.00",
    ]
    assert lines[2].endswith("; run: pip install 'this>=1' 'that>=2'")
    cells = [line.split("  ") for line in map(str.strip, lines[3:]) if line]
    assert [[part.strip() for part in cell if part] for cell in cells] == [
        ["top-1 in percent", "learned"],
        ["target builtin:signs", "25.00"],
        ["control builtin:all", "97.50"],
    ]


def test_a_short_cell_is_whole_beside_a_long_name() -> None:
    """The name takes two lines instead."""
    row = {"method": "zero-shot", "control builtin:everything": "98.12", "target a": "1.00"}
    shown = terminal.draw_table([row], "", 40, plain=True)
    lines = [line.strip().split("  ") for line in shown.splitlines()]
    assert [line[-1].strip() for line in lines if len(line) > 1] == ["zero-shot", "98.12", "1.00"]
    assert max(map(len, shown.splitlines())) <= 40


def test_a_command_line_is_broken_so_that_it_can_be_copied(tmp_path: Path) -> None:
    line = "$ printf '%s|' --data a b 'c  d' --epochs 5 -o \"e ' f\" --json > said.txt"
    for width in (12, 20, 30, 40, 80):
        shown = terminal.fit(f"# A title of several words\n{line}", width)
        words = [row for row in shown.splitlines() if row.startswith("# ")]
        assert " ".join(row[2:] for row in words) == "A title of several words"
        assert max(map(len, shown.splitlines())) <= max(width, 20)
        assert "--epochs 5" in shown
        assert "> said.txt" in shown  # an option stays with its value
        command = shown.partition("$ ")[2]
        subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True)
        assert (tmp_path / "said.txt").read_text() == "--data|a|b|c  d|--epochs|5|-o|e ' f|--json|"
    assert terminal.fit(line, None) == line  # of a file


def test_a_table_that_another_process_shows_fits_its_terminal(run_python) -> None:
    """`atlas demo` shows what its commands say; without a terminal a row is a line."""
    rows = [{"top-1 in percent": "learned", **{f"builtin:task{n}": 97.5 for n in range(6)}}]
    code = "import sys; sys.stderr = sys.stdout; from atlas_cli.cli import console; "
    code += f"console.tell_table({rows!r})"
    assert max(map(len, run_python(code).splitlines())) > 80
    for columns in (40, 80):
        shown = run_python(code, ATLAS_SHOWN_COLUMNS=str(columns))
        assert max(map(len, shown.splitlines())) <= columns
        assert shown.split().count("97.50") == 6
        assert "\x1b" not in shown


def test_a_long_name_is_cut_in_the_middle_and_never_broken() -> None:
    name = "models/experiments/2026/learned_on_house_numbers"
    rows = [{"model": name, "data": "digits", "top-1": "36.90"}]
    (cut,) = terminal._shortened(["model", "data", "top-1"], rows, 40) or ()
    assert (cut["data"], cut["top-1"]) == ("digits", "36.90")
    assert len(cut["model"]) == 40 - 2 * 4 - len("digits") - len("36.90")
    start, end = cut["model"].split("…")
    assert name.startswith(start)
    assert name.endswith(end)
    assert min(len(start), len(end)) > 8
    assert terminal._shortened(["model", "data", "top-1"], rows, 100) == rows


def test_different_names_never_look_alike_however_narrow_the_terminal() -> None:
    kinds = ("mlp.c_fc.bias", "mlp.c_proj.bias", "attn.in_proj_bias", "attn.out_proj.bias")
    rows = [{"kind": name, "mean": "+0.100", "lowest": "-0.100", "n": "1"} for name in kinds]
    for width in (28, 32, 36):
        lines = terminal.draw_table(rows, "", width, plain=True).splitlines()
        firsts = [line.split()[0] for line in lines if "+0.100" in line]
        assert len(set(firsts)) == (4 if width > 30 else 1)  # where no cut helps, a line per cell
    ends = [{"model": f"models/run{n}/at-the-end-of-it", "top-1": "1.00"} for n in range(12)]
    shown = terminal.draw_table(ends, "", 24, plain=True).split()
    assert len({word for word in shown if "…" in word}) == 12


def test_a_caption_has_the_width_of_the_terminal_not_of_the_table() -> None:
    shown = terminal.draw_table([{"n": "1"}], "what these numbers are, in many words", 60)
    assert "what these numbers are, in many words" in shown


def test_commands_of_a_summary_can_be_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the folder has a space in its name and the terminal is narrow."""
    folder = Path("runs of today/signs with few shots")
    result = SimpleNamespace(tests=(), improved=True, folder=folder)
    monkeypatch.setattr(terminal, "_width_of", lambda stream: 40)
    _, text = terminal.summarise(result)  # type: ignore[arg-type]
    commands = text.partition("Next:\n")[2].replace("\\\n", " ").splitlines()
    assert [shlex.split(line)[1:] for line in commands] == [
        ["atlas", "merge", str(folder), "-o", f"{folder}-model"],
        ["atlas", "report", str(folder), "-o", f"{folder}.html"],
    ]
