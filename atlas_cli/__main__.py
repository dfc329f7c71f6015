"""Run atlas: `atlas ...` and `python -m atlas_cli ...`."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

_INTERRUPTED = 130
_interrupts: list[int] = []


def _interrupt(number: int, frame: FrameType | None) -> None:
    _interrupts.append(number)
    raise KeyboardInterrupt


def run() -> None:
    """Run the command line and leave with its exit code.

    An interrupt may surface as another exception when it hits the import of a C extension; it
    is an interrupt all the same.
    """
    try:
        signal.signal(signal.SIGINT, _interrupt)
        from atlas_cli.commands.app import main

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
    sys.exit(code)


if __name__ == "__main__":
    run()
