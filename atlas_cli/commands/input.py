"""What commands read from stdin."""

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
    """A temporary file with everything that stdin gives, for readers that must seek.

    Errors about the file say "stdin", since its own name means nothing to the user.
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


def read_text(name: str) -> tuple[str, str]:
    """The text of a recipe and the name to call it by."""
    try:
        return (sys.stdin.read(), "stdin") if name == "-" else (Path(name).read_text("utf-8"), name)
    except FileNotFoundError as problem:
        raise UsageError(f"no such recipe: {name}") from problem
    except (OSError, UnicodeDecodeError) as problem:
        raise UsageError(f"{name}: cannot be read as UTF-8 text") from problem
