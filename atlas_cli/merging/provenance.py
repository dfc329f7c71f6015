"""Where the files of a merge are, and where a merged model came from: its lockfile.

The lockfile is the recipe with every reference pinned to a commit, and every file to a digest: its
sha256 where that is known, else its BLAKE3.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atlas_cli import __version__
from atlas_cli.errors import MismatchError, UsageError
from atlas_cli.io.files import DIGESTS, digest_kind, digest_of, sha256_of
from atlas_cli.recipes.text import write_mapping
from atlas_cli.sources.hub import open_snapshot
from atlas_cli.sources.locate import Source, builtin_model, locate, parse_reference, vector_file
from atlas_cli.sources.model_files import COMPANION_FILES, CONFIG_NAMES, is_companion
from atlas_cli.sources.reference import Reference, hub_address

if TYPE_CHECKING:
    from atlas_cli.merging.plan import Plan
    from atlas_cli.recipes.merge import Merge

_REFERENCES = ("model", "base_model", "tokenizer_source", "source")  # keys that name a model
TOKENIZER = "tokenizer.json"
MANIFEST = "atlas_recipe.lock.yaml"  # a folder that has it was written by atlas merge


@dataclass(frozen=True)
class Located:
    """The files behind a reference: a model, and the adapter that is added to it, if any."""

    model: Source
    adapter: Source | None = None


def tokenizer_of(reference: str) -> str:
    """The name of the tokenizer of a model among the inputs of a merge."""
    model, at, revision = _split_adapter(reference)[0].partition("@")
    return f"{model.rstrip('/')}/{TOKENIZER}{at}{revision}"


def locate_inputs(merge: Merge) -> dict[str, Located]:
    """Find the files behind every reference, and download them if need be."""
    found = {}
    for reference in merge.references:
        companions = COMPANION_FILES if reference == merge.layout else ()
        source = locate(parse_reference(reference), companions)
        found[reference] = Located(source, source.adapter)
    return found | _tokenizers(merge)


def _tokenizers(merge: Merge) -> dict[str, Located]:
    """The tokenizers that a recipe aligns models with, each as an input of its own."""
    from atlas_cli.recipes.merge import split_adapter

    wish = merge.tokenizer
    if wish is None:
        return {}
    named = [] if wish.source in ("base", "union") else [wish.source]
    found = {}
    for reference in dict.fromkeys([*merge.references, *named]):
        source = _locate_file(parse_reference(split_adapter(reference)[0]), TOKENIZER)
        if source is not None:
            found[tokenizer_of(reference)] = Located(source)
    return found


def _locate_file(reference: Reference, name: str) -> Source | None:
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
    beside = [each for each in snapshot.files if "/" not in each and is_companion(each)]
    folder = snapshot.fetch([name, *beside])
    return Source(reference, folder, (folder / name,), commit=snapshot.commit)


def check_inputs(target: Path, located: Mapping[str, Located]) -> None:
    """Raise UsageError if the result would be written over a model that it is made of."""
    for reference, found in located.items():
        if target.resolve() in [path.resolve().parent for path in found.model.weights]:
            raise UsageError(f"{target}: is the folder of {reference}; write to another one")


# The lockfile ---------------------------------------------------------------------------------


def pinned(reference: str, located: Located) -> str:
    """A reference with the commit that it means now; what has no commit stays as it is."""
    model, adapter = _split_adapter(reference)
    parts = [_pin(model, located.model)]
    if adapter and located.adapter:
        parts.append(_pin(adapter, located.adapter))
    return "+".join(parts)


def _split_adapter(reference: str) -> tuple[str, str | None]:
    from atlas_cli.recipes.merge import split_adapter  # pydantic is slow to import

    return split_adapter(reference)


def _pin(text: str, source: Source) -> str:
    if source.commit is None or parse_reference(text).kind != "hub":
        return text
    return f"{text.partition('@')[0]}@{source.commit}"


Digests = Mapping[str, Mapping[str, tuple[str, str]]]  # by source and file: the kind and the digest


def locked(merge: Merge, located: Mapping[str, Located], digests: Digests) -> dict[str, Any]:
    """The recipe with every reference pinned, and a digest of every file under `locked`."""
    pins = {reference: pinned(reference, found) for reference, found in located.items()}
    recipe = _replaced(merge.raw, pins)
    recipe["locked"] = {
        name: _by_kind(digests[name]) | ({"commit": commit} if commit else {})
        for name, commit in _named_sources(merge, located).items()
    }
    if not merge.aliases:
        return recipe
    from atlas_cli.recipes.merge_documents import with_places

    named: dict[str, Any] = with_places(recipe, merge.aliases)
    return named


def _by_kind(digests: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    """The digests of files under the name of their kind."""
    found: dict[str, Any] = {}
    for file, (kind, digest) in digests.items():
        found.setdefault(kind, {})[file] = digest
    return found


def _replaced(raw: Mapping[str, Any], pins: Mapping[str, str]) -> dict[str, Any]:
    def walk(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: walk(item, name) for name, item in value.items()}
        if isinstance(value, list):
            return [walk(item, key) for item in value]
        return pins.get(value, value) if key in _REFERENCES and isinstance(value, str) else value

    return {key: walk(value, key) for key, value in raw.items() if key != "locked"}


def _named_sources(merge: Merge, located: Mapping[str, Located]) -> dict[str, str | None]:
    """Every source by its pinned name, with its commit."""
    return {name: source.commit if source else None for name, source in _sources(merge, located)}


def _sources(merge: Merge, located: Mapping[str, Located]) -> Iterator[tuple[str, Source | None]]:
    for reference, found in located.items():
        model, adapter = _split_adapter(reference)
        yield _pin(model, found.model), found.model
        if adapter and found.adapter:
            yield _pin(adapter, found.adapter), found.adapter
    for file in loose_files(merge):
        yield file, None


def loose_files(merge: Merge) -> list[str]:
    """Files that a recipe names beside its models: task vectors, coefficients and a head."""
    recipe = merge.recipe
    files = [entry.file for entry in recipe.vectors or []]
    files += [recipe.coefficients] if isinstance(recipe.coefficients, str) else []
    return files + ([recipe.head.file] if recipe.head and recipe.head.file else [])


def promised_hashes(merge: Merge, located: Mapping[str, Located]) -> Digests:
    """As take_hashes, with blanks of the same length."""
    blank = {
        name: {path.name: (_kind(merge, name, path), "0" * 64) for path in paths}
        for name, paths in _files(merge, located).items()
    }
    return {**blank, **_pinned_digests(merge)}


def take_hashes(merge: Merge, located: Mapping[str, Located], pool: Executor) -> Digests:
    """A digest of every file that is read, by source. Known ones are remembered."""
    begun = {
        name: {
            path.name: (kind := _kind(merge, name, path), pool.submit(digest_of, path, kind))
            for path in paths
        }
        for name, paths in _files(merge, located).items()
    }
    taken = {
        name: {file: (kind, future.result()) for file, (kind, future) in files.items()}
        for name, files in begun.items()
    }
    return {**taken, **_pinned_digests(merge)}


def _pinned_digests(merge: Merge) -> Digests:
    """Those of vectors that are known by another name than their file, which the cache has."""
    return {
        entry.file: {Path(entry.file).name: ("sha256", entry.sha256 or "")}
        for entry in merge.recipe.vectors or []
        if entry.file in merge.files
    }


def _files(merge: Merge, located: Mapping[str, Located]) -> dict[str, Sequence[Path]]:
    """The files of every source."""
    return {
        name: source.weights if source else [vector_file(name)]
        for name, source in _sources(merge, located)
        if name not in merge.files
    }


def _kind(merge: Merge, name: str, path: Path) -> str:
    """The kind of digest that a recipe was locked with, else the one that is quickest to take.

    The kind stays, so that a lockfile gives the same bytes again: their header holds the lock.
    """
    if name in merge.recipe.locked:
        return next((k for k in DIGESTS if path.name in merge.recipe.locked[name].of(k)), "sha256")
    return "sha256" if name in loose_files(merge) else digest_kind(path)


def written_hashes(plan: Plan, folder: Path) -> tuple[str, ...]:
    """The sha256 of every file of weights that a merge has written."""
    return tuple(sha256_of(folder / shard.file) for shard in plan.shards)


def check_hashes(merge: Merge, digests: Digests) -> None:
    """Raise MismatchError for a source that is not what the recipe was locked with."""
    for name, entry in merge.recipe.locked.items():
        for kind in DIGESTS:
            for file, wanted in entry.of(kind).items():
                _, found = digests.get(name, {}).get(file, (kind, ""))
                if found != wanted:
                    said = f"{found[:12]}..." if found else "no such file"
                    raise MismatchError(
                        f"{name}: {file} is not what the recipe was locked with: {kind} {said}, "
                        f"expected {wanted[:12]}..."
                    )


def lock_text(
    recipe: dict[str, Any],
    origins: Sequence[Mapping[str, Any]] = (),
    preceding: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The locked recipe as a file; `origins` say where the layers of a stack come from.

    `preceding` are the locked recipes of merges that it needs.
    """
    comment = "The recipe of this model, with every input pinned. Merging it gives the same bytes."
    last = write_mapping(recipe, "\n".join([comment, *origin_lines(origins)]))
    return "---\n".join([*(write_mapping(one, "") for one in preceding), last])


def origin_lines(origins: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where layers come from, a line for each slice."""
    lines = []
    for one in origins:
        given = (f"{each['model']} {_span(each['layer_range'])}" for each in one["sources"])
        lines.append(
            f"{one['stack']} {_span(one['layers'])}: {one['method']} of {', '.join(given)}"
        )
    return lines


def _span(ends: Sequence[int]) -> str:
    return f"{ends[0]}-{ends[1] - 1}" if ends[1] - ends[0] > 1 else f"{ends[0]}"


def identity_of(merge: Merge, located: Mapping[str, Located], plan: Plan, device: str) -> str:
    """What tells one piece of work from another: plan, recipe, inputs' files, kind of device."""
    sources = [s for one in located.values() for s in (one.model, one.adapter) if s]
    paths = [path for source in sources for path in source.weights]
    paths += [merge.files.get(file) or vector_file(file) for file in loose_files(merge)]
    files = [
        (str(path.resolve()), (status := path.stat()).st_size, status.st_mtime_ns, status.st_ino)
        for path in paths
    ]
    shards = [(shard.file, shard.bytes, shard.entries) for shard in plan.shards]
    raw = json.dumps(merge.raw, sort_keys=True, default=str)
    text = json.dumps([__version__, raw, files, shards, device], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
