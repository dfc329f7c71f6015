"""A model reference -> the files behind it, wherever they are."""

from __future__ import annotations

import ast
import fnmatch
import hashlib
import importlib.util
import json
import mmap
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Literal

from atlas_cli import builtin
from atlas_cli.cache import Known, recall, remember, sight
from atlas_cli.errors import (
    AtlasError,
    CheckpointError,
    UnreachableError,
    UsageError,
    nearest,
)
from atlas_cli.hub import open_snapshot

Kind = Literal["builtin", "path", "open_clip", "hub"]

GRAMMAR = (
    "builtin:tiny, ARCHITECTURE/TAG of open_clip, OWNER/NAME[/FILE][@REVISION] on the Hub, "
    "a folder or a weight file"
)
# In order of preference. Safetensors first: nothing in them can be run.
WEIGHT_NAMES = (
    "open_clip_model.safetensors",
    "open_clip_pytorch_model.safetensors",
    "model.safetensors",
    "model.safetensors.index.json",
    "open_clip_pytorch_model.bin",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
)
CONFIG_NAMES = (
    *("open_clip_config.json", "config.json", "preprocessor_config.json"),
    "adapter_config.json",
)
TOKENIZER_PATTERNS = ("tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "*.model")
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
_WINDOW = 4 << 20


@dataclass(frozen=True)
class Reference:
    """What a user wrote, understood but not yet opened."""

    text: str
    kind: Kind
    name: str  # builtin name, path, architecture, or owner/name
    file: str | None = None
    tag: str | None = None
    revision: str | None = None


@dataclass(frozen=True)
class Source:
    """The local files behind a reference. `commit` is known for sources on the Hub."""

    reference: Reference
    folder: Path
    weights: tuple[Path, ...]
    commit: str | None = None

    def config(self, name: str) -> dict[str, object] | None:
        """The JSON object in a configuration file beside the weights, or None without one."""
        path = self.folder / name
        return read_object(path) if path.is_file() else None

    def provenance(self) -> dict[str, object]:
        """Where the weights came from, exactly: reference, commit, and sha256 of every file."""
        return {
            "reference": self.reference.text,
            "commit": self.commit,
            "sha256": self._hashes(),
        }

    def _hashes(self) -> dict[str, str]:
        seen = sight(self.weights)
        known = recall("files", seen, [path.name for path in self.weights])
        if not known:
            known = {path.name: Known(sha256_of(path)) for path in self.weights}
            remember("files", seen, known)
        return {name: one.digest for name, one in known.items()}


# Understanding --------------------------------------------------------------------------------


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


# Finding --------------------------------------------------------------------------------------


def locate(reference: Reference, beside: Sequence[str] = ()) -> Source:
    """Find the files of a reference, downloading them if need be.

    `beside` are patterns of further files to download, where a repository has them.
    """
    match reference.kind:
        case "builtin":
            return _in_folder(reference, builtin.model_folder(reference.name))
        case "path":
            path = Path(reference.name)
            if path.is_dir():
                return _in_folder(reference, path)
            return Source(reference, path.parent, (path,))
        case "open_clip":
            repository, file = _open_clip_repository(reference)
            return _on_hub(reference, repository, file, beside)
        case "hub":
            return _on_hub(reference, reference.name, reference.file, beside)


def _in_folder(reference: Reference, folder: Path) -> Source:
    entry = choose_weights([path.name for path in folder.iterdir()], reference.text)
    return Source(reference, folder, tuple(folder / name for name in _members(folder, entry)))


def _open_clip_repository(reference: Reference) -> tuple[str, str | None]:
    """The Hub repository, and the file in it, that open_clip lists for a tag."""
    from atlas_cli.vision import import_open_clip  # imports torch: only for a tag

    found = import_open_clip().get_pretrained_cfg(reference.name, reference.tag)
    if not found.get("hf_hub"):
        raise UsageError(f"{reference.text}: open_clip lists no weights for it on the Hub")
    address = found["hf_hub"]
    owner, name, file = (*address.split("/"), "")[:3]
    return f"{owner}/{name}", file or None


def _on_hub(
    reference: Reference, repository: str, file: str | None, beside: Sequence[str]
) -> Source:
    likely = [*CONFIG_NAMES, *WEIGHT_NAMES]
    snapshot = open_snapshot(repository, reference.revision, [file, *likely] if file else likely)
    entry = file or choose_weights(snapshot.files, reference.text)
    folder = snapshot.fetch([entry])
    members = _members(folder, entry)
    missing = [name for name in members if name not in snapshot.files]
    if missing:
        raise UnreachableError(f"{reference.text}: lists {missing[0]} but does not hold it")
    snapshot.fetch([*members, *CONFIG_NAMES])
    if _needs_tokenizer(folder):
        snapshot.fetch(TOKENIZER_PATTERNS)
    if beside and any(fnmatch.fnmatchcase(n, p) for n in snapshot.files for p in beside):
        snapshot.fetch(beside)
    weights = tuple(folder / name for name in members)
    return Source(reference, weights[0].parent, weights, commit=snapshot.commit)


def _needs_tokenizer(folder: Path) -> bool:
    path = folder / "open_clip_config.json"
    return path.is_file() and "hf_tokenizer_name" in path.read_text("utf-8")


def choose_weights(names: Collection[str], where: str) -> str:
    """Which of the files in a folder holds the weights, or lists the files that do."""
    for name in WEIGHT_NAMES:
        if name in names:
            return name
    indexed = sorted(name for name in names if name.endswith(".index.json"))
    loose = indexed or sorted(n for n in names if n.endswith(WEIGHT_SUFFIXES) and "/" not in n)
    if len(loose) == 1:
        return loose[0]
    found = f"several: {', '.join(loose[:4])}; name one of them" if loose else "none"
    raise AtlasError(f"{where}: expected one weight file, found {found}")


def _members(folder: Path, entry: str) -> Sequence[str]:
    """The weight files behind an entry: itself, or the shards that an index lists."""
    if not entry.endswith(".index.json"):
        return [entry]
    listed = read_object(folder / entry).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(f"{folder / entry}: has no weight_map")
    shards = sorted({str(name) for name in listed.values()})
    for name in shards:
        inside = PurePosixPath(name)
        if inside.is_absolute() or ".." in inside.parts or "\\" in name:
            raise CheckpointError(f"{folder / entry}: names a shard outside its folder: {name}")
        _check_link(folder / entry, name)
    return [str(PurePosixPath(entry).parent / name) for name in shards]


def _check_link(index: Path, name: str) -> None:
    """Refuse a shard that is a link to elsewhere than where the index itself, or its link, is."""
    shard, homes = (index.parent / name).resolve(), (index.parent, index.resolve().parent)
    if not any(shard.is_relative_to(home.resolve()) for home in homes):
        raise CheckpointError(f"{index}: names a shard that is a link out of its folder: {name}")


def read_object(path: Path) -> dict[str, object]:
    """The JSON object in a file. Raises CheckpointError for anything else."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as problem:
        raise CheckpointError(f"{path}: is not valid JSON: {problem}") from problem
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(found).__name__}")
    return found


def sha256_of(path: Path) -> str:
    """The sha256 of a file's bytes, in hexadecimal."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        for start in range(0, size, _WINDOW):  # mapped: a copy would take a sixth of the time
            length = min(_WINDOW, size - start)
            with mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ, offset=start) as window:
                found.update(window)
    return found.hexdigest()
