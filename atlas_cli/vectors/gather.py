"""Task vectors by name -> their files. What is no vector yet is extracted once, and cached.

The cache has a file for each base, source and storage: a source on the Hub is known by its commit,
a local one by the sha256 of its files. One model at a time is downloaded, and dropped when its
vector is written.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from atlas_cli.core.storage import Form
from atlas_cli.errors import AtlasError, CheckpointError, UnreachableError, UsageError
from atlas_cli.io.checkpoint import open_tensors
from atlas_cli.io.files import cache_folder, locked, sha256_of
from atlas_cli.models.folders import is_adapter
from atlas_cli.models.lora import is_lora_torch
from atlas_cli.sources.hub import Snapshot
from atlas_cli.sources.listings import Listing, last_commit, look_up
from atlas_cli.sources.locate import (
    Source,
    VectorName,
    choose_weights,
    from_snapshot,
    is_of_zoo,
    locate,
    name_vectors,
    parse_reference,
)
from atlas_cli.sources.reference import Reference, hub_address
from atlas_cli.sources.zoo import find_entries
from atlas_cli.vectors.bases import Base, open_base
from atlas_cli.vectors.differences import Choice
from atlas_cli.vectors.extract import Options, extract_to
from atlas_cli.vectors.format import Header, read_header
from atlas_cli.vectors.pool import (
    GatheredVector,
    Gathering,
    called_by_header,
    is_stored,
    is_vector,
    stored_vector,
    wanted,
)
from atlas_cli.vectors.targets import is_integer

_FACTORS = "fp16"  # factors have no 8-bit form
_AT_ONCE = 8  # questions to the Hub
_ROOM = "set ATLAS_CACHE to a folder with room"


def gather(
    names: Sequence[VectorName], base: Source, how: Gathering | None = None
) -> list[GatheredVector]:
    """The files of task vectors of a base, each downloaded and extracted if need be."""
    how = how or Gathering()
    taken = wanted([_called(name, base) for name in names], how)
    on_hub = [name for name in taken if name.on_hub]
    before = {name: last_commit(*_revision(name)) for name in on_hub}
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        listings = dict(zip(on_hub, pool.map(_look_up, on_hub), strict=True))
    gatherer = _Gatherer(base, how)
    for name, listing in listings.items():
        _tell_of_changes(name, before[name], listing, how)
    return [gatherer.gather(name, listings.get(name)) for name in taken]


def gather_by_name(
    texts: Sequence[str], base: str | None = None, how: Gathering | None = None
) -> list[GatheredVector]:
    """As `gather`, for a base by name; vectors of the zoo need none, since it knows their base."""
    how = how or Gathering()
    names = name_vectors(texts, how.tell)
    if base is None:
        listed = [entry.base for text in texts if is_of_zoo(text) for entry in find_entries(text)]
        strange = [text for text in texts if not is_of_zoo(text)]
        if strange or len(set(listed)) != 1:
            what = strange[0] if strange else " and ".join(sorted(set(listed)))
            raise UsageError(f"{what}: name the model that the vectors are of with --base MODEL")
        base = listed[0]
    return gather(names, locate(parse_reference(base)), how)


def _look_up(name: VectorName) -> Listing:
    return look_up(*_revision(name))


def _revision(name: VectorName) -> tuple[str, str | None]:
    """The repository of a vector on the Hub, and the revision that is named."""
    return hub_address(name.reference)[0], name.reference.revision


def _tell_of_changes(
    name: VectorName, before: str | None, listing: Listing, how: Gathering
) -> None:
    commit = listing.snapshot.commit
    if before and before != commit:
        how.tell(f"{name.text}: moved from commit {before[:12]} to {commit[:12]}")
    if listing.problem and not listing.problem.cut:
        how.warn(f"{listing.problem}; commit {commit[:12]} is taken from the cache")


def _called(name: VectorName, base: Source) -> VectorName:
    """A vector under its own name: that of its file or, of a repository, without the base's."""
    if is_stored(name):
        return called_by_header(name)
    if name.on_hub and not is_of_zoo(name.text):
        prefix = re.escape(Path(base.reference.name).name)
        return replace(name, name=re.sub(rf"^{prefix}[_-](?=.)", "", name.name))
    return name


class _Gatherer:
    """The base of the vectors, opened when the first one has to be extracted or looked for."""

    def __init__(self, source: Source, how: Gathering) -> None:
        self._source, self._how = source, how
        self._opened: list[Base] = []

    @property
    def base(self) -> Base:
        if not self._opened:
            how = self._how
            self._opened.append(open_base(self._source, how.scope, (), how.architecture))
        return self._opened[0]

    def gather(self, name: VectorName, listing: Listing | None) -> GatheredVector:
        if listing is not None:
            return self._from_hub(name, listing)
        if is_stored(name):
            return stored_vector(name)
        return self._from_source(name, locate(name.reference))

    def _from_source(self, name: VectorName, source: Source) -> GatheredVector:
        """A vector of a local model or adapter."""
        origin = [source.provenance()["sha256"], _adapter_digest(source)]
        place = self._place(name, origin, self._storage(name))
        with _claimed():
            how = "from the cache"
            if not self._is_cached(place):
                how = self._extract(place, name, source)
        self._say(name, name.text, how, place)
        return self._gathered(name, name.text, place)

    def _from_hub(self, name: VectorName, listing: Listing) -> GatheredVector:
        """A vector of a model on the Hub, or one that was published there."""
        snapshot = listing.snapshot
        repository, file = hub_address(name.reference)
        text = f"{repository}{f'/{file}' if file else ''}@{snapshot.commit}"
        reference = parse_reference(f"hf://{text}")
        origin = [repository, file, snapshot.commit]
        published, extracted = (
            self._place(name, origin, kind) for kind in (None, self._storage(name))
        )
        with _claimed():
            for place in (published, extracted):
                if self._is_cached(place):
                    self._say(name, text, "from the cache", place)
                    return self._gathered(name, text, place, published=place == published)
            if listing.problem:
                raise listing.problem
            with self._download(reference, snapshot, file) as source:
                whole = is_vector(source.weights[0])
                if whole:
                    how = _keep(source.weights[0], published)
                else:
                    tuned = replace(source, reference=name.reference)
                    how = self._extract(extracted, name, tuned)
        place = published if whole else extracted
        self._say(name, text, how, place)
        return self._gathered(name, text, place, published=whole)

    def _storage(self, name: VectorName) -> str:
        return name.storage or self._how.storage

    def _is_cached(self, place: Path) -> bool:
        """Whether the cache has a vector; a damaged one is made again."""
        if not place.is_file():
            return False
        try:
            read_header(place)
        except CheckpointError:
            self._how.warn(f"{place}: damaged, made again")
            return False
        return True

    def _gathered(
        self, name: VectorName, text: str, place: Path, *, published: bool = False
    ) -> GatheredVector:
        header = read_header(place)
        commit = text.partition("@")[2] or None if name.on_hub else None
        digest = sha256_of(place) if published else _digest_of(header.finetuned["sha256"])
        storage = None if published else self._storage(name)
        called = header.name if published else name.name
        return GatheredVector(text, called, place, digest, storage, commit, name.group)

    def _place(self, name: VectorName, origin: object, storage: str | None) -> Path:
        """Where the cache keeps a vector of this base, source and storage."""
        found = self.base.fingerprint()
        key = hashlib.sha256(json.dumps([found, origin, storage]).encode()).hexdigest()
        stem = re.sub(r"[^\w.-]+", "-", name.name).strip("-.") or "vector"
        return vector_cache() / found[:16] / f"{stem}-{key[:16]}.safetensors"

    def _extract(self, place: Path, name: VectorName, source: Source) -> str:
        """Write a vector, and say how it came about."""
        how, dtype = self._how, self._storage(name)
        raw = open_tensors(source.weights)
        if is_integer(dtype) and (is_lora_torch(raw) or is_adapter(source, raw)):
            dtype = _FACTORS
        left: list[str] = []
        form = Form(dtype)
        options = Options(Choice(how.scope), form, warn=how.warn, left_out=left.extend)
        with _room(place):
            place.parent.mkdir(parents=True, exist_ok=True)
        try:
            extract_to(place, name.name, self.base, source, options)
        except AtlasError as problem:
            if isinstance(problem.__cause__, OSError):
                raise AtlasError(f"{problem}; {_ROOM}") from problem
            raise
        return "extracted" + (f" ({', '.join(left[:3])} as in the base)" if left else "")

    @contextmanager
    def _download(
        self, reference: Reference, snapshot: Snapshot, file: str | None
    ) -> Iterator[Source]:
        """The files of a model for as long as its vector is made of them.

        A download that was cut stays, for the next run to go on with.
        """
        entry = file or choose_weights(snapshot.files, reference.text)
        if self._how.keep_downloads or snapshot.has_downloaded(entry):
            yield from_snapshot(reference, snapshot, file)
            return
        folder = cache_folder() / "downloads" / _slug(reference.text)
        with contextlib.suppress(OSError):
            for other in folder.parent.iterdir():
                if other != folder:
                    shutil.rmtree(other, ignore_errors=True)
        try:
            with _room(folder):
                folder.mkdir(parents=True, exist_ok=True)
            yield from_snapshot(reference, replace(snapshot, cache=folder), file)
        except UnreachableError:
            raise
        except BaseException as problem:
            if not isinstance(problem, KeyboardInterrupt):
                shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)

    def _say(self, name: VectorName, text: str, how: str, place: Path) -> None:
        megabytes = place.stat().st_size / 1e6
        self._how.tell(f"{name.name}: {_short(text)}, {how}, {megabytes:.1f} MB")


def vector_cache() -> Path:
    """Where vectors are kept that were made of models. All of it can be deleted."""
    return cache_folder() / "vectors"


def cached_vectors() -> Iterator[Header]:
    """The headers of all vectors in the cache."""
    for path in sorted(vector_cache().glob("*/*.safetensors")):
        with contextlib.suppress(CheckpointError):
            yield read_header(path)


def _digest_of(hashes: Mapping[str, Any]) -> str:
    """The sha256 of a source: of its file or, of several, over the lines of all."""
    if len(hashes) == 1:
        return str(next(iter(hashes.values())))
    lines = "".join(f"{hashes[name]}  {name}\n" for name in sorted(hashes))
    return hashlib.sha256(lines.encode()).hexdigest()


def _adapter_digest(source: Source) -> str | None:
    path = source.folder / "adapter_config.json"
    return sha256_of(path) if path.is_file() else None


def _keep(file: Path, place: Path) -> str:
    """Have a published vector in the cache as it is, and say so."""
    with _room(place):
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary = place.with_suffix(".part")
        try:
            shutil.copyfile(file, temporary)  # what the client keeps is a link to a blob
            temporary.replace(place)
        finally:
            temporary.unlink(missing_ok=True)
    return "downloaded"


@contextmanager
def _claimed() -> Iterator[None]:
    """Alone among all atlas processes: one download and one extraction at a time."""
    with _room(vector_cache()):
        vector_cache().mkdir(parents=True, exist_ok=True)
    with locked(vector_cache() / "lock"):
        yield


@contextmanager
def _room(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        reason = problem.strerror or os.strerror(problem.errno or 0)
        raise AtlasError(f"{path}: cannot be written: {reason}; {_ROOM}") from problem


def _slug(text: str) -> str:
    return re.sub(r"[^\w.-]+", "--", text)


def _short(text: str) -> str:
    """A reference with as much of its commit as people read."""
    path, at, commit = text.partition("@")
    return f"{path}{at}{commit[:12]}"
