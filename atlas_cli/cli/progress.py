"""What stderr shows while a command works: a bar on a terminal, now and then a line in a file."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import typer

from atlas_cli import __version__
from atlas_cli.cli import console
from atlas_cli.errors import AtlasError

if TYPE_CHECKING:
    from atlas_cli.learning.events import Event
    from atlas_cli.learning.results import LearningResult

PAUSE = 25.0  # seconds without a line after which a file gets one
_NARROW = 70  # columns below which a bar leaves out numbers


@dataclass(frozen=True)
class OutputOptions:
    """How a result is shown, and how much is said on the way."""

    as_json: bool = False
    quiet: bool = False
    verbose: bool = False


class Display:
    """The phase that a command is in, and how far it has come.

    On a terminal that is a bar, which goes when the command ends. Otherwise a thread writes a line
    whenever nothing was written for a while, so that a log shows that work goes on.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._shown = not quiet and sys.stderr is not None
        self._bar: Any = None
        self._task: Any = None
        self._label, self._text = "", ""
        self._done, self._total = 0, None  # type: tuple[int, int | None]
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._began = time.monotonic()

    def __enter__(self) -> Display:
        if self._shown and sys.stderr.isatty():
            self._bar = _bar()
            self._bar.start()
        elif self._shown:
            self._thread = threading.Thread(target=self._write_lines, daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        if self._bar:
            self._bar.stop()
        if self._thread:
            self._thread.join()

    def phase(self, label: str, total: int | None = None) -> None:
        """Begin a phase, of so many pieces if that is known."""
        self._label, self._text, self._done, self._total = label, "", 0, total
        if self._bar:
            if self._task is not None:
                self._bar.refresh()  # how far the phase before came, however short it was
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task(label, total=total, text="")
            self._bar.refresh()

    def advance(self, count: int = 1, text: str = "", label: str = "") -> None:
        """Move on by some pieces; `text` is about the last one."""
        changed = bool(label) and label != self._label
        self._done += count
        self._text, self._label = text or self._text, label or self._label
        if self._bar and self._task is not None:
            self._bar.update(self._task, advance=count, text=text, description=self._label)
            if changed:
                self._bar.refresh()

    def _write_lines(self) -> None:
        while not self._over.wait(min(PAUSE, 1.0)):
            if self._label and time.monotonic() - max(self._began, console.last_said()) >= PAUSE:
                console.note(self._line())

    def _line(self) -> str:
        """The state in words: epoch 3/10, 27/100, loss 0.512 (70 s)."""
        count = f"{self._done}/{self._total}" if self._total else ""
        words = ", ".join(filter(None, (self._label, count, self._text)))
        return f"{words} ({time.monotonic() - self._began:.0f} s)"


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    wide = Console(stderr=True, no_color=console.no_color())
    columns: list[Any] = [TextColumn("{task.description}"), BarColumn(None)]
    if wide.width >= _NARROW:
        columns += [MofNCompleteColumn(), TextColumn("{task.fields[text]}"), TimeRemainingColumn()]
    return Progress(*columns, console=wide, transient=True, expand=True)


@contextmanager
def progress(label: str, total: int | None, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Show one phase of so many pieces; the function given moves it on."""
    with Display(quiet=quiet) as display:
        display.phase(label, total)
        yield display.advance


# Runs ----------------------------------------------------------------------------------------


class ConsoleListener(ExitStack):
    """Shows what happens in a run on stderr, and asks it to stop when the user interrupts it."""

    def __init__(self, output: OutputOptions) -> None:
        super().__init__()
        self._output = output
        self._display = self.enter_context(Display(quiet=output.quiet))
        self._training = ExitStack()
        self._interrupted: list[int] = []
        self._epochs = 0
        self._last_step = 0.0

    def stop(self) -> bool:
        """Whether the user interrupted the training."""
        return bool(self._interrupted)

    def __call__(self, event: Event) -> None:
        """Show an event."""
        from atlas_cli.learning.events import (  # help needs none of them
            EpochScored,
            Noted,
            PhaseStarted,
            Planned,
            StepTaken,
            TaskFinished,
            TrainingEnded,
            TrainingStarted,
            Warned,
        )

        match event:
            case Warned(text):
                self.note(f"warning: {text}")
            case Noted(text):
                self.note(text)
            case Planned(lines, details):
                self.note(*lines)
                self.explain(*details)
            case PhaseStarted(name):
                self._display.phase(name)
            case TrainingStarted(steps, epochs):
                self._interrupted = self._training.enter_context(console.stoppable())
                self._epochs, self._last_step = epochs, 0.0
                if steps is not None:
                    self._display.phase("decoding images", steps)
            case StepTaken(step, batch_size, measure):
                word = "training top-1" if measure == "top1" else measure
                now, before = time.monotonic(), self._last_step
                self._last_step = now
                speed = f", {batch_size / (now - before):.0f} images/s" if before else ""
                text = f"loss {step.loss:.3f}, {word} {100 * step.accuracy:.1f}{speed}"
                self._display.advance(1, text, _epoch(step.epoch, self._epochs))
            case TrainingEnded():
                self._training.close()
            case EpochScored(task, epoch, accuracy, images):
                when = f"epoch {epoch}" if epoch else "zero-shot"
                self.note(f"{task}: {when}: top-1 {accuracy:.2f} on images {images}")
            case TaskFinished(result):
                if not self._output.as_json:
                    console.emit(result)

    def note(self, *lines: str) -> None:
        """Say something, unless it is to be quiet."""
        if not self._output.quiet:
            for line in lines:
                console.note(line)

    def explain(self, *lines: str) -> None:
        """Say what was decided and why, if that is asked for."""
        if self._output.verbose:
            self.note(*lines)


def _epoch(number: int, epochs: int) -> str:
    return f"epoch {number}/{epochs}" if epochs else f"epoch {number}"


# Running a learning verb ----------------------------------------------------------------------


def run_learning(verb: Callable[..., LearningResult], output: OutputOptions) -> None:
    """Run a verb, show its result, and leave with the exit code that it deserves."""
    with ConsoleListener(output) as listener:
        result = verb(on_event=listener, stop=listener.stop)
    summary = result.folder is not None and console.is_terminal() and not output.as_json
    shown = set(map(str, result.tests)) if summary else set()  # the summary has these
    listener.note(*(line for line in result.notes if line not in shown))
    listener.explain(*result.details)
    if result.rows and not output.quiet:
        console.tell_table([_cells(row) for row in result.rows])
    if output.as_json:
        console.emit({"atlas": __version__, **result.facts}, as_json=True)
    elif summary:
        _show_summary(result)
    else:
        console.write(result.text)
    if result.stopped:
        raise typer.Exit(130)
    if result.failed:
        raise AtlasError(result.failed)


def _cells(row: Mapping[str, str | float | None]) -> dict[str, str]:
    return {k: cell if isinstance(cell, str) else console.percent(cell) for k, cell in row.items()}


def _show_summary(result: LearningResult) -> None:
    """What a person wants to see of a run: how it does, where it is, and what comes next."""
    rows = [
        {
            "top-1 in percent": one.task,
            "on": f"{one.on} test images",
            "zero-shot": f"{one.zero_shot:.2f}",
            "learned": f"{one.learned:.2f}",
        }
        for one in result.tests
    ]
    if rows:
        console.emit_table(rows, "")
    console.emit(f"The run is in {result.folder}. Next:")
    if result.improved:
        console.emit(f"  atlas merge {result.folder} -o {result.folder}-model")
    console.emit(f"  atlas report {result.folder} -o {result.folder}.html")
