"""The process of a command: interrupts, its end, and commands that run as processes of their own.

Other modules are named here by strings: the list of commands imports the demo, which imports this.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # multiprocessing is imported where it is used: most commands start no process
    from multiprocessing.context import BaseContext
    from multiprocessing.process import BaseProcess

_COMMANDS = "atlas_cli.cli.app"
_SLOW = "atlas_cli.cli.warm"
_INTERRUPTED = 130
_SOON, _AGAIN = 0.05, 2.0  # seconds
_OBJECTS = 100_000  # before garbage is looked for: imports make many objects and little garbage
_IMPORT = "<frozen importlib._bootstrap>"
_interrupts: list[int] = []


def run() -> None:
    """Run the command line and leave with its exit code.

    An interrupt may surface as another exception when it hits the import of a C extension; it
    is an interrupt all the same.
    """
    code: list[int] = []
    atexit.register(_leave, code)  # the first handler that is registered runs last
    gc.set_threshold(_OBJECTS)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's threads have nothing to do here
    try:
        signal.signal(signal.SIGINT, _interrupt)
        code.append(importlib.import_module(_COMMANDS).main())
    except BaseException:
        if not _interrupts:
            raise
        sys.stderr.write("atlas: interrupted\n")
        code.append(_INTERRUPTED)
    if code[-1] == _INTERRUPTED:
        # Leave at once: an interpreter that was interrupted within exec() ends by a signal instead.
        sys.stderr.flush()
        os._exit(_INTERRUPTED)
    sys.exit(code[-1])


def _leave(code: Sequence[int]) -> None:
    """End the process where the interpreter would begin to take modules apart: torch has many.

    By then threads have ended and all other exit handlers have run. Without a code there was an
    exception, and without a reader of stdout there is a message: both are left to the interpreter.
    """
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except (OSError, ValueError):
        return
    if code:
        os._exit(code[-1])


# Interrupts -----------------------------------------------------------------------------------


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, but neither within an import nor within a finalizer.

    Extensions abort on an exception in an import, and one in a finalizer is printed and forgotten.
    A timer calls this again soon after, and later in case the exception was swallowed.
    """
    _interrupts.append(number)
    delicate = _is_delicate(frame)
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, _interrupt)
        signal.setitimer(signal.ITIMER_REAL, _SOON if delicate else _AGAIN)
        if delicate:
            return
    raise KeyboardInterrupt


def _is_delicate(frame: FrameType | None) -> bool:
    """Whether an import or a finalizer is running."""
    while frame is not None:
        if frame.f_code.co_filename == _IMPORT or frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


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
    process = _context().Process(target=_run, args=(tuple(arguments), str(place), *files))  # type: ignore[attr-defined]
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


def _run(arguments: tuple[str, ...], place: str, printed: str, said: str) -> None:
    """Run a command in this new process, in its own folder and with its own files."""
    import multiprocessing

    _end_with_parent()
    multiprocessing.set_start_method(None, force=True)  # as in any process, not as for this one
    os.chdir(place)
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
