"""The architectures and weights that open_clip lists, read without importing it."""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from pathlib import Path

from atlas_cli.errors import AtlasError


def open_clip_tags() -> dict[str, tuple[str, ...]]:
    """Every open_clip architecture and its weight tags.

    A "-quickgelu" architecture has all tags of the plain one here, also those that open_clip
    does not offer for it.
    """
    listed = _open_clip_weights()
    names = sorted(path.stem for path in (_open_clip_folder() / "model_configs").glob("*.json"))
    return {name: tuple(listed.get(name.removesuffix("-quickgelu"), ())) for name in names}


def open_clip_repository(architecture: str, tag: str) -> str | None:
    """The Hub address, OWNER/NAME or OWNER/NAME/FILE, that open_clip lists for a tag."""
    plain = architecture.removesuffix("-quickgelu")
    found = _open_clip_weights().get(plain, {}).get(tag, {})
    if plain != architecture and not found.get("quick_gelu"):
        return None
    return str(found.get("hf_hub") or "").strip("/") or None


@cache
def _open_clip_weights() -> dict[str, dict[str, dict[str, object]]]:
    """architecture -> tag -> what open_clip says of these weights.

    Read from the text of open_clip/pretrained.py rather than imported: importing open_clip
    imports torch, and a misspelt name should not cost seconds.
    """
    tables: dict[str, ast.expr] = {}
    for node in ast.parse((_open_clip_folder() / "pretrained.py").read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            tables[node.targets[0].id] = node.value
    found = {}
    if isinstance(table := tables.get("_PRETRAINED"), ast.Dict):
        for key, value in zip(table.keys, table.values, strict=True):
            tags = tables[value.id] if isinstance(value, ast.Name) else value
            assert isinstance(key, ast.Constant)
            found[str(key.value)] = {
                tag: {word: _literal(given) for word, given in _keywords(call).items()}
                for tag, call in _keywords(tags).items()
            }
    return found


def _open_clip_folder() -> Path:
    spec = importlib.util.find_spec("open_clip")
    if spec is None or not spec.submodule_search_locations:
        raise AtlasError("open_clip is not installed; run: pip install open_clip_torch")
    return Path(spec.submodule_search_locations[0])


def _keywords(value: ast.expr) -> dict[str, ast.expr]:
    """The keyword arguments of a call such as `dict(a=..., b=...)`."""
    given = value.keywords if isinstance(value, ast.Call) else []
    return {keyword.arg: keyword.value for keyword in given if keyword.arg}


def _literal(value: ast.expr) -> object:
    return value.value if isinstance(value, ast.Constant) else None
