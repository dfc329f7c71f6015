"""Note where every AtlasError of this process is made; Python reads this file when it starts.

Only in runs of `python -m tests.faults.messages`, which puts this folder on PYTHONPATH.
"""

import os
import sys

from atlas_cli import errors

_usual = errors.AtlasError.__init__
_noted: set[tuple[str, int]] = set()


def _noting(self: errors.AtlasError, *arguments: object) -> None:
    _usual(self, *arguments)
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename == errors.__file__:
        frame = frame.f_back
    site = (frame.f_code.co_filename, frame.f_lineno)
    if site not in _noted and (log := os.environ.get("MESSAGES_LOG")):
        _noted.add(site)
        handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(handle, f"{site[1]} {site[0]}\n".encode())  # one write: lines stay whole
        os.close(handle)


errors.AtlasError.__init__ = _noting  # type: ignore[method-assign]
