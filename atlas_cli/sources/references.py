"""The names of task vectors -> their files."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from atlas_cli.errors import (
    AtlasError,
    UsageError,
    nearest,
)
from atlas_cli.sources import builtin

Kind = Literal["builtin", "path", "open_clip", "hub"]

GRAMMAR = (
    "builtin:tiny, ARCHITECTURE/TAG of open_clip, OWNER/NAME[/FILE][@REVISION] on the Hub, "
    "a folder or a weight file"
)


@dataclass(frozen=True)
class Reference:
    """What a user wrote, understood but not yet opened."""

    text: str
    kind: Kind
    name: str  # builtin name, path, architecture, or owner/name
    file: str | None = None
    tag: str | None = None
    revision: str | None = None


def parse_reference(text: str) -> Reference:
    """Understand a model reference. Opens nothing; raises UsageError for what cannot be one."""
    scheme, _, rest = text.partition(":")
    if scheme == "builtin":
        if rest in builtin.VECTORS:
            return Reference(text, "path", str(builtin.vector_file(rest)))
        if rest not in builtin.MODELS:
            known = ", ".join(f"builtin:{name}" for name in builtin.MODELS)
            raise UsageError(f"unknown model '{text}'{nearest(rest, builtin.MODELS)} ({known})")
        return Reference(text, "builtin", rest)
    if scheme in {"hf-hub", "hf"}:
        return _parse_hub(text, rest.removeprefix("//"))
    if scheme == "local-dir":
        return _parse_path(text, rest)
    if text.startswith(("./", "../", "/", "~")) or Path(text).exists():
        return _parse_path(text, text)
    left, slash, right = text.partition("/")
    if left in open_clip_tags():
        return _parse_open_clip(text, left, right)
    if not slash or (close := nearest(left, open_clip_tags())):
        close = close if slash else nearest(left, [*open_clip_tags(), "builtin:tiny"])
        raise UsageError(f"unknown model '{text}'{close} (a model is {GRAMMAR})")
    return _parse_hub(text, text)


def _parse_path(text: str, path: str) -> Reference:
    local = Path(path).expanduser()
    if not local.exists():
        raise UsageError(f"no such file or folder: {path}")
    return Reference(text, "path", str(local))


def _parse_open_clip(text: str, architecture: str, tag: str) -> Reference:
    tags = open_clip_tags()[architecture]
    if tag not in tags:
        listed = ", ".join(tags) or "none"
        raise UsageError(
            f"open_clip has no weights '{tag}' for {architecture}{nearest(tag, tags)} "
            f"(it has: {listed})"
        )
    return Reference(text, "open_clip", architecture, tag=tag)


def _parse_hub(text: str, address: str) -> Reference:
    path, _, revision = address.partition("@")
    owner, _, rest = path.partition("/")
    name, _, file = rest.partition("/")
    if not all(re.fullmatch(r"[\w.-]+", part) for part in (owner, name)):
        raise UsageError(f"'{text}' is no model reference (a model is {GRAMMAR})")
    if "@" in address and not revision:
        raise UsageError(f"'{text}' ends with @ but names no revision")
    return Reference(text, "hub", f"{owner}/{name}", file=file or None, revision=revision or None)


def check_architecture(name: str | None) -> None:
    """Raise UsageError unless open_clip knows an architecture of that name."""
    if name is not None and name not in open_clip_tags():
        raise UsageError(f"unknown architecture '{name}'{nearest(name, open_clip_tags())}")


@cache
def open_clip_tags() -> dict[str, tuple[str, ...]]:
    """Every open_clip architecture and its weight tags.

    Read from open_clip's files rather than imported: importing open_clip imports torch, and a
    misspelt name should not cost seconds.
    """
    spec = importlib.util.find_spec("open_clip")
    if spec is None or not spec.submodule_search_locations:
        raise AtlasError("open_clip is not installed; run: pip install open_clip_torch")
    folder = Path(spec.submodule_search_locations[0])
    tables: dict[str, ast.expr] = {}
    for node in ast.parse((folder / "pretrained.py").read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            tables[node.targets[0].id] = node.value
    listed: dict[str, tuple[str, ...]] = {}
    if isinstance(table := tables.get("_PRETRAINED"), ast.Dict):
        for key, value in zip(table.keys, table.values, strict=True):
            listed[str(ast.literal_eval(key))] = _keywords(value, tables)  # type: ignore[arg-type]
    names = sorted(path.stem for path in (folder / "model_configs").glob("*.json"))
    # Of a "-quickgelu" architecture these are too many; `locate` asks open_clip itself.
    return {name: listed.get(name.removesuffix("-quickgelu"), ()) for name in names}


def _keywords(value: ast.expr, tables: Mapping[str, ast.expr]) -> tuple[str, ...]:
    """The keywords of `dict(a=..., b=...)`, given as such or by a name."""
    if isinstance(value, ast.Name):
        value = tables[value.id]
    return tuple(k.arg for k in value.keywords if k.arg) if isinstance(value, ast.Call) else ()


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
