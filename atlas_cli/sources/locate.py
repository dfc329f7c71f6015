"""A model reference -> the files behind it, wherever they are, and their digests.

Digests are cached with the path, size and times of their files. No result depends on the cache: a
digest whose entry is missing, damaged or of other files is computed again, and an entry that cannot
be written is skipped.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import json
import math
import os
import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from atlas_cli.errors import AtlasError, CheckpointError, UnreachableError, UsageError
from atlas_cli.io.files import whole_file
from atlas_cli.io.paths import inside, open_regular, read_regular
from atlas_cli.sources.hub import Snapshot, open_snapshot
from atlas_cli.sources.references import Reference, builtin_model, open_clip_repository

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
_WINDOW = 1 << 18  # bytes of a file that are hashed at a time: they stay in the cache of a core
_LARGEST_OBJECT = 64 << 20  # bytes of a JSON file; the index of a large model has some thousand


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


# Digests --------------------------------------------------------------------------------------

_SETTLED = 2.0  # seconds; the coarsest clock that a file system keeps
_HEXADECIMAL = re.compile(r"[0-9a-f]+")
SHA256, XXH3 = 64, 32  # hexadecimal digits of a digest


def sha256_of(path: Path) -> str:
    """The sha256 of a file's bytes, in hexadecimal."""
    return _hashed(path, hashlib.sha256())


def blake3_of(path: Path) -> str:
    """The BLAKE3 of a file's bytes, in hexadecimal.

    Several files are hashed at a time, each by one thread: threads that share a file cost more.
    """
    from blake3 import blake3

    return _hashed(path, blake3())


def _hashed(path: Path, found: Any) -> str:
    try:
        # Read, not mapped: a mapped file that another program cuts short ends this one.
        with open_regular(path) as file:
            room = memoryview(bytearray(min(_WINDOW, os.fstat(file.fileno()).st_size)))
            while count := file.readinto(room):
                found.update(room[:count])
    except OSError as problem:
        raise CheckpointError(f"{path}: cannot be read: {problem.strerror}") from problem
    return str(found.hexdigest())


DIGESTS = {"blake3": blake3_of, "sha256": sha256_of}  # kinds; all have 64 digits


def named_sha256(path: Path) -> str | None:
    """The sha256 that the Hub's cache has named a file by; None for any other file.

    The cache holds links from a snapshot to blobs, and names those of large files by their sha256.
    """
    if path.is_symlink():
        blob = path.resolve()
        if blob.parent.name == "blobs" and re.fullmatch("[0-9a-f]{64}", blob.name):
            return blob.name
    return None


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


def digest_kind(path: Path) -> str:
    """The kind of digest that is quickest to come by."""
    return "sha256" if named_sha256(path) else "blake3"


def digest_of(path: Path, kind: str) -> str:
    """A digest of a file, from the name or from the cache if it is known."""
    if kind == "sha256" and (known := named_sha256(path)):
        return known
    what = "files" if kind == "sha256" else f"{kind} of files"
    stats = stat_files([path])
    found = load_digests(what, stats, [path.name])
    if not found:
        found = {path.name: CachedDigest(DIGESTS[kind](path))}
        save_digests(what, stats, found)
    return found[path.name].digest


def cache_folder() -> Path:
    """ATLAS_CACHE, or `atlas` in the user's cache folder. Everything in it can be deleted."""
    if chosen := os.environ.get("ATLAS_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "atlas"


@dataclass(frozen=True)
class CachedDigest:
    """The digest of a file or of a block in hexadecimal, and the norm of a block."""

    digest: str
    norm: float = 0.0

    def is_sound(self, digits: int) -> bool:
        """Whether the values are ones that atlas writes, with a digest of so many digits."""
        number = type(self.norm) is float and math.isfinite(self.norm) and self.norm >= 0
        return number and len(self.digest) == digits and bool(_HEXADECIMAL.fullmatch(self.digest))


@dataclass(frozen=True)
class FileStats:
    """Path, device, inode, size and both times of some files, at one moment.

    `settled` says whether all files were old enough that any later change shows in their times.
    If one of them cannot be looked at, `files` is empty and `settled` is False.
    """

    files: tuple[tuple[str | int, ...], ...]
    settled: bool


def stat_files(paths: Sequence[Path]) -> FileStats:
    """The stats of files; to be taken before the files are read."""
    now = time.time_ns()
    try:
        seen = [(str(path.resolve()), path.stat()) for path in paths]
    except (OSError, RuntimeError):  # a loop of links
        return FileStats((), settled=False)
    youngest = max(max(status.st_mtime_ns, status.st_ctime_ns) for _, status in seen)
    files = tuple(
        (path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        for path, status in seen
    )
    return FileStats(files, settled=now - youngest > _SETTLED * 1e9)


def load_digests(
    what: str, stats: FileStats, names: Collection[str], digits: int = SHA256
) -> dict[str, CachedDigest]:
    """The cached digests of unchanged files under each of the names; empty unless all are there."""
    try:
        found = json.loads(_entry(what, stats).read_text("utf-8"))
        same = found["files"] == [list(file) for file in stats.files] != []
        digests = {name: CachedDigest(*found["known"][name]) for name in names}
        sound = all(one.is_sound(digits) for one in digests.values())
    except (OSError, RuntimeError, ValueError, LookupError, TypeError):
        return {}
    return digests if same and sound else {}


def save_digests(what: str, stats: FileStats, digests: Mapping[str, CachedDigest]) -> None:
    """Cache digests, unless the files have changed since their stats were taken."""
    files = [Path(str(file[0])) for file in stats.files]
    if not stats.settled or stat_files(files).files != stats.files:
        return
    lines = {name: (one.digest, one.norm) for name, one in digests.items()}
    text = json.dumps({"files": stats.files, "known": lines}, sort_keys=True)
    with contextlib.suppress(OSError, RuntimeError):
        entry = _entry(what, stats)
        entry.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(entry) as temporary:
            temporary.write_text(text, "utf-8")


def _entry(what: str, stats: FileStats) -> Path:
    """The entry of these paths, whatever the sizes and times: a new digest replaces an old one."""
    key = json.dumps([what, [file[0] for file in stats.files]])
    return cache_folder() / "digests" / f"{hashlib.sha256(key.encode()).hexdigest()}.json"
