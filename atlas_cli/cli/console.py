"""Where commands meet the user: options and recipes in, results, messages and progress out."""

from __future__ import annotations

import dataclasses
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

import typer

from atlas_cli import __version__
from atlas_cli.errors import AtlasError, ClosedError, UsageError

if TYPE_CHECKING:
    from atlas_cli.cli.terminal import Bar
    from atlas_cli.learning.events import Event
    from atlas_cli.learning.results import LearningResult
    from atlas_cli.learning.run import RunOptions
    from atlas_cli.recipes.model import AnyRecipe

CLOSED = "stdout was closed before everything was written"
_LAYOUT, _BLANKS = "\n\t", "\u00a0\u3000"  # Python does not count these spaces as printable
SHOWN_COLUMNS = "ATLAS_SHOWN_COLUMNS"  # of the terminal on which another process shows stderr
_said = [0.0]  # when stderr was last written
_PIECE = 1 << 15  # half of what a pipe holds
PAUSE = 25.0  # seconds without a line after which a file gets one
_MOST_TEXT = 16_000_000  # bytes
_EXAMPLES = {"model": "builtin:tiny", "vectors": "v/", "control": "builtin:everything"}


def emit(result: object, *, as_json: bool = False) -> None:
    """Write a result to stdout: as JSON, or as its own text."""
    if as_json:
        import json

        value = dataclasses.asdict(result) if dataclasses.is_dataclass(result) else result  # type: ignore[arg-type]
        write(printable(json.dumps(value, indent=2, ensure_ascii=False), "\n") + "\n")
    else:
        write(f"{printable(str(result), _LAYOUT) if is_terminal() else result}\n")


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
    from atlas_cli.cli import terminal

    rows = [{name: printable(cell) for name, cell in row.items()} for row in rows]
    write(terminal.draw_table(rows, caption))


def write(text: str) -> None:
    """Write text to stdout. Raises AtlasError unless all of it is written."""
    with open_stdout() as stdout:
        for start in range(0, len(text), _PIECE):  # a reader that left is noticed between pieces
            stdout.write(text[start : start + _PIECE])
            stdout.flush()


@contextmanager
def open_stdout() -> Iterator[TextIO]:
    """Stdout, to write to. Raises AtlasError unless all of it is written."""
    if sys.stdout is None:
        raise AtlasError(CLOSED)
    try:
        yield sys.stdout
        sys.stdout.flush()
    except OSError as problem:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the close at exit
        if isinstance(problem, BrokenPipeError):
            raise ClosedError(CLOSED) from problem
        raise AtlasError(f"stdout: cannot be written: {problem.strerror}") from problem


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


def is_terminal(name: str = "stdout") -> bool:
    """Whether stdout, or stderr, is a terminal."""
    return (stream := getattr(sys, name)) is not None and bool(stream.isatty())


def stderr_width() -> int | None:
    """The width of the terminal that shows stderr, also by way of `atlas demo`; None of a file."""
    if is_terminal("stderr"):
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    return int(os.environ.get(SHOWN_COLUMNS, 0)) or None


# Messages ---------------------------------------------------------------------------------------


def say(text: str) -> None:
    """Write lines to stderr. A result does not depend on whether anybody hears of it."""
    with suppress(OSError, ValueError):
        if sys.stderr is not None:
            sys.stderr.write(f"{printable(text, _LAYOUT)}\n")
            sys.stderr.flush()
            _said[0] = time.monotonic()


def note(text: str) -> None:
    """Write a message to stderr, in one line behind the name of the program."""
    line = f"atlas: {printable(text)}"  # an error may end in a command, which is to be copied
    if is_terminal("stderr") and not text.startswith("error: "):
        from atlas_cli.cli.terminal import fit

        line = fit(line, stderr_width())
    say(line)


def warner(*, quiet: bool) -> Callable[[str], None]:
    """What writes warnings, or nothing if it is to be quiet."""
    return (lambda text: None) if quiet else warn


def warn(text: str) -> None:
    """Write a warning to stderr."""
    note(f"warning: {text}")


def tell_table(rows: Sequence[Mapping[str, str | float | None]]) -> None:
    """Write rows to stderr, one line each, in columns. Numbers are percent."""
    found = [
        {k: f"{v:.2f}" if isinstance(v, float) else printable(v or "") for k, v in row.items()}
        for row in rows
    ]
    if width := stderr_width():
        from atlas_cli.cli import terminal

        return say(terminal.draw_table(found, "", width, plain=True).rstrip())
    lines = [[*found[0]], *([*row.values()] for row in found)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]
        say(f"  {'  '.join(cells).rstrip()}")


# Reading ----------------------------------------------------------------------------------------


def read_text(name: str) -> tuple[str, str]:
    """The text of a recipe, from a file or, for -, from stdin; and the name that errors use."""
    from atlas_cli.io.files import read_regular

    try:
        if name == "-":
            from atlas_cli.cli.stdin import read_stdin

            return read_stdin(_MOST_TEXT), "stdin"
        return read_regular(Path(name), _MOST_TEXT).decode("utf-8"), name
    except FileNotFoundError as problem:
        raise UsageError(f"no such recipe: {name}") from problem
    except (OSError, ValueError) as problem:
        raise UsageError(f"{name}: cannot be read as UTF-8 text") from problem


def learning_options(
    shared: Mapping[str, Any], own: Mapping[str, Any]
) -> tuple[dict[str, Any], RunOptions, OutputOptions]:
    """The keys of a recipe that were given, how to run, and how to show the run.

    `own` are keys beside the `shared` ones. A switch that is off or an empty list was not given.
    """
    from atlas_cli.learning.run import RunOptions  # only once a command is run

    given = {**shared, **own}
    output = OutputOptions(*(given.pop(name) for name in ("as_json", "quiet", "verbose")))
    names = [field.name for field in dataclasses.fields(RunOptions) if field.name in given]
    options = RunOptions(**{name: given.pop(name) for name in names})
    flags = {k: v for k, v in given.items() if v is not None and v is not False and v != []}
    return flags, options, output


def given_recipe(
    schema: type[AnyRecipe],
    data: str | Sequence[str],
    flags: Mapping[str, Any],
    needed: Collection[str] = (),
) -> AnyRecipe:
    """The recipe of a command: a file with the flags laid over it, or the flags alone.

    `data` is a text if the recipe's data is one. `needed` are keys that flags alone must give.
    """
    from atlas_cli.recipes.model import check_recipe, read_recipe

    first, *others = [data] if isinstance(data, str) else data
    if not others and (first == "-" or first.endswith((".yaml", ".yml"))):
        return read_recipe(schema, *read_text(first), flags)
    for key, field in schema.model_fields.items():
        required = key in needed or (field.is_required() and key != "data")
        if required and not flags.get(key):
            raise UsageError(f"no {key} given; for example --{key} {_EXAMPLES[key]}")
    return check_recipe(schema, {"data": data, **flags}, "--")


# Progress ---------------------------------------------------------------------------------------


class Display:
    """The phase that a command is in, and how far it has come.

    On a terminal that is a bar, which goes when the command ends. Otherwise a thread writes a line
    whenever nothing was written for a while, so that a log shows that work goes on.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._shown = not quiet and sys.stderr is not None
        self._bar: Bar | None = None
        self._thread: threading.Thread | None = None
        self._label, self._text = "", ""
        self._done, self._total = 0, None  # type: tuple[int, int | None]
        self._over = threading.Event()
        self._began = time.monotonic()

    def __enter__(self) -> Display:
        if self._shown and sys.stderr.isatty():
            from atlas_cli.cli.terminal import Bar

            self._bar = Bar()
        elif self._shown and not stderr_width():
            self._thread = threading.Thread(target=self._write_lines, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self._over.set()
        if self._bar:
            self._bar.stop()
        if self._thread:
            self._thread.join()

    def phase(self, label: str, total: int | None = None) -> None:
        """Begin a phase, of so many pieces if that is known."""
        self._label, self._text, self._done, self._total = label, "", 0, total
        if self._bar:
            self._bar.phase(label, total)

    def advance(self, count: int = 1, text: str = "", label: str = "") -> None:
        """Move on by some pieces; `text` is about the last one."""
        self._done += count
        self._text, self._label = text or self._text, label or self._label
        if self._bar:
            self._bar.advance(count, text, self._label)

    def _write_lines(self) -> None:
        while not self._over.wait(min(PAUSE, 1.0)):
            if self._label and time.monotonic() - max(self._began, _said[0]) >= PAUSE:
                note(self._line())

    def _line(self) -> str:
        """The state in words: epoch 3/10, 27/100, loss 0.512 (70 s)."""
        count = f"{self._done}/{self._total}" if self._total else ""
        words = ", ".join(filter(None, (self._label, count, self._text)))
        return f"{words} ({time.monotonic() - self._began:.0f} s)"


@contextmanager
def progress(label: str, total: int | None, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Show one phase of so many pieces; the function given moves it on."""
    with Display(quiet=quiet) as display:
        display.phase(label, total)
        yield display.advance


# Runs -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class OutputOptions:
    """How a result is shown, and how much is said on the way."""

    as_json: bool = False
    quiet: bool = False
    verbose: bool = False


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

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Keep the first interrupt in mind. A second one is handled as outside of training."""
        self._interrupted.append(number)
        self._training.close()

    def __call__(self, event: Event) -> None:
        from atlas_cli.learning import events  # help needs none of them

        match event:
            case events.Warned(text):
                self.note(f"warning: {text}")
            case events.Noted(text):
                self.note(text)
            case events.Planned(lines, details):
                self.note(*lines)
                self.explain(*details)
            case events.PhaseStarted(name):
                self._display.phase(name)
            case events.TrainingStarted(steps, epochs):
                self._interrupted = []
                before = signal.signal(signal.SIGINT, self._interrupt)
                self._training.callback(signal.signal, signal.SIGINT, before)
                self._epochs, self._last_step = epochs, 0.0
                if steps is not None:
                    self._display.phase("decoding images", steps)
            case events.StepTaken(step, batch_size, measure):
                word = "training top-1" if measure == "top1" else measure
                last, self._last_step = self._last_step, time.monotonic()
                speed = f", {batch_size / (self._last_step - last):.0f} images/s" if last else ""
                text = f"loss {step.loss:.3f}, {word} {100 * step.accuracy:.1f}{speed}"
                of_all = f"/{self._epochs}" if self._epochs else ""
                self._display.advance(1, text, f"epoch {step.epoch}{of_all}")
            case events.TrainingEnded():
                self._training.close()
            case events.EpochScored(task, epoch, accuracy, images):
                when = f"epoch {epoch}" if epoch else "zero-shot"
                self.note(f"{task}: {when}: top-1 {accuracy:.2f} on images {images}")
            case events.TaskFinished(result):
                if not self._output.as_json:
                    emit(result)

    def note(self, *lines: str) -> None:
        """Say something, unless it is to be quiet."""
        if not self._output.quiet:
            for line in lines:
                note(line)

    def explain(self, *lines: str) -> None:
        """Say what was decided and why, if that is asked for."""
        if self._output.verbose:
            self.note(*lines)


def run_learning(verb: Callable[..., LearningResult], output: OutputOptions) -> None:
    """Run a verb, show its result, and leave with the exit code that it deserves."""
    with ConsoleListener(output) as listener:
        result = verb(on_event=listener, stop=listener.stop)
    summary = result.folder is not None and is_terminal() and not output.as_json
    shown = set(map(str, result.tests)) if summary else set()  # the summary has these
    listener.note(*(line for line in result.notes if line not in shown))
    listener.explain(*result.details)
    if result.rows and not output.quiet:
        tell_table(result.rows)
    if output.as_json:
        emit({"atlas": __version__, **result.facts}, as_json=True)
    elif summary:
        from atlas_cli.cli import terminal

        rows, text = terminal.summarise(result)
        if rows:
            emit_table(rows, "top-1 in percent")
        emit(text)
    else:
        write(result.text)
    if result.stopped:
        raise typer.Exit(130)
    if result.failed:
        raise AtlasError(result.failed)
