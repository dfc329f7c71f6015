"""A command line as a case, and what running it gives."""

from __future__ import annotations

import fcntl
import importlib
import importlib.util
import os
import pkgutil
import pty
import shlex
import signal
import struct
import sys
import termios
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

MAINS = ("atlas_cli.cli.app", "atlas_cli.commands.app")  # where `main` may be
LIMIT = 600  # seconds for one command line
Main = Callable[[Sequence[str]], int]


@dataclass(frozen=True)
class Case:
    """A command line. `sink` is what stands behind stdout: a file, a terminal, closed or full."""

    name: str
    words: tuple[str, ...]
    stdin: str | bytes | Path = b""
    sink: str = "file"
    process: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


def case(name: str, line: str, **more: Any) -> Case:
    """A case from a line as one types it."""
    return Case(name.replace("/", "|"), tuple(shlex.split(line)), **more)


def words(text: str) -> list[str]:
    """The words of a text."""
    return text.split()


def find_main() -> Main:
    """The function that runs a command line."""
    for name in MAINS:
        try:
            main: Main = importlib.import_module(name).main
        except ModuleNotFoundError as problem:
            if not problem.name or not name.startswith(problem.name):
                raise
        else:
            return main
    raise SystemExit(f"no module of atlas has main: {', '.join(MAINS)}")


def warm_up() -> None:
    """Import all of atlas and what it imports late, so that a fork has it already."""
    package = importlib.import_module("atlas_cli")
    for found in pkgutil.walk_packages(package.__path__, "atlas_cli."):
        if not found.name.endswith(("__main__", "_kernels")):
            importlib.import_module(found.name)
    for module in list(sys.modules.values()):
        importer = getattr(module, "import_open_clip", None)
        if callable(importer):
            importer()
            break
    for name in ("open_clip", "PIL.Image", "safetensors.torch", "rich.console"):
        importlib.import_module(name)


@dataclass(frozen=True)
class Outcome:
    """What came of a case, and the seconds of a core that it took."""

    code: int
    out: bytes
    err: bytes
    seconds: float


def run(one: Case, main: Main, folder: Path) -> Outcome:
    """Run a case. `folder` is for files in between."""
    (folder / "in").write_bytes(_stdin_of(one))
    sink, reader = _open_sink(one.sink, folder / "out")
    sys.stdout.flush()
    child = os.fork()
    if not child:
        _become(one, main, sink, folder)
    os.close(sink)
    shown = _read_terminal(reader) if one.sink == "terminal" else b""
    _, status, used = os.wait4(child, 0)
    if reader is not None:
        os.close(reader)
    if one.sink == "file":
        shown = (folder / "out").read_bytes()
    code, err = os.waitstatus_to_exitcode(status), (folder / "err").read_bytes()
    return Outcome(code, shown, err, used.ru_utime + used.ru_stime)


def _stdin_of(one: Case) -> bytes:
    if isinstance(one.stdin, Path):
        return one.stdin.read_bytes() if one.stdin.exists() else b""
    return one.stdin.encode() if isinstance(one.stdin, str) else one.stdin


def _open_sink(kind: str, path: Path) -> tuple[int, int | None]:
    """What is written to, and what the terminal's other end is."""
    if kind == "terminal":
        reader, writer = pty.openpty()
        fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        return writer, reader
    if kind == "closed":
        reader, writer = os.pipe()
        os.close(reader)
        return writer, None
    name = "/dev/full" if kind == "full" else path
    return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), None


def _read_terminal(reader: int | None) -> bytes:
    assert reader is not None
    shown = b""
    try:
        while piece := os.read(reader, 1 << 16):
            shown += piece
    except OSError:  # how the end of a terminal is told
        pass
    return shown


def _become(one: Case, main: Main, sink: int, folder: Path) -> NoReturn:
    """What a child does: it is the command line, and nothing else any more."""
    code = 99  # no exit code of atlas
    try:
        opened = os.open(folder / "in", os.O_RDONLY), sink
        said = os.open(folder / "err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number, descriptor in enumerate((*opened, said)):
            os.dup2(descriptor, number)
        signal.alarm(LIMIT)
        os.environ.update(one.environment)
        if one.process:
            command = [sys.executable, "-m", "atlas_cli", *one.words]
            os.execv(sys.executable, command)
        code = main(list(one.words))
        sys.stdout.flush()
    except BaseException as problem:  # the way to it is not what is compared
        print("Traceback:", *traceback.format_exception_only(problem), file=sys.stderr)
    finally:
        sys.stderr.flush()
        os._exit(code)
