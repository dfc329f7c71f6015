"""atlas demo: the whole story on the built-in model."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from atlas_cli import __version__
from atlas_cli.cli import console
from atlas_cli.cli.demo_story import (
    PLACE,
    TALES,
    Chapter,
    StoryLine,
    TableRow,
    chapters,
    drawing,
    identity,
    scores_file,
    table,
)
from atlas_cli.cli.options import AsJson, Force
from atlas_cli.cli.process import Running, begin, first_to_end
from atlas_cli.errors import AtlasError
from atlas_cli.io.files import write_text
from atlas_cli.reports.plots import missing_library

_NOTES = "demo.json"
_AT_ONCE = 2
_RUNS = ("finetune", "fit", "tta", "negate", "add")  # these go on with --resume, others anew


def run(folder: Path | None, *, keep: bool, force: bool, as_json: bool) -> None:
    """Tell the story and print the table."""
    place = folder or Path(PLACE)
    kept = keep or folder is not None
    story = _open(place, force=force)
    story.tell(chapters())
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

    def tell(self, chapters: Sequence[Chapter]) -> None:
        """Run the lines that are not done, in order, each as soon as what it needs is there."""
        waiting = [(chapter, line) for chapter in chapters for line in chapter.lines]
        running: dict[StoryLine, Running] = {}
        title = ""
        try:
            while waiting or running:
                ready = _first_ready(waiting, running) if len(running) < _AT_ONCE else None
                if ready is None:
                    self._finish(running)
                    continue
                waiting.remove(ready)
                chapter, line = ready
                _say(f"\n# {chapter.title}" * (chapter.title != title))
                title = chapter.title
                _say(f"$ {line}")
                if str(line) not in self.done:
                    running[line] = self._begin(line)
        finally:
            for one in running.values():
                one.kill()

    def _begin(self, line: StoryLine) -> Running:
        again = bool(line.made) and (self.place / line.made).exists()
        resumed = ("--resume" if line.arguments[0] in _RUNS else "--force",) if again else ()
        printed = self.place / _printed(line) if line.kept else None
        said = self.place / f".{line.name}.said"
        return begin([*line.arguments, *resumed], self.place, said, printed)

    def _finish(self, running: dict[StoryLine, Running]) -> None:
        """Wait for one of the lines that run, and let it say what it has to say."""
        first = first_to_end(running.values())
        line = next(line for line, one in running.items() if one is first)
        del running[line]
        code, said = first.end()
        _say(_in_its_name(line, said))
        if code:
            raise AtlasError(f"{line}: failed with exit code {code}")
        if line.kept:
            (self.place / _printed(line)).replace(self.place / line.kept)
        self.done.append(str(line))
        write_text(self.place / _NOTES, _notes(self.done, self.took))

    @property
    def took(self) -> float:
        """The seconds of all goes together."""
        return self.seconds + time.monotonic() - self._began


def _first_ready(
    waiting: Sequence[tuple[Chapter, StoryLine]], running: Mapping[StoryLine, Running]
) -> tuple[Chapter, StoryLine] | None:
    """The first line of the chapter that needs nothing of those that are still to end."""
    unfinished = [*running, *(line for _, line in waiting)]
    for chapter, line in waiting:
        if chapter is waiting[0][0] and not any(line.needs(other) for other in unfinished):
            return chapter, line
    return None


def _in_its_name(line: StoryLine, said: str) -> str:
    """What a line said, with its name for that of atlas, since two talk at a time."""
    its = f"{line.name}: "
    return re.sub(f"^atlas: ({re.escape(its)})?", its, said.rstrip(), flags=re.MULTILINE)


def _printed(line: StoryLine) -> str:
    return f".{line.kept}.part"


# The end ----------------------------------------------------------------------------------------


def _draw(story: Story, kept: bool) -> str | None:
    """Draw the coefficients, if the libraries are there; where the picture is."""
    if missing_library():
        _say("(with the extra `plot`, a picture of the coefficients is drawn here)")
        return None
    path = Path("coefficients.png") if kept else Path.cwd() / f"{PLACE}.png"
    story.tell([drawing(str(path))])
    return str(story.place / path)


def _show(rows: Sequence[TableRow], took: float, as_json: bool) -> None:
    caption = f"Top-1 in percent on test images. {took:.0f} s in all."
    if as_json:
        found = [dataclasses.asdict(row) for row in rows]
        console.emit({"atlas": __version__, "rows": found, "seconds": round(took, 1)}, as_json=True)
        return
    shown = [
        {name.replace("_", "-"): _cell(value) for name, value in dataclasses.asdict(row).items()}
        for row in rows
    ]
    if console.is_terminal():
        console.emit_table(shown, caption)
    else:
        console.emit_rows(list(shown[0]), [list(row.values()) for row in shown])
        _say(caption)


def _cell(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.1f}"


def _say(text: str) -> None:
    if text:
        console.say(text)


Folder = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="DIR", help="Folder to work in, which is kept."),
]
Keep = Annotated[bool, typer.Option("--keep", help="Leave every file in place to play with.")]


def demo(
    folder: Folder = None, keep: Keep = False, force: Force = False, as_json: AsJson = False
) -> None:
    """Tell the whole story on the built-in model, with no download, and print a table of results.

    Each command line is printed before it runs. It works in ./atlas-demo, which is removed at the
    end unless --keep or -o is given; after a kill, the same command goes on where it stopped.

    Example: atlas demo --keep
    """

    run(folder, keep=keep, force=force, as_json=as_json)
