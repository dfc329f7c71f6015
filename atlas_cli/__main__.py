"""Run atlas: `atlas ...` and `python -m atlas_cli ...`."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

_INTERRUPTED = 130
_AGAIN = 3.0  # seconds after which an interrupt that something swallowed is raised anew
_interrupts: list[int] = []
_main_process = os.getpid()


def _interrupt(number: int, frame: FrameType | None) -> None:
    """End the work. Within an import, end the process: libraries may swallow the exception there,
    and nothing has been begun that would need an orderly end.
    """
    _interrupts.append(number)
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, _interrupt)
        signal.setitimer(signal.ITIMER_REAL, _AGAIN)
    while frame is not None and os.getpid() == _main_process:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            _leave("atlas: interrupted\n")
        frame = frame.f_back
    raise KeyboardInterrupt


def _leave(message: str = "") -> None:
    """End at once: an interpreter that was interrupted within exec() ends by a signal instead."""
    sys.stderr.write(message)
    sys.stderr.flush()
    os._exit(_INTERRUPTED)


def run() -> None:
    """Run the command line and leave with its exit code."""
    try:
        signal.signal(signal.SIGINT, _interrupt)
        from atlas_cli.commands.app import main

        code = main()
    except BaseException:
        if not _interrupts:
            raise
        _leave("atlas: interrupted\n")
    if code == _INTERRUPTED:
        _leave()
    sys.exit(code)


if __name__ == "__main__":
    run()
