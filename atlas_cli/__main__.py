"""Run atlas: `atlas ...` and `python -m atlas_cli ...`."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import threading
from types import FrameType

_INTERRUPTED = 130
_SOON, _AGAIN = 0.05, 2.0  # seconds
_OBJECTS = 100_000  # before garbage is looked for: imports make many objects and little garbage
_IMPORT = "<frozen importlib._bootstrap>"
_interrupts: list[int] = []


def _interrupt(number: int, frame: FrameType | None) -> None:
    """End the work: once no import is under way, since extensions abort on an exception there.

    Should something swallow the exception, it is raised anew.
    """
    _interrupts.append(number)
    importing = _is_importing(frame)
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, _interrupt)
        signal.setitimer(signal.ITIMER_REAL, _SOON if importing else _AGAIN)
        if importing:
            return
    raise KeyboardInterrupt


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == _IMPORT:
            return True
        frame = frame.f_back
    return False


def run() -> None:
    """Run the command line and leave with its exit code.

    An interrupt may surface as another exception when it hits the import of a C extension; it
    is an interrupt all the same.
    """
    gc.set_threshold(_OBJECTS)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's threads have nothing to do here
    try:
        signal.signal(signal.SIGINT, _interrupt)
        from atlas_cli.cli.app import main

        code = main()
    except BaseException:
        if not _interrupts:
            raise
        sys.stderr.write("atlas: interrupted\n")
        code = _INTERRUPTED
    if code == _INTERRUPTED:
        # Leave at once: an interpreter that was interrupted within exec() ends by a signal instead.
        sys.stderr.flush()
        os._exit(code)
    _leave(code)


def _leave(code: int) -> None:
    """Exit as the interpreter does, but leave modules as they are: torch has very many."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):  # a reader that went away: the interpreter knows what to say
        sys.exit(code)
    os._exit(code)


if __name__ == "__main__":
    run()
