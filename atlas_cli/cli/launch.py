"""A command in several processes: started by torch's own launcher, and as one of them."""

from __future__ import annotations

import io
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from atlas_cli.cli import console
from atlas_cli.errors import UsageError
from atlas_cli.io.staging import temporary_folder

COMMANDS = ("eval", "fit", "negate", "add", "tta", "finetune")
_INTERRUPTED = 130
_LAUNCHER = "ATLAS_LAUNCHER"  # the process that started the ranks of this machine
_LAST_SECONDS = 20.0  # in which a rank may save its run; torch's launcher kills it after 30
_OUTPUTS = ("-o", "--output", "--predictions", "--vector", "--vectors-dir")


def launch(given: Sequence[str]) -> int:
    """Run a command in as many processes as --launch says, and give its exit code."""
    count, rest = _without_launch(given)
    if not rest or rest[0] not in COMMANDS:
        raise UsageError(f"--launch is for {', '.join(COMMANDS)}")
    if "-" in rest or "--online" in rest:
        raise UsageError("--launch: several processes cannot share stdin; give a file")

    _hush_torch()
    from atlas_cli.learning import ranks

    os.environ[_LAUNCHER] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    code, said = ranks.start(count, [sys.executable, "-m", "atlas_cli", *rest])
    if said:
        console.note(said)
    return code


def _hush_torch() -> None:
    """Keep torch from telling of interrupted calls with a stack; it reads this when imported."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def _without_launch(given: Sequence[str]) -> tuple[int, list[str]]:
    """The number of processes, and the command line of each."""
    rest, count, words = [], "", iter(given)
    for word in words:
        name, equals, value = word.partition("=")
        if name == "--launch":
            count = value if equals else next(words, "")
        else:
            rest.append(word)
    if not count.isdecimal() or not int(count):
        raise UsageError(f"--launch {count}: expected a number of processes")
    return int(count), rest


def as_rank(given: Sequence[str], main: Callable[[Sequence[str]], int]) -> int:
    """Run a command as one of several processes: the first writes and prints, the others do not."""
    rank, rest = int(os.environ["RANK"]), list(given)
    if not rest or rest[0] not in COMMANDS:
        return main(rest)
    parent = int(os.environ.get(_LAUNCHER) or os.getppid())
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    _end_when_terminated()
    _hush_torch()
    from atlas_cli.learning import ranks

    device = rest[rest.index("--device") + 1] if "--device" in rest[:-1] else "auto"
    if rank:
        with temporary_folder(Path(tempfile.gettempdir(), "atlas-rank")) as folder:
            shown, sys.stderr = sys.stderr, io.StringIO()
            sys.stdout = io.StringIO()
            code = _joined(device, _elsewhere(rest, str(folder)), main)
            said, sys.stderr = sys.stderr.getvalue(), shown
        if code:  # the first rank has the same problem, if it is the command's, or saves its run
            time.sleep(ranks.GRACE)
            sys.stderr.write(said if code != _INTERRUPTED else "")
        return code
    code = _joined(device, rest, main)
    if not code and {"-v", "--verbose"} & set(rest) and ranks.sent["steps"]:
        steps, count = ranks.sent["steps"], os.environ["WORLD_SIZE"]
        each = ranks.sent["bytes"] / steps
        console.note(f"{count} processes: {each:,.0f} bytes sent per rank and gradient ({steps})")
    return code


def _end_with(parent: int) -> None:
    """Terminate this process once its parent is gone: a launcher that is killed leaves no ranks."""
    from atlas_cli.learning.ranks import GRACE

    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os._exit(128 + signal.SIGTERM)  # it waits for a peer that is gone as well


def _end_when_terminated() -> None:
    """See to it that SIGTERM ends this process also while it waits for a peer.

    A handler in Python runs only once torch gives control back, which may take until a time-out.
    torch's launcher would kill the process before that, and take this for the cause. The bytes of
    the pipe are written by the handler in C.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def watch() -> None:
        while os.read(reader, 1) != bytes([signal.SIGTERM]):
            pass
        time.sleep(_LAST_SECONDS)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def _joined(device: str, rest: list[str], main: Callable[..., int]) -> int:
    from atlas_cli.learning.ranks import join, leave

    join(device)
    try:
        return main(rest)
    finally:
        leave()


def _elsewhere(given: Sequence[str], folder: str) -> list[str]:
    """The same command line with outputs that nobody looks at."""
    found: list[str] = []
    for number, word in enumerate(given):
        name, equals, value = word.partition("=")
        if equals and name in _OUTPUTS:
            found.append(f"{name}={folder}/{Path(value).name}")
        elif number and given[number - 1] in _OUTPUTS:
            found.append(f"{folder}/{Path(word).name}")
        else:
            found.append(word)
    return [*found, "--quiet"]
