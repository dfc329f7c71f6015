"""The names of task vectors -> their files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from atlas_cli import builtin
from atlas_cli.errors import UsageError, nearest

_BUILTIN = "builtin:"


def vector_file(text: str) -> Path:
    """The file of a task vector: one of the built-in model (builtin:NAME), or a path."""
    if not text.startswith(_BUILTIN):
        return Path(text).expanduser()
    name = text.removeprefix(_BUILTIN)
    if name not in builtin.VECTORS:
        known = ", ".join(f"{_BUILTIN}{one}" for one in builtin.VECTORS)
        raise UsageError(
            f"unknown task vector '{text}'{nearest(name, builtin.VECTORS)} ({known}, builtin:all)"
        )
    return builtin.vector_file(name)


def expand_vectors(texts: Sequence[str]) -> list[str]:
    """The names of task vectors, with folders and builtin:all spelt out. All of them exist."""
    return [name for text in texts for name in _expanded(text)]


def _expanded(text: str) -> list[str]:
    if text == f"{_BUILTIN}all":
        return [f"{_BUILTIN}{name}" for name in builtin.VECTORS]
    path = vector_file(text)
    if path.is_dir():
        inside = sorted(str(file) for file in path.glob("*.safetensors"))
        if not inside:
            raise UsageError(f"{text}: holds no task vectors (*.safetensors)")
        return inside
    if not path.is_file():
        raise UsageError(f"no such task vector: {text}")
    return [text if text.startswith(_BUILTIN) else str(path)]
