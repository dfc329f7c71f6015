"""The locked recipe: every reference pinned to a commit, every file to its sha256."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from atlas_cli import __version__
from atlas_cli.errors import MismatchError
from atlas_cli.merging.inputs import Located
from atlas_cli.merging.plan import Plan
from atlas_cli.recipes.merge import Merge, split_adapter
from atlas_cli.recipes.reading import write_mapping
from atlas_cli.sources.locate import Source, sha256_of
from atlas_cli.sources.references import parse_reference, vector_file


def pinned(reference: str, located: Located) -> str:
    """A reference with the commit that it means now; what has no commit stays as it is."""
    model, adapter = split_adapter(reference)
    parts = [_pin(model, located.model)]
    if adapter and located.adapter:
        parts.append(_pin(adapter, located.adapter))
    return "+".join(parts)


def _pin(text: str, source: Source) -> str:
    if source.commit is None or parse_reference(text).kind != "hub":
        return text
    return f"{text.partition('@')[0]}@{source.commit}"


def locked(
    merge: Merge, located: Mapping[str, Located], hashes: Mapping[str, Mapping[str, str]]
) -> dict[str, Any]:
    """The recipe with every reference pinned, and the sha256 of every file under `locked`."""
    pins = {reference: pinned(reference, found) for reference, found in located.items()}
    recipe = _replaced(merge.raw, pins)
    recipe["locked"] = {
        name: {"sha256": dict(hashes[name])} | ({"commit": commit} if commit else {})
        for name, commit in _named_sources(merge, located).items()
    }
    return recipe


def _replaced(raw: Mapping[str, Any], pins: Mapping[str, str]) -> dict[str, Any]:
    def walk(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: walk(item, name) for name, item in value.items()}
        if isinstance(value, list):
            return [walk(item, key) for item in value]
        return pins.get(value, value) if key in ("model", "base_model") else value

    return {key: walk(value, key) for key, value in raw.items() if key != "locked"}


def _named_sources(merge: Merge, located: Mapping[str, Located]) -> dict[str, str | None]:
    """Every source by its pinned name, with its commit."""
    return {name: source.commit if source else None for name, source in _sources(merge, located)}


def _sources(merge: Merge, located: Mapping[str, Located]) -> Iterator[tuple[str, Source | None]]:
    for reference, found in located.items():
        model, adapter = split_adapter(reference)
        yield _pin(model, found.model), found.model
        if adapter and found.adapter:
            yield _pin(adapter, found.adapter), found.adapter
    for file in loose_files(merge):
        yield file, None


def loose_files(merge: Merge) -> list[str]:
    """Files that a recipe names beside its models: task vectors, and a table of coefficients."""
    recipe = merge.recipe
    files = [entry.file for entry in recipe.vectors or []]
    return files + ([recipe.coefficients] if isinstance(recipe.coefficients, str) else [])


def promised_hashes(merge: Merge, located: Mapping[str, Located]) -> dict[str, dict[str, str]]:
    """As take_hashes, with blanks of the same length."""
    return {
        name: {path.name: "0" * 64 for path in (source.weights if source else [Path(name)])}
        for name, source in _sources(merge, located)
    }


def take_hashes(
    merge: Merge, located: Mapping[str, Located], pool: Executor
) -> dict[str, dict[str, str]]:
    """The sha256 of every file that is read, by source. Known ones are remembered."""
    begun = {name: pool.submit(_hashes, name, source) for name, source in _sources(merge, located)}
    return {name: future.result() for name, future in begun.items()}


def _hashes(name: str, source: Source | None) -> dict[str, str]:
    if source is None:
        return {Path(name).name: sha256_of(vector_file(name))}
    found: Any = source.provenance()["sha256"]
    return dict(found)


def written_hashes(plan: Plan, folder: Path) -> tuple[str, ...]:
    """The sha256 of every file of weights that a merge has written."""
    return tuple(sha256_of(folder / shard.file) for shard in plan.shards)


def check_hashes(merge: Merge, hashes: Mapping[str, Mapping[str, str]]) -> None:
    """Raise MismatchError for a source that is not what the recipe was locked with."""
    for name, entry in merge.recipe.locked.items():
        for file, digest in entry.sha256.items():
            found = hashes.get(name, {}).get(file)
            if found != digest:
                kind = f"{found[:12]}..." if found else "no such file"
                raise MismatchError(
                    f"{name}: {file} is not what the recipe was locked with: sha256 {kind}, "
                    f"expected {digest[:12]}..."
                )


def lock_text(recipe: dict[str, Any]) -> str:
    """The locked recipe as a file."""
    comment = "The recipe of this model, with every input pinned. Merging it gives the same bytes."
    return write_mapping(recipe, comment)


def identity_of(merge: Merge, located: Mapping[str, Located], plan: Plan, device: str) -> str:
    """What tells one piece of work from another: plan, recipe, inputs' files, kind of device."""
    sources = [s for one in located.values() for s in (one.model, one.adapter) if s]
    paths = [path for source in sources for path in source.weights]
    paths += [vector_file(file) for file in loose_files(merge)]
    files = [
        (str(path.resolve()), (status := path.stat()).st_size, status.st_mtime_ns, status.st_ino)
        for path in paths
    ]
    shards = [(shard.file, shard.bytes, shard.entries) for shard in plan.shards]
    raw = json.dumps(merge.raw, sort_keys=True, default=str)
    text = json.dumps([__version__, raw, files, shards, device], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
