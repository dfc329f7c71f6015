"""What the Hub says of repositories and collections, remembered for when it does not answer."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from atlas_cli.errors import AtlasError, UnreachableError, UsageError
from atlas_cli.io.files import cache_folder, read_regular, whole_file
from atlas_cli.sources.hub import Snapshot, ask, ask_collection
from atlas_cli.sources.model_files import WEIGHT_NAMES

_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Listing:
    """A repository at a commit. `problem` is why the Hub could not be asked this time."""

    snapshot: Snapshot
    problem: UnreachableError | None = None


def look_up(repository: str, revision: str | None) -> Listing:
    """Which commit a revision means, and its files; without an answer, what the Hub said last.

    A commit never changes: the Hub is not asked for one that is known.
    """
    known = _recall(repository, revision)
    if known and revision and _COMMIT.fullmatch(revision):
        return Listing(known)
    try:
        found = ask(repository, revision)
    except UnreachableError as problem:
        if known is None:
            raise
        return Listing(known, problem)
    for name in {revision, found.commit}:
        _remember(_memory(repository, name), {"commit": found.commit, "files": found.files})
    return Listing(found)


def last_commit(repository: str, revision: str | None) -> str | None:
    """The commit that a revision meant when the Hub was last asked."""
    known = _recall(repository, revision)
    return known.commit if known else None


def collected_models(text: str, slug: str, tell: Callable[[str], None]) -> list[str]:
    """The models of a collection; `tell` is called with what else it holds."""
    items = _collection(slug)
    models = [name for kind, name in items if kind == "model"]
    if not models:
        raise UsageError(f"{text}: holds no models")
    for kind, name in items:
        if kind != "model":
            tell(f"{name}: left out, since it is a {kind} and no model")
    return models


def vectors_in(repository: str, revision: str | None) -> tuple[str, ...]:
    """The files of a repository that holds task vectors; empty if it holds a model."""
    files = look_up(repository, revision).snapshot.files
    if any(name in files for name in WEIGHT_NAMES):
        return ()
    return tuple(name for name in files if name.endswith(".safetensors"))


def _collection(slug: str) -> list[tuple[str, str]]:
    memory = cache_folder() / "hub" / f"{_digest('collection', slug)}.json"
    try:
        items = ask_collection(slug)
    except UnreachableError as problem:
        try:
            return [(kind, name) for kind, name in json.loads(read_regular(memory))["items"]]
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
        found = json.loads(read_regular(_memory(repository, revision)))
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
