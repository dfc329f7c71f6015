"""What `atlas demo` does: command lines as real processes, two at a time, each done once."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from atlas_cli import __version__
from atlas_cli.commands import output
from atlas_cli.demo import PLACE, TALES, Line, Row, chapters, identity, picture, scores_file, table
from atlas_cli.errors import AtlasError
from atlas_cli.files import write_text

_NOTES = "demo.json"
_AT_ONCE = 2
_RUNS = ("finetune", "fit", "tta", "negate", "add")  # these go on with --resume, others anew
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def run(folder: Path | None, *, keep: bool, force: bool, as_json: bool) -> None:
    """Tell the story and print the table."""
    place = folder or Path(PLACE)
    kept = keep or folder is not None
    story = _open(place, force=force)
    for chapter in chapters():
        _say(f"\n# {chapter.title}")
        for start in range(0, len(chapter.lines), _AT_ONCE):
            story.tell(chapter.lines[start : start + _AT_ONCE])
    drawn = _draw(story, kept)
    scores = {tale.name: json.loads((place / scores_file(tale)).read_text()) for tale in TALES}
    rows = table(scores)
    took = story.took
    if kept:
        _say(f"\nEverything is in {place}")
    else:
        shutil.rmtree(place)
    if drawn:
        _say(f"The picture is {drawn}")
    _show(rows, took, as_json)


def _open(place: Path, *, force: bool) -> Story:
    """The story where it was left, or from the beginning."""
    notes = place / _NOTES
    try:
        if force and notes.exists():
            shutil.rmtree(place)
        place.mkdir(parents=True, exist_ok=True)
        if not notes.exists():
            if any(place.iterdir()):
                raise AtlasError(f"{place}: is not empty and holds no demo; choose another -o DIR")
            write_text(notes, _notes([], 0.0))
        found = json.loads(notes.read_text("utf-8"))
    except OSError as problem:
        raise AtlasError(
            f"{place}: cannot be written ({problem.strerror}); choose another folder with -o DIR"
        ) from problem
    if found.get("story") != identity():
        raise AtlasError(f"{place}: holds the demo of another atlas; --force begins anew")
    if found["done"]:
        _say(f"going on in {place}, where {len(found['done'])} commands are done")
    return Story(place, found["done"], found["seconds"])


def _notes(done: Sequence[str], seconds: float) -> str:
    return json.dumps({"story": identity(), "done": done, "seconds": round(seconds, 1)}, indent=1)


@dataclass
class Story:
    """What was told so far, in a folder; `seconds` are those of earlier goes."""

    place: Path
    done: list[str]
    seconds: float
    _began: float = field(default_factory=time.monotonic)

    def tell(self, lines: Sequence[Line]) -> None:
        """Run lines side by side, but those that are done."""
        begun = []
        try:
            for line in lines:
                _say(f"$ {line}")
                if str(line) not in self.done:
                    begun.append((line, self._begin(line)))
            for line, process in begun:
                said = process.communicate()[1]
                _say(said.rstrip())
                if process.returncode:
                    raise AtlasError(f"{line}: failed with exit code {process.returncode}")
                self._finish(line)
        finally:
            for _, process in begun:
                process.kill()
                process.wait()

    def _begin(self, line: Line) -> subprocess.Popen[str]:
        again = bool(line.made) and (self.place / line.made).exists()
        resumed = ("--resume" if line.arguments[0] in _RUNS else "--force",) if again else ()
        with (self.place / _printed(line)).open("w") if line.kept else _nowhere() as stdout:
            return subprocess.Popen(
                [sys.executable, "-m", "atlas_cli", *line.arguments, *resumed],
                cwd=self.place,
                stdout=stdout,
                stderr=subprocess.PIPE,
                text=True,
                preexec_fn=_end_with_parent,
                env={**os.environ, "OMP_NUM_THREADS": "1"},  # two processes share the cores
            )

    def _finish(self, line: Line) -> None:
        if line.kept:
            (self.place / _printed(line)).replace(self.place / line.kept)
        self.done.append(str(line))
        write_text(self.place / _NOTES, _notes(self.done, self.took))

    @property
    def took(self) -> float:
        """The seconds of all goes together."""
        return self.seconds + time.monotonic() - self._began


def _printed(line: Line) -> str:
    return f".{line.kept}.part"


def _nowhere() -> IO[str]:
    return Path(os.devnull).open("w")


def _end_with_parent() -> None:
    """Have a process end when this one does, however that ends; only Linux can."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)


# The end ----------------------------------------------------------------------------------------


def _draw(story: Story, kept: bool) -> str | None:
    """Draw the coefficients, if the libraries are there; where the picture is."""
    if importlib.util.find_spec("altair") is None or importlib.util.find_spec("vl_convert") is None:
        _say("(with the extra `plot`, a picture of the coefficients is drawn here)")
        return None
    path = Path("coefficients.png") if kept else Path.cwd() / f"{PLACE}.png"
    _say("\n# Draw the coefficients that recognise house numbers")
    story.tell([picture(str(path))])
    return str(story.place / path)


def _show(rows: Sequence[Row], took: float, as_json: bool) -> None:
    caption = f"Top-1 in percent on test images. {took:.0f} s in all."
    if as_json:
        found = [dataclasses.asdict(row) for row in rows]
        output.emit({"atlas": __version__, "rows": found, "seconds": round(took, 1)}, as_json=True)
        return
    shown = [
        {name.replace("_", "-"): _cell(value) for name, value in dataclasses.asdict(row).items()}
        for row in rows
    ]
    if output.is_terminal():
        output.emit_table(shown, caption)
    else:
        output.emit_rows(list(shown[0]), [list(row.values()) for row in shown])
        _say(caption)


def _cell(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.1f}"


def _say(text: str) -> None:
    if text:
        output.say(text)
