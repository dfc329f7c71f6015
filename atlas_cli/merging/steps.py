"""Several merges one after the other: the result of one is a model of the next.

Results in between lie in a folder beside the last one until that is complete. A run that was
stopped goes on where it was: what is there already, and made of the same, is not made again.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atlas_cli.errors import AtlasError
from atlas_cli.merging.provenance import MANIFEST, Located

if TYPE_CHECKING:
    from atlas_cli.merging.plan import PreparedMerge
    from atlas_cli.recipes.merge import Merge

_DONE = ".made_of"


@contextmanager
def folder_of_steps(target: Path, keep: Path | None) -> Iterator[Path]:
    """Where results in between lie: kept in a folder of the user's, or gone in the end.

    They stay when a run is interrupted, and go when it fails.
    """
    folder = keep or target.absolute().parent / f".{target.name}.steps"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise AtlasError(f"{folder}: cannot be written: {problem.strerror}") from problem
    try:
        yield folder
    except AtlasError:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    if keep is None:
        shutil.rmtree(folder, ignore_errors=True)


def make_steps(
    merge: Merge,
    folder: Path,
    locate: Callable[[Merge], Mapping[str, Located]],
    make: Callable[[Merge, Path], object],
) -> Merge:
    """Make the merges that the last one needs, and give that one with the places of their results.

    `make` writes the result of a merge to a folder, unless a run before has done so.
    """
    places: dict[str, str] = {}
    locks: list[Mapping[str, Any]] = []
    for step in merge.steps:
        assert step.name is not None
        target = folder / step.name.strip("./").replace("/", "-")
        placed = step.placed(places)
        marker, wanted = target / _DONE, _identity(placed, locate(placed))
        if not (marker.is_file() and marker.read_text("utf-8") == wanted):
            make(placed, target)
            marker.write_text(wanted, "utf-8")
        places[step.name] = str(target)
        locks.append({"name": step.name, **_lock_of(target)})
    return replace(merge.placed(places), preceding=tuple(locks))


def _identity(merge: Merge, located: Mapping[str, Located]) -> str:
    """What tells whether a result in between is still that of the same recipe and files."""
    sources = [one for found in located.values() for one in (found.model, found.adapter) if one]
    files = [path for source in sources for path in source.weights]
    facts = [(str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    text = json.dumps([merge.raw, facts], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _lock_of(folder: Path) -> Mapping[str, Any]:
    from atlas_cli.recipes.text import parse_mapping

    return parse_mapping((folder / MANIFEST).read_text("utf-8"), MANIFEST)


# Planning -------------------------------------------------------------------------------------


@contextmanager
def planned_steps(
    merge: Merge, prepare: Callable[[Merge, Path], PreparedMerge]
) -> Iterator[tuple[Merge, list[PreparedMerge]]]:
    """The last merge, with results in between that have headers and no values; and their plans."""
    plans: list[PreparedMerge] = []
    places: dict[str, str] = {}
    if not merge.steps:
        yield merge, plans
        return
    with tempfile.TemporaryDirectory() as folder:
        for number, step in enumerate(merge.steps):
            target = Path(folder) / str(number)
            target.mkdir()
            plans.append(prepare(step.placed(places), target))
            _write_headers(plans[-1], target)
            places[str(step.name)] = str(target)
        yield merge.placed(places), plans


def _write_headers(prepared: PreparedMerge, folder: Path) -> None:
    """Files as a merge writes them, with holes in place of values."""
    from atlas_cli.io.checkpoint import header_text
    from atlas_cli.merging.execute import write_companions

    for shard in prepared.plan.shards:
        text = header_text(shard.entries, {"format": "pt"}).ljust(shard.header)
        with (folder / shard.file).open("wb") as file:
            file.write(shard.header.to_bytes(8, "little") + text)
            file.truncate(shard.bytes)
    if prepared.plan.index is not None:
        name = f"{prepared.request.stem}.safetensors.index.json"
        (folder / name).write_text(json.dumps(prepared.plan.index))
    request = prepared.request
    write_companions(request.merge, request.located, prepared.inputs, folder)
