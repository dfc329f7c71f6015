"""What users write for task vectors -> a name for each vector, and where its files are.

A text may stand for one vector or for a group: a folder, builtin:all, a set of the zoo, a
collection on the Hub, or a repository with several vectors.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from atlas_cli.errors import AtlasError, UnreachableError, UsageError
from atlas_cli.io.files import cache_folder, whole_file
from atlas_cli.sources import hub, zoo
from atlas_cli.sources.hub import Snapshot
from atlas_cli.sources.locate import (
    BUILTIN_VECTORS,
    CONFIG_NAMES,
    WEIGHT_NAMES,
    WEIGHT_SUFFIXES,
    Reference,
    hub_address,
    is_of_zoo,
    parse_reference,
    vector_file,
)

_COLLECTION = re.compile(r"(?:hf://|https://huggingface\.co/)collections/([\w.-]+/[\w.-]+)")
_COMMIT = re.compile(r"[0-9a-f]{40}")
# File names that say nothing of the task; their folder does.
_PLAIN = re.compile(
    r"(open_clip_)?(pytorch_)?(adapter_)?model|(linear_|nonlinear_)?finetuned|weights|checkpoint"
    r"|full"
)
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Listing:
    """A repository at a commit. `problem` is why the Hub could not be asked this time."""

    snapshot: Snapshot
    problem: UnreachableError | None = None


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
    problems = []
    parts = [text] if kind == "vector" or Path(text).exists() else text.rsplit("+", 1)
    for part in parts:  # a path may have a + in it
        try:
            check_vectors([part]) if kind == "vector" else parse_reference(part)
        except UsageError as problem:
            problems.append(str(problem))
    return problems


def name_vectors(texts: Sequence[str], tell: Tell = lambda text: None) -> list[VectorName]:
    """Every vector that the texts stand for. The Hub is asked for what only it knows."""
    return [name for text in texts for name in _listed(text, tell)]


def _listed(text: str, tell: Tell) -> Iterator[VectorName]:
    if (match := _COLLECTION.fullmatch(text)) is None:
        yield from _named(text, ask=True)
        return
    items = _collection(match[1])
    models = [name for kind, name in items if kind == "model"]
    if not models:
        raise UsageError(f"{text}: holds no models")
    for kind, name in items:
        if kind != "model":
            tell(f"{name}: left out, since it is a {kind} and no model")
    for model in models:
        yield from (replace(one, group=text) for one in _named(f"hf://{model}", ask=True))


def _named(text: str, *, ask: bool) -> Iterator[VectorName]:
    if is_of_zoo(text):
        entries = zoo.find_entries(text)
        group = text if len(entries) > 1 else None
        for entry in entries:
            yield VectorName(entry.name, entry.task, entry.reference, group)
    elif text == "builtin:all":
        for name in BUILTIN_VECTORS:
            yield from (replace(one, group=text) for one in _named(f"builtin:{name}", ask=ask))
    elif text.startswith("builtin:") or _is_local(text):
        yield from _at_path(text, vector_file(text))
    else:
        reference = _parse(text)
        files = _vectors_in(reference) if ask else ()
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


def _vectors_in(reference: Reference) -> tuple[str, ...]:
    """The files of a repository that holds task vectors; empty if it holds a model."""
    if reference.kind != "hub" or reference.file:
        return ()
    files = look_up(reference).snapshot.files
    if any(name in files for name in WEIGHT_NAMES):
        return ()
    return tuple(name for name in files if name.endswith(".safetensors"))


def _within(reference: Reference, file: str, *, group: str | None) -> VectorName:
    path, at, revision = reference.text.partition("@")
    one = replace(reference, text=f"{path.rstrip('/')}/{file}{at}{revision}", file=file)
    return VectorName(one.text, name_of(one), one, group)


def name_of(reference: Reference) -> str:
    """A name for a vector, from what its model is called."""
    if reference.kind == "open_clip":
        return f"{reference.name}-{reference.tag}"
    if reference.kind != "path":
        name = reference.name.partition("/")[2] or reference.name
        file = Path(reference.file or name)
        if not reference.file:
            return name
        if not _PLAIN.fullmatch(file.stem):
            return file.stem
        return file.parent.name or name
    path = Path(reference.name).resolve()
    if path.is_dir():
        return path.name
    return path.parent.name if _PLAIN.fullmatch(path.stem) and path.parent.name else path.stem


# What the Hub said ----------------------------------------------------------------------------


def look_up(reference: Reference) -> Listing:
    """Which commit a reference means, and its files; without an answer, what the Hub said last.

    A commit never changes: the Hub is not asked for one that is known.
    """
    repository, _ = hub_address(reference)
    revision = reference.revision
    known = _recall(repository, revision)
    if known and revision and _COMMIT.fullmatch(revision):
        return Listing(known)
    try:
        found = hub.ask(repository, revision)
    except UnreachableError as problem:
        if known is None:
            raise
        return Listing(known, problem)
    for name in {revision, found.commit}:
        _remember(_memory(repository, name), {"commit": found.commit, "files": found.files})
    return Listing(found)


def last_commit(reference: Reference) -> str | None:
    """The commit that a reference meant when the Hub was last asked."""
    known = _recall(hub_address(reference)[0], reference.revision)
    return known.commit if known else None


def _collection(slug: str) -> list[tuple[str, str]]:
    memory = cache_folder() / "hub" / f"{_digest('collection', slug)}.json"
    try:
        items = hub.ask_collection(slug)
    except UnreachableError as problem:
        try:
            return [(kind, name) for kind, name in json.loads(memory.read_text("utf-8"))["items"]]
        except (OSError, ValueError, LookupError, TypeError):
            raise problem from None
    _remember(memory, {"items": items})
    return items


def _memory(repository: str, revision: str | None) -> Path:
    return cache_folder() / "hub" / f"{_digest(repository, revision)}.json"


def _digest(*words: object) -> str:
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()


def _recall(repository: str, revision: str | None) -> Snapshot | None:
    try:
        found = json.loads(_memory(repository, revision).read_text("utf-8"))
        return Snapshot(repository, str(found["commit"]), tuple(map(str, found["files"])))
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _remember(memory: Path, found: dict[str, object]) -> None:
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(memory) as temporary:
            temporary.write_text(json.dumps(found), "utf-8")
    except OSError as problem:
        raise AtlasError(
            f"{memory.parent}: cannot be written: {problem.strerror}; "
            "set ATLAS_CACHE to a folder that can be written"
        ) from problem
