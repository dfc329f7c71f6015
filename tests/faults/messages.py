"""Which error messages of the package the tests produce.

While tests run, this process and the warm ones note where they make an AtlasError, in the file that
MESSAGES_LOG names. A run of the whole default suite lists the places that were not noted.
"""

from __future__ import annotations

import ast
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from atlas_cli import errors

LOG = "MESSAGES_LOG"
PACKAGE = Path(errors.__file__).parent
KINDS = {
    name
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, errors.AtlasError)
}
_usual = errors.AtlasError.__init__
_noted: set[tuple[str, int]] = set()


def record() -> None:
    """From now on, note every place at which this process makes an AtlasError."""
    errors.AtlasError.__init__ = _noting  # type: ignore[method-assign]


def _noting(self: errors.AtlasError, *arguments: object) -> None:
    _usual(self, *arguments)
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename == errors.__file__:
        frame = frame.f_back
    site = (frame.f_code.co_filename, frame.f_lineno)
    if site not in _noted and (log := os.environ.get(LOG)):
        _noted.add(site)
        handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with contextlib.suppress(OSError):  # a test may let no file grow: what it shows comes first
            os.write(handle, f"{site[1]} {site[0]}\n".encode())  # one write: lines stay whole
        os.close(handle)


def missing(log: Path) -> list[str]:
    """Place and words of every message that was not noted."""
    found = set()
    for line in log.read_text("utf-8").splitlines():
        number, _, name = line.partition(" ")
        found.add((name, int(number)))
    return [
        f"{path.relative_to(PACKAGE.parent)}:{line}: {words}"
        for path, line, words in sites()
        if (str(path), line) not in found
    ]


def sites() -> Iterator[tuple[Path, int, str]]:
    """File, line and words of every place in the package that makes an AtlasError."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in KINDS:
                yield path, node.lineno, ast.unparse(node)
