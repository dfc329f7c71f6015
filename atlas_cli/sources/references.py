"""What users write for models and task vectors: references, understood but not yet opened."""

from __future__ import annotations

import ast
import importlib.util
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from atlas_cli.errors import AtlasError, UsageError, nearest

Kind = Literal["builtin", "path", "open_clip", "hub"]
BUILTIN_MODELS: tuple[str, ...] = ("tiny",)
BUILTIN_VECTORS: tuple[str, ...] = (
    *("digits", "letters", "house_numbers", "signs"),
    *("textures", "terrain", "counts", "silhouettes"),
)
_BUILTIN = "builtin:"
_FILES = Path(__file__).parent / "builtin"

GRAMMAR = (
    "builtin:tiny, ARCHITECTURE/TAG or ARCHITECTURE,TAG of open_clip, "
    "OWNER/NAME[/FILE][@REVISION] on the Hub, a folder or a weight file"
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
        if rest in BUILTIN_VECTORS:
            return Reference(text, "path", str(_builtin_vector(rest)))
        if rest not in BUILTIN_MODELS:
            known = ", ".join(f"builtin:{name}" for name in BUILTIN_MODELS)
            raise UsageError(f"unknown model '{text}'{nearest(rest, BUILTIN_MODELS)} ({known})")
        return Reference(text, "builtin", rest)
    if scheme in {"hf-hub", "hf"}:
        return _parse_hub(text, rest.removeprefix("//"))
    if scheme == "local-dir":
        return _parse_path(text, rest)
    if text.startswith(("./", "../", "/", "~")) or Path(text).exists():
        return _parse_path(text, text)
    left, slash, right = text.partition("/")
    if (pair := text.partition(","))[0] in open_clip_tags() and pair[1]:
        left, slash, right = pair  # as open_clip itself writes it
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
    if not tag and tags:
        example = f"{architecture}/{'openai' if 'openai' in tags else tags[0]}"
        listed = ", ".join(tags)
        raise UsageError(f"{architecture}: which weights? for example {example} (it has: {listed})")
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


# open_clip's table of weights ------------------------------------------------------------------


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


# Task vectors ---------------------------------------------------------------------------------


def builtin_model(name: str) -> Path:
    """The folder of a built-in model, as open_clip reads it with `local-dir:`."""
    return _FILES / name


def _builtin_vector(name: str) -> Path:
    """The task vector of the built-in model for a task, as `atlas extract` writes it."""
    return _FILES / "vectors" / f"{name}.safetensors"


def vector_file(text: str) -> Path:
    """The file of a task vector: one of the built-in model (builtin:NAME), or a path."""
    if not text.startswith(_BUILTIN):
        return Path(text).expanduser()
    name = text.removeprefix(_BUILTIN)
    if name not in BUILTIN_VECTORS:
        known = ", ".join(f"{_BUILTIN}{one}" for one in BUILTIN_VECTORS)
        raise UsageError(
            f"unknown task vector '{text}'{nearest(name, BUILTIN_VECTORS)} ({known}, builtin:all)"
        )
    return _builtin_vector(name)
