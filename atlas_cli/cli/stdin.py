"""What comes on stdin: the text of a recipe, or a file for readers that must seek."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from atlas_cli.errors import AtlasError, CheckpointError, UsageError


@contextmanager
def spooled_stdin(suffix: str) -> Iterator[Path]:
    """A temporary file with the content of stdin, for readers that must seek.

    A CheckpointError says "stdin" in place of the file's name, which means nothing to the user.
    """
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError("- reads stdin, which is no pipe and no file")
    with tempfile.TemporaryDirectory(prefix="atlas-") as folder:
        path = Path(folder) / f"stdin{suffix}"
        try:
            with path.open("wb") as file:
                shutil.copyfileobj(sys.stdin.buffer, file, 1 << 20)
        except OSError as problem:
            raise AtlasError(
                f"stdin: cannot be kept in {Path(folder).parent}: {problem.strerror}; "
                "set TMPDIR to a folder with room"
            ) from problem
        if not path.stat().st_size:
            raise CheckpointError("stdin: is empty")
        try:
            yield path
        except CheckpointError as problem:
            raise CheckpointError(str(problem).replace(str(path), "stdin")) from problem


def read_stdin(most: int) -> str:
    """The text of stdin. Raises UsageError if it is closed, no text, or over `most` bytes."""
    if sys.stdin is None:
        raise UsageError("stdin: is closed")
    try:
        content = sys.stdin.buffer.read(most + 1)
        if len(content) > most:
            raise UsageError(f"stdin: is longer than {most / 1e6:.0f} MB of text")
        return content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise UsageError("stdin: cannot be read as UTF-8 text") from problem
