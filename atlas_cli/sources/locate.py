"""What users write for models and task vectors, and the local files behind it.

References are understood without opening anything; `locate` finds their files, and downloads them
if need be.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from atlas_cli.errors import AtlasError, CheckpointError, UnreachableError, UsageError, nearest
from atlas_cli.io.files import (
    CachedDigest,
    digest_of,
    inside,
    load_digests,
    named_sha256,
    read_regular,
    save_digests,
    sha256_of,
    stat_files,
)
from atlas_cli.sources.hub import Snapshot, open_snapshot
from atlas_cli.sources.open_clip_table import open_clip_repository, open_clip_tags

Kind = Literal["builtin", "path", "open_clip", "hub"]
BUILTIN_MODELS: tuple[str, ...] = ("tiny",)
BUILTIN_VECTORS: tuple[str, ...] = (
    *("digits", "letters", "house_numbers", "signs"),
    *("textures", "terrain", "counts", "silhouettes"),
)
_BUILTIN = "builtin:"
ZOO = "zoo:"
_FILES = Path(__file__).parent / "builtin"

GRAMMAR = (
    "builtin:tiny, ARCHITECTURE/TAG or ARCHITECTURE,TAG of open_clip, "
    "OWNER/NAME[/FILE][@REVISION] on the Hub, a folder or a weight file"
)
# In order of preference. Safetensors first: nothing in them can be run.
WEIGHT_NAMES = (
    "open_clip_model.safetensors",
    "open_clip_pytorch_model.safetensors",
    "model.safetensors",
    "model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.safetensors.index.json",
    "open_clip_pytorch_model.bin",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "diffusion_pytorch_model.bin",
    "adapter_model.safetensors",
    "adapter_model.bin",
)
CONFIG_NAMES = (
    *("open_clip_config.json", "config.json", "preprocessor_config.json"),
    "adapter_config.json",
)
TOKENIZER_PATTERNS = ("tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "*.model")
# Files that belong to a model beside its weights: fetched and copied with them.
COMPANION_FILES = (
    *("*.json", "tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "*.jinja"),
    *("LICENSE*", "NOTICE*"),
)
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
_LARGEST_OBJECT = 64 << 20  # bytes of a JSON file; the index of a large model has some thousand


# References -----------------------------------------------------------------------------------


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


# Task vectors ---------------------------------------------------------------------------------


def builtin_model(name: str) -> Path:
    """The folder of a built-in model, as open_clip reads it with `local-dir:`."""
    return _FILES / name


def _builtin_vector(name: str) -> Path:
    """The task vector of the built-in model for a task, as `atlas extract` writes it."""
    return _FILES / "vectors" / f"{name}.safetensors"


def is_of_zoo(text: str) -> bool:
    """Whether a text names a set or an entry of the zoo."""
    return text.startswith(ZOO)


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


# Files ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """The local files behind a reference. `commit` is known for sources on the Hub."""

    reference: Reference
    folder: Path
    weights: tuple[Path, ...]
    commit: str | None = None

    @property
    def size(self) -> int:
        """The bytes of all weight files."""
        return sum(path.stat().st_size for path in self.weights)

    def config(self, name: str) -> dict[str, object] | None:
        """The JSON object in a configuration file beside the weights, or None without one."""
        path = self.folder / name
        if not os.path.lexists(path):
            return None
        return read_object(inside(self.folder, name, str(self.folder)))

    def provenance(self) -> dict[str, object]:
        """Where the weights came from, exactly: reference, commit, and sha256 of every file."""
        return {
            "reference": self.reference.text,
            "commit": self.commit,
            "sha256": self._hashes(),
        }

    def _hashes(self) -> dict[str, str]:
        return {path.name: digest_of(path, "sha256") for path in self.weights}


def locate(reference: Reference, beside: Sequence[str] = ()) -> Source:
    """Find the files of a reference, downloading them if need be.

    `beside` are patterns of further files to download, where a repository has them.
    """
    match reference.kind:
        case "builtin":
            return _in_folder(reference, builtin_model(reference.name))
        case "path":
            path = Path(reference.name)
            if path.is_dir():
                return _in_folder(reference, path)
            return Source(reference, path.parent, (path,))
        case "open_clip" | "hub":
            return _on_hub(reference, *hub_address(reference), beside)


def locate_file(reference: Reference, name: str) -> Source | None:
    """One file that lies beside the weights of a model, as a source of its own; None without it.

    Weights are not downloaded.
    """
    if reference.kind in ("path", "builtin"):
        local = builtin_model(reference.name) if reference.kind == "builtin" else None
        path = local or Path(reference.name)
        file = (path if path.is_dir() else path.parent) / name
        return Source(reference, file.parent, (file,)) if file.is_file() else None
    repository, _ = hub_address(reference)
    snapshot = open_snapshot(repository, reference.revision, [name, *CONFIG_NAMES])
    if name not in snapshot.files:
        return None
    beside = [each for each in snapshot.files if "/" not in each and _is_companion(each)]
    folder = snapshot.fetch([name, *beside])
    return Source(reference, folder, (folder / name,), commit=snapshot.commit)


def _is_companion(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in COMPANION_FILES)


def _in_folder(reference: Reference, folder: Path) -> Source:
    entry = choose_weights([path.name for path in folder.iterdir()], reference.text)
    return Source(reference, folder, tuple(folder / name for name in _members(folder, entry)))


def hub_address(reference: Reference) -> tuple[str, str | None]:
    """The Hub repository, and the file in it; of an open_clip tag, those that open_clip lists."""
    if reference.kind == "hub":
        return reference.name, reference.file
    address = open_clip_repository(reference.name, reference.tag or "")
    if address is None:
        raise UsageError(f"{reference.text}: open_clip lists no weights for it on the Hub")
    owner, name, file = (*address.split("/"), "")[:3]
    return f"{owner}/{name}", file or None


def _on_hub(
    reference: Reference, repository: str, file: str | None, beside: Sequence[str]
) -> Source:
    likely = [*CONFIG_NAMES, *WEIGHT_NAMES]
    snapshot = open_snapshot(repository, reference.revision, [file, *likely] if file else likely)
    return from_snapshot(reference, snapshot, file, beside)


def from_snapshot(
    reference: Reference, snapshot: Snapshot, file: str | None, beside: Sequence[str] = ()
) -> Source:
    """Download the weights of a reference, and the files that say what they are."""
    entry = file or choose_weights(snapshot.files, reference.text)
    folder = snapshot.fetch([entry])
    members = _members(folder, entry)
    missing = [name for name in members if name not in snapshot.files]
    if missing:
        raise UnreachableError(f"{reference.text}: lists {missing[0]} but does not hold it")
    snapshot.fetch([*members, *CONFIG_NAMES])
    if described := _of_text_tower(folder, snapshot.files):
        snapshot.fetch(described)
    if beside and any(fnmatch.fnmatchcase(n, p) for n in snapshot.files for p in beside):
        snapshot.fetch(beside)
    weights = tuple(folder / name for name in members)
    for path in weights:
        _verify(path)
    return Source(reference, weights[0].parent, weights, commit=snapshot.commit)


def _of_text_tower(folder: Path, files: Sequence[str]) -> Sequence[str]:
    """Patterns of files that describe a text tower of transformers, and of its tokenizer.

    They lie in a folder that the configuration names, or beside the weights.
    """
    path = folder / "open_clip_config.json"
    model = read_object(path).get("model_cfg") if path.is_file() else None
    text = model.get("text_cfg") if isinstance(model, dict) else None
    if not isinstance(text, dict):
        return ()
    homes = {text.get("hf_model_name"), text.get("hf_tokenizer_name")}
    described = [
        name
        for name in files
        if "/" in name and name.partition("/")[0] in homes and not name.endswith(WEIGHT_SUFFIXES)
    ]
    return described or (TOKENIZER_PATTERNS if "hf_tokenizer_name" in text else ())


def _verify(path: Path) -> None:
    """Raise UnreachableError, and drop a file, whose bytes are not those that the Hub named.

    A file that has been looked at is known by its size and times.
    """
    named = named_sha256(path)
    if named is None:
        return
    stats = stat_files([path])
    found = load_digests("files", stats, [path.name])
    if not found:
        found = {path.name: CachedDigest(sha256_of(path))}
        save_digests("files", stats, found)
    if found[path.name].digest != named:
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raise UnreachableError(
            f"{path.name}: what arrived is not what the Hub named: sha256 "
            f"{found[path.name].digest[:12]}..., expected {named[:12]}...; it is dropped, try again"
        )


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
    if not loose and any(name.endswith(".gguf") for name in names):
        found = "GGUF, which llama.cpp runs; take the model that it was converted from"
    elif not loose and "model_index.json" in names:
        found = "a diffusers pipeline; name one of its parts, such as its folder unet"
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
        inside((folder / entry).parent, name, str(folder / entry))
    return [str(PurePosixPath(entry).parent / name) for name in shards]


def read_object(path: Path) -> dict[str, object]:
    """The JSON object in a file. Raises CheckpointError for anything else."""
    try:
        found = json.loads(read_regular(path, _LARGEST_OBJECT).decode("utf-8"))
    except OSError as problem:
        raise CheckpointError(f"{path}: cannot be read: {problem.strerror}") from problem
    except (ValueError, RecursionError) as problem:
        raise CheckpointError(f"{path}: is not valid JSON: {problem}") from problem
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(found).__name__}")
    return found
