"""What users write for models and task vectors, and the local files behind it.

References are understood without opening anything; `locate` finds their files, and downloads them
if need be. A text for task vectors may stand for one, or for a group: a folder, builtin:all, a set
of the zoo, a collection on the Hub, or a repository with several vectors.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Literal

from atlas_cli.errors import AtlasError, CheckpointError, UnreachableError, UsageError, nearest
from atlas_cli.io.files import digest_of, inside, read_regular
from atlas_cli.sources.hub import Snapshot, open_snapshot, verify
from atlas_cli.sources.listings import collected_models, vectors_in
from atlas_cli.sources.model_files import (
    CONFIG_NAMES,
    WEIGHT_NAMES,
    WEIGHT_SUFFIXES,
    text_tower_patterns,
    why_no_weights,
)
from atlas_cli.sources.open_clip_table import open_clip_tags
from atlas_cli.sources.reference import (
    PLAIN_STEM,
    Reference,
    hub_address,
    parse_hub,
    parse_published,
    published_name,
)
from atlas_cli.sources.zoo import ZOO, find_entries

BUILTIN_MODELS: tuple[str, ...] = ("tiny",)
BUILTIN_VECTORS: tuple[str, ...] = (
    *("digits", "letters", "house_numbers", "signs"),
    *("textures", "terrain", "counts", "silhouettes"),
)
_BUILTIN = "builtin:"
_OF_RUN = {"metrics.jsonl", "state.safetensors"}
_FILES = Path(__file__).parent / "builtin"
_LARGEST_OBJECT = 64 << 20  # bytes of a JSON file; the index of a large model has some thousand


# References -----------------------------------------------------------------------------------


def parse_reference(text: str) -> Reference:
    """Understand a model reference. Opens nothing; raises UsageError for what cannot be one."""
    model, plus, adapter = text.rpartition("+")
    if plus and not Path(text).expanduser().exists():  # a path may have a + in it
        if not (model and adapter):
            raise UsageError(f"'{text}': expected MODEL+ADAPTER")
        return replace(parse_reference(model), text=text, adapter=parse_reference(adapter))
    scheme, _, rest = text.partition(":")
    if scheme == "builtin":
        if rest in BUILTIN_VECTORS:
            return Reference(text, "path", str(_builtin_vector(rest)))
        if rest not in BUILTIN_MODELS:
            known = ", ".join(f"builtin:{name}" for name in BUILTIN_MODELS)
            raise UsageError(f"unknown model '{text}'{nearest(rest, BUILTIN_MODELS)} ({known})")
        return Reference(text, "builtin", rest)
    if scheme in {"hf-hub", "hf"}:
        return parse_hub(text, rest.removeprefix("//"))
    if scheme == "local-dir":
        return _parse_path(text, rest)
    if text.startswith(("./", "../", "/", "~")) or Path(text).exists():
        return _parse_path(text, text)
    return parse_published(text)


def _parse_path(text: str, path: str) -> Reference:
    local = Path(path).expanduser()
    if not local.exists():
        raise UsageError(f"no such file or folder: {path}")
    return Reference(text, "path", str(local))


def check_architecture(name: str | None) -> None:
    """Raise UsageError unless open_clip knows an architecture of that name."""
    if name is not None and name not in open_clip_tags():
        raise UsageError(f"unknown architecture '{name}'{nearest(name, open_clip_tags())}")


# What atlas comes with ------------------------------------------------------------------------


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


# Files ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """The local files behind a reference. `commit` is known for sources on the Hub.

    `adapter` is what MODEL+ADAPTER adds to the weights; all else is the model's.
    """

    reference: Reference
    folder: Path
    weights: tuple[Path, ...]
    commit: str | None = None
    adapter: Source | None = None

    @property
    def files(self) -> dict[str, Path]:
        """All files that decide the values of the tensors; those of an adapter begin with +."""
        found = {path.name: path for path in self.weights}
        if self.adapter:
            settings = self.adapter.folder / "adapter_config.json"
            added = [*self.adapter.weights, *([settings] if settings.is_file() else [])]
            found |= {f"+{path.name}": path for path in added}
        return found

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
        hashes = {name: digest_of(path, "sha256") for name, path in self.files.items()}
        return {"reference": self.reference.text, "commit": self.commit, "sha256": hashes}


def locate(reference: Reference, beside: Sequence[str] = ()) -> Source:
    """Find the files of a reference, downloading them if need be.

    `beside` are patterns of further files to download, where a repository has them.
    """
    if reference.adapter:
        model = locate(replace(reference, adapter=None), beside)
        return replace(model, reference=reference, adapter=locate(reference.adapter))
    match reference.kind:
        case "builtin":
            return _in_folder(reference, builtin_model(reference.name))
        case "path":
            path = Path(reference.name)
            if path.is_dir():
                return _in_folder(reference, path)
            return Source(reference, path.parent, (path,))
        case "open_clip" | "hub":
            repository, file = hub_address(reference)
            likely = [*filter(None, (file,)), *CONFIG_NAMES, *WEIGHT_NAMES]
            snapshot = open_snapshot(repository, reference.revision, likely)
            return from_snapshot(reference, snapshot, file, beside)


def _in_folder(reference: Reference, folder: Path) -> Source:
    names = [path.name for path in folder.iterdir()]
    if set(names) >= _OF_RUN:  # the weight file there is the state of an optimizer
        if "model" not in names:
            told = f"{reference.text}: holds a run, and no model yet"
            raise UsageError(f"{told}; first atlas merge {shlex.quote(str(folder))} -o MODEL")
        folder /= "model"
        names = [path.name for path in folder.iterdir()]
    entry = choose_weights(names, reference.text)
    return Source(reference, folder, tuple(folder / name for name in _members(folder, entry)))


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
    described = folder / "open_clip_config.json"
    config = read_object(described) if described.is_file() else {}
    if text_tower := text_tower_patterns(config, snapshot.files):
        snapshot.fetch(text_tower)
    if beside and any(fnmatch.fnmatchcase(n, p) for n in snapshot.files for p in beside):
        snapshot.fetch(beside)
    weights = tuple(folder / name for name in members)
    for path in weights:
        verify(path)
    return Source(reference, weights[0].parent, weights, commit=snapshot.commit)


def choose_weights(names: Collection[str], where: str) -> str:
    """Which of the files in a folder holds the weights, or lists the files that do."""
    for name in WEIGHT_NAMES:
        if name in names:
            return name
    indexed = sorted(name for name in names if name.endswith(".index.json"))
    loose = indexed or sorted(n for n in names if n.endswith(WEIGHT_SUFFIXES) and "/" not in n)
    if len(loose) == 1:
        return loose[0]
    raise AtlasError(f"{where}: expected one weight file, found {why_no_weights(names, loose)}")


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


# Task vectors by name -------------------------------------------------------------------------

_COLLECTION = re.compile(r"(?:hf://|https://huggingface\.co/)collections/([\w.-]+/[\w.-]+)")
Tell = Callable[[str], None]


@dataclass(frozen=True)
class VectorName:
    """A task vector that was named, alone or as one of a group. Nothing of it is opened."""

    text: str
    name: str
    reference: Reference
    group: str | None = None
    storage: str | None = None  # else as all others are kept

    @property
    def on_hub(self) -> bool:
        """Whether its files have to be downloaded."""
        return self.reference.kind in ("hub", "open_clip")


def is_of_zoo(text: str) -> bool:
    """Whether a text names a set or an entry of the zoo."""
    return text.startswith(ZOO)


def is_collection(text: str) -> bool:
    """Whether a text is the address of a collection on the Hub."""
    return _COLLECTION.fullmatch(text) is not None


def check_vectors(texts: Sequence[str]) -> None:
    """Raise UsageError for a text that cannot be a task vector. Asks nobody."""
    for text in texts:
        if not is_collection(text):
            for _ in _named(text, ask=False):
                pass


def source_problems(kind: Literal["model", "vector"], text: str) -> list[str]:
    """What is wrong with a reference to a model, or MODEL+ADAPTER, or to a task vector."""
    try:
        check_vectors([text]) if kind == "vector" else parse_reference(text)
    except UsageError as problem:
        return [str(problem)]
    return []


def name_vectors(texts: Sequence[str], tell: Tell = lambda text: None) -> list[VectorName]:
    """Every vector that the texts stand for. The Hub is asked for what only it knows."""
    return [name for text in texts for name in _listed(text, tell)]


def _listed(text: str, tell: Tell) -> Iterator[VectorName]:
    if (match := _COLLECTION.fullmatch(text)) is None:
        yield from _named(text, ask=True)
        return
    for model in collected_models(text, match[1], tell):
        yield from (replace(one, group=text) for one in _named(f"hf://{model}", ask=True))


def _named(text: str, *, ask: bool) -> Iterator[VectorName]:
    adapter = text.rpartition("+")[2]
    if adapter != text and not Path(text).expanduser().exists():
        raise UsageError(f"{text}: an adapter is a task vector by itself; name {adapter} alone")
    if is_of_zoo(text):
        entries = find_entries(text)
        group = text if len(entries) > 1 else None
        for entry in entries:
            yield VectorName(entry.name, entry.task, parse_reference(entry.address), group)
    elif text == "builtin:all":
        for name in BUILTIN_VECTORS:
            yield from (replace(one, group=text) for one in _named(f"builtin:{name}", ask=ask))
    elif text.startswith("builtin:") or _is_local(text):
        yield from _at_path(text, vector_file(text))
    else:
        reference = _parse(text)
        whole = reference.kind == "hub" and not reference.file  # a repository
        files = vectors_in(reference.name, reference.revision) if ask and whole else ()
        for file in files:
            yield _within(reference, file, group=text if len(files) > 1 else None)
        if not files:
            yield VectorName(text, name_of(reference), reference)


def _is_local(text: str) -> bool:
    """Whether a text is a path: one that exists, or that can be nothing else."""
    path = Path(text).expanduser()
    if path.exists() or text.startswith(("./", "../", "/", "~")):
        return True
    file = path.suffix in WEIGHT_SUFFIXES and (text.count("/") < 2 or path.parent.is_dir())
    return ":" not in text and (file or "/" not in text or text.endswith("/"))


def _parse(text: str) -> Reference:
    try:
        return parse_reference(text)
    except UsageError as problem:
        raise UsageError(str(problem).replace("unknown model", "unknown task vector")) from None


def _at_path(text: str, path: Path) -> Iterator[VectorName]:
    """A file, a folder of vectors, or the folder of a model or an adapter."""
    if path.is_dir() and not is_model_folder(path):
        inside = sorted(path.glob("*.safetensors"))
        if not inside:
            raise UsageError(f"{text}: holds no task vectors (*.safetensors), and is no model")
        for file in inside:
            reference = Reference(str(file), "path", str(file))
            yield VectorName(str(file), name_of(reference), reference, text)
        return
    if not path.exists():
        raise UsageError(f"no such task vector: {text}")
    name = text if text.startswith("builtin:") else str(path)
    reference = Reference(name, "path", str(path))
    yield VectorName(name, name_of(reference), reference)


def is_model_folder(folder: Path) -> bool:
    """Whether a folder holds one model or adapter, rather than task vectors."""
    return any((folder / name).is_file() for name in (*WEIGHT_NAMES, *CONFIG_NAMES))


def _within(reference: Reference, file: str, *, group: str | None) -> VectorName:
    path, at, revision = reference.text.partition("@")
    one = replace(reference, text=f"{path.rstrip('/')}/{file}{at}{revision}", file=file)
    return VectorName(one.text, name_of(one), one, group)


def name_of(reference: Reference) -> str:
    """A name for a vector, from what its model, or the adapter added to it, is called."""
    if reference.adapter:
        return name_of(reference.adapter)
    if reference.kind != "path":
        return published_name(reference)
    path = Path(reference.name).resolve()
    if path.is_dir():
        return path.name
    return path.parent.name if PLAIN_STEM.fullmatch(path.stem) and path.parent.name else path.stem
