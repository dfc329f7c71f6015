"""atlas demo: every command on the built-in model, each in a process of its own."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from atlas_cli import __version__
from atlas_cli.cli import console, terminal
from atlas_cli.cli.demo_story import (
    EXPERIMENTS,
    PLACE,
    CommandLine,
    DemoRow,
    Section,
    drawing,
    identity,
    scores_file,
    sections,
    table,
)
from atlas_cli.errors import AtlasError

if TYPE_CHECKING:  # multiprocessing is imported where it is used: other commands start no process
    from multiprocessing.context import BaseContext
    from multiprocessing.process import BaseProcess

_COMMANDS = "atlas_cli.cli.app"  # named by a string: the list of commands imports this module
_SLOW = "atlas_cli.cli.warm"
_STATE = "demo.json"
_AT_ONCE = 2
_RESUMABLE = ("finetune", "fit", "tta", "negate", "add")  # other commands start again
_OVERWRITING = ("inspect",)


def run(place: Path, *, keep: bool, force: bool, output: console.OutputOptions) -> None:
    """Run the demo in a folder, which is removed at the end unless it is kept."""
    tell = _mute if output.quiet else _say
    runner = _open(place, tell, force=force)
    runner.run(sections())
    picture = _draw(runner, keep)
    scores = {one.name: json.loads((place / scores_file(one)).read_text()) for one in EXPERIMENTS}
    seconds = runner.total_seconds
    if keep:
        tell(f"\nEverything is in {place}")
    else:
        shutil.rmtree(place)
    if picture:
        tell(f"The picture is {picture}")
    _show(table(scores), seconds, tell, as_json=output.as_json)


# Running --------------------------------------------------------------------------------------


@dataclass
class CommandRunner:
    """Runs command lines in a folder, and remembers there which are done and how long it took.

    `seconds` is the time that earlier runs of the demo have spent in this folder.
    """

    place: Path
    done: list[str]
    seconds: float
    tell: Callable[[str], None]
    _began: float = field(default_factory=time.monotonic)

    @property
    def total_seconds(self) -> float:
        """The time of this run of the demo and of the earlier ones."""
        return self.seconds + time.monotonic() - self._began

    def run(self, sections: Sequence[Section]) -> None:
        """Run the lines that are not done, in order, each as soon as what it needs is there."""
        waiting = [(section, line) for section in sections for line in section.lines]
        running: dict[CommandLine, Running] = {}
        story = Story(waiting, self.tell)
        with console.Display(quiet=self.tell is _mute) as display:
            display.phase("starting", len(waiting))
            try:
                while waiting or running:
                    ready = _first_ready(waiting, running) if len(running) < _AT_ONCE else None
                    if ready is None:
                        self._finish(running, story)
                        display.advance(1, label=_names(running))
                        continue
                    waiting.remove(ready)
                    line = ready[1]
                    story.begin(line)
                    if str(line) in self.done:
                        story.end(line, "")
                        display.advance(1)
                        continue
                    running[line] = self._begin(line)
                    display.advance(0, label=_names(running))
            finally:
                for process in running.values():
                    process.kill()

    def _begin(self, line: CommandLine) -> Running:
        again = bool(line.made) and (self.place / line.made).exists()
        arguments = [*line.arguments, *(going_on(line) if again else ())]
        stdout = self.place / _unfinished(line) if line.kept else None
        return begin(arguments, self.place, self.place / f".{line.name}.said", stdout)

    def _finish(self, running: dict[CommandLine, Running], story: Story) -> None:
        """Wait for the next process to end, and keep what it wrote."""

        from atlas_cli.io.files import write_text

        ended = first_to_end(running.values())
        line = next(line for line, process in running.items() if process is ended)
        del running[line]
        code, said = ended.end()
        story.end(line, _with_name(line, said))
        if code:
            story.end_all()
            untold = said.splitlines() if self.tell is _mute else []  # but errors are for all
            error = "atlas: error: "
            why = [row.removeprefix(error) for row in untold if row.startswith(error)]
            raise AtlasError(*why, f"{line}: failed with exit code {code}")
        if line.kept:
            (self.place / _unfinished(line)).replace(self.place / line.kept)
        self.done.append(str(line))
        write_text(self.place / _STATE, _state(self.done, self.total_seconds))


def going_on(line: CommandLine) -> tuple[str, ...]:
    """The option with which a line runs where what it makes is there, of an earlier run."""
    command = line.arguments[0]
    if command in _OVERWRITING:
        return ()
    return ("--resume",) if command in _RESUMABLE else ("--force",)


class Story:
    """Tells of command lines in their order, each with what it said, though several run at once.

    A line is shown as soon as it has begun and all before it are told; what it said, when it ends.
    """

    def __init__(
        self, lines: Iterable[tuple[Section, CommandLine]], tell: Callable[[str], None]
    ) -> None:
        self._lines, self._tell = list(lines), tell
        self._begun: set[CommandLine] = set()
        self._said: dict[CommandLine, str] = {}
        self._title, self._shown = "", False

    def begin(self, line: CommandLine) -> None:
        """A line runs from now on."""
        self._begun.add(line)
        self._go_on()

    def end(self, line: CommandLine, said: str) -> None:
        """A line has ended."""
        self._said[line] = said
        self._go_on()

    def end_all(self) -> None:
        """Tell of every line that has ended, though others before it have not."""
        self._lines = [pair for pair in self._lines if pair[1] in self._said]
        self._shown = False
        self._go_on()

    def _go_on(self) -> None:
        while self._lines and (line := self._lines[0][1]) in self._begun:
            if not self._shown:
                title = self._lines[0][0].title
                self._tell(f"\n# {title}" * (title != self._title))
                self._tell(f"$ {line}")
                self._title, self._shown = title, True
            if line not in self._said:
                return
            self._tell(self._said[line])
            del self._lines[0]
            self._shown = False


def _names(running: Iterable[CommandLine]) -> str:
    return ", ".join(line.name for line in running)


def _open(place: Path, tell: Callable[[str], None], *, force: bool) -> CommandRunner:
    """A runner that goes on where an earlier one stopped, or begins in a new folder."""

    from atlas_cli.io.files import write_text

    state = place / _STATE
    try:
        if force and state.exists():
            shutil.rmtree(place)
        place.mkdir(parents=True, exist_ok=True)
        if not state.exists():
            if any(place.iterdir()):
                raise AtlasError(f"{place}: is not empty and holds no demo; choose another -o DIR")
            write_text(state, _state([], 0.0))
        found = json.loads(state.read_text("utf-8"))
    except OSError as problem:
        raise AtlasError(
            f"{place}: cannot be written ({problem.strerror}); choose another folder with -o DIR"
        ) from problem
    if found.get("story") != identity():
        raise AtlasError(f"{place}: holds the demo of another atlas; --force begins anew")
    if found["done"]:
        tell(f"going on in {place}, where {len(found['done'])} commands are done")
    return CommandRunner(place, found["done"], found["seconds"], tell)


def _state(done: Sequence[str], seconds: float) -> str:
    return json.dumps({"story": identity(), "done": done, "seconds": round(seconds, 1)}, indent=1)


def _first_ready(
    waiting: Sequence[tuple[Section, CommandLine]], running: Mapping[CommandLine, Running]
) -> tuple[Section, CommandLine] | None:
    """The first line of the section that needs nothing of those that have not ended."""
    unfinished = [*running, *(line for _, line in waiting)]
    for section, line in waiting:
        if section is waiting[0][0] and not any(line.needs(other) for other in unfinished):
            return section, line
    return None


def _with_name(line: CommandLine, said: str) -> str:
    """Messages that begin with the name of the line instead of atlas, since two lines run."""
    name = f"{line.name}: "
    return re.sub(f"^atlas: ({re.escape(name)})?", name, said.rstrip(), flags=re.MULTILINE)


def _unfinished(line: CommandLine) -> str:
    return f".{line.kept}.part"


def _draw(runner: CommandRunner, kept: bool) -> str | None:
    """Draw the coefficients, if the libraries are there, and say where the picture is."""
    from atlas_cli.reports.plots import missing_library

    if missing_library():
        runner.tell("(with the extra `plot`, a picture of the coefficients is drawn here)")
        return None
    path = Path("coefficients.png") if kept else Path.cwd() / f"{PLACE}.png"
    runner.run([drawing(str(path))])
    return str(runner.place / path)


# Showing --------------------------------------------------------------------------------------


def _show(
    rows: Sequence[DemoRow], seconds: float, tell: Callable[[str], None], *, as_json: bool
) -> None:
    caption = f"Top-1 in percent on test images. {seconds:.0f} s in all."
    facts = [dataclasses.asdict(row) for row in rows]
    if as_json:
        result = {"atlas": __version__, "rows": facts, "seconds": round(seconds, 1)}
        console.emit(result, as_json=True)
        return
    shown = [{name.replace("_", "-"): _cell(value) for name, value in row.items()} for row in facts]
    if console.is_terminal():
        console.emit_table(shown, caption)
    else:
        console.emit_rows(list(shown[0]), [list(row.values()) for row in shown])
        tell(caption)


def _cell(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.1f}"


def _say(text: str) -> None:
    if text:
        console.say(terminal.fit(text, console.stderr_width()))


def _mute(text: str) -> None:
    pass


# Commands as processes ------------------------------------------------------------------------


@dataclass(frozen=True)
class Running:
    """A command line at work, and the file that takes its stderr."""

    process: BaseProcess
    said: Path

    def end(self) -> tuple[int, str]:
        """Wait for it, and give its exit code and its stderr."""
        self.process.join()
        said = self.said.read_text("utf-8", "replace")
        self.said.unlink()
        return self.process.exitcode or 0, said

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.join()
        self.said.unlink(missing_ok=True)


def begin(arguments: Sequence[str], place: Path, said: Path, printed: Path | None) -> Running:
    """Run `atlas ARGUMENTS` in a folder, on one core; `printed` takes its stdout."""
    files = (str(printed.resolve()) if printed else os.devnull, str(said.resolve()))
    os.environ["OMP_NUM_THREADS"] = "1"
    columns = console.stderr_width()
    process = _context().Process(  # type: ignore[attr-defined]
        target=_run, args=(tuple(arguments), str(place), *files, columns)
    )
    process.start()
    return Running(process, said)


def first_to_end(running: Iterable[Running]) -> Running:
    """Wait for the first of several to end, and give it."""
    from multiprocessing.connection import wait

    by_sentinel = {one.process.sentinel: one for one in running}
    return by_sentinel[wait(list(by_sentinel))[0]]  # type: ignore[index]


def _context() -> BaseContext:
    """Fork processes from one that has imported what is slow to import, where the system forks."""
    import multiprocessing

    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_SLOW])
    return context


def _run(
    arguments: tuple[str, ...], place: str, printed: str, said: str, columns: int | None
) -> None:
    """Run a command in this new process, in its own folder and with its own files."""
    import multiprocessing

    _end_with_parent()
    multiprocessing.set_start_method(None, force=True)  # as in any process, not as for this one
    os.chdir(place)
    if columns:
        os.environ[console.SHOWN_COLUMNS] = str(columns)
    for number, path in ((1, printed), (2, said)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666), number)
    sys.exit(importlib.import_module(_COMMANDS).main(arguments))


def _end_with_parent() -> None:
    """Kill this process when its parent ends, for whatever reason."""
    from multiprocessing import parent_process

    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)

    Thread(target=watch, daemon=True).start()
