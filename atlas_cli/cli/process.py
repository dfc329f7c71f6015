"""Command lines of atlas as processes, forked from one that has imported what is slow to import."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread
from types import FrameType

_SLOW = "atlas_cli.cli.warm"


@dataclass(frozen=True)
class Running:
    """A command line at work, and the file that takes what it says on stderr."""

    process: BaseProcess
    said: Path

    def end(self) -> tuple[int, str]:
        """Wait for it: its exit code, and what it said."""
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
    """Run `atlas ARGUMENTS` in a folder, on one core; `printed` takes what goes to stdout."""
    files = (str(printed.resolve()) if printed else os.devnull, str(said.resolve()))
    os.environ["OMP_NUM_THREADS"] = "1"
    process = _context().Process(target=_run, args=(tuple(arguments), str(place), *files))  # type: ignore[attr-defined]
    process.start()
    return Running(process, said)


def first_to_end(running: Iterable[Running]) -> Running:
    """The one that ends before the others do."""
    by_sentinel = {one.process.sentinel: one for one in running}
    return by_sentinel[wait(list(by_sentinel))[0]]  # type: ignore[index]


def _context() -> BaseContext:
    """How processes start: by a fork of a warm one, where the system can do that."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_SLOW])
    return context


def _run(arguments: tuple[str, ...], place: str, printed: str, said: str) -> None:
    """What the new process does: it becomes the command, with its own folder and files."""
    _end_with_parent()
    multiprocessing.set_start_method(None, force=True)  # as in any process, not as for this one
    os.chdir(place)
    for number, path in ((1, printed), (2, said)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666), number)

    from atlas_cli.cli.app import main

    sys.exit(main(arguments))


def _end_with_parent() -> None:
    """Have a process end when that one does which began it, however that ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)

    Thread(target=watch, daemon=True).start()


@contextmanager
def stoppable() -> Iterator[list[int]]:
    """An interrupt asks for an end after the step at hand; a second one ends at once."""
    asked: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)
