"""A merge in slices: processes that know nothing of each other write its parts in place.

`merge_slice` makes the pieces of one slice, and `finish_merge` writes headers, index and companion
files once all slices are there. The result has the bytes of a merge in one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from atlas_cli.errors import AtlasError, UsageError
from atlas_cli.io.journal import Piece
from atlas_cli.io.slices import SlicedFolder, SliceFolder
from atlas_cli.io.staging import check_space
from atlas_cli.merging.execute import complete, run
from atlas_cli.merging.merge import (
    BytesWritten,
    Merged,
    MergeListener,
    MergeOptions,
    MergeStarted,
    check_place,
    check_target,
    merged_of,
    prepare_merge,
)
from atlas_cli.merging.plan import PreparedMerge
from atlas_cli.merging.provenance import check_hashes, identity_of, locked, take_hashes
from atlas_cli.recipes.merge import Merge


@dataclass(frozen=True)
class MergeSlice:
    """A part of a model that was written. Shown as its number, or as JSON."""

    model: str
    slice: int
    slices: int
    pieces: int
    bytes: int

    def __str__(self) -> str:
        return f"{self.model} {self.slice}/{self.slices}"


def merge_slice(
    merge: Merge,
    target: Path,
    number: int,
    count: int,
    options: MergeOptions,
    *,
    on_event: MergeListener = lambda event: None,
) -> MergeSlice:
    """Write one of `count` slices of a model, or go on with what a stopped run of it left."""
    _check_single(merge)
    check_place(target, force=options.force, recovers=False)
    prepared = prepare_merge(merge, target, options, on_event)
    check_target(target, force=options.force, recovers=False)
    plan, producer = prepared.plan, prepared.inputs.producer
    every = _pieces(prepared)
    mine = {p for (p, _), one in zip(every, _slice_of(every, count), strict=True) if one == number}
    bytes_of = dict(every)
    total = sum(bytes_of[piece] for piece in mine)
    elsewhere = sum(bytes_of.values()) - total
    check_space(target, plan.bytes)
    with _explained(target):
        staging = SliceFolder(target, _identity(prepared), _files(prepared), number, count)
    on_event(MergeStarted(total))

    def advance(size: int) -> None:
        nonlocal elsewhere  # what others make is reported as done at the beginning
        shown = max(0, size - elsewhere)
        elsewhere -= size - shown
        on_event(BytesWritten(shown))

    try:
        staging.done |= bytes_of.keys() - mine
        with _explained(target):
            run(plan, producer, staging, prepared.request.limits, advance)
            staging.flush()
    finally:
        staging.close()  # and left for another run, since other slices have written it as well
    return MergeSlice(str(target), number, count, len(mine), total)


def finish_merge(
    merge: Merge,
    target: Path,
    options: MergeOptions,
    *,
    on_event: MergeListener = lambda event: None,
) -> Merged:
    """Make a model of the slices that were written. Raises AtlasError if one is missing."""
    _check_single(merge)
    check_place(target, force=options.force)
    prepared = prepare_merge(merge, target, options, on_event)
    check_target(target, force=options.force)
    request = prepared.request
    with ThreadPoolExecutor(1 + request.limits.threads) as pool, _explained(target):
        staging = SlicedFolder(target, _identity(prepared), _files(prepared))
        try:
            _check_complete(prepared, staging)
            taken = take_hashes(request.merge, request.located, pool)
            if request.merge.recipe.locked:
                check_hashes(request.merge, taken)
            staging.begin()
            complete(prepared, staging, locked(request.merge, request.located, taken))
        finally:
            staging.close()
    return merged_of(prepared)


@contextmanager
def _explained(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise AtlasError(f"{target}: cannot be written: {problem.strerror}") from problem


def _check_single(merge: Merge) -> None:
    if merge.steps:
        raise UsageError("--slice and --finish: the recipe has several merges; slice each of them")


def _check_complete(prepared: PreparedMerge, staging: SlicedFolder) -> None:
    every, count = _pieces(prepared), staging.count
    missing = sorted(
        {
            number
            for (piece, _), number in zip(every, _slice_of(every, count), strict=True)
            if piece not in staging.done
        }
    )
    if missing:
        named = ", ".join(f"{number}/{count}" for number in missing[:8])
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        raise AtlasError(
            f"{staging.target}: slices are missing or not complete: {named}{more}; write them with "
            "--slice"
        )


def _identity(prepared: PreparedMerge) -> str:
    request = prepared.request
    device = request.limits.device.type
    return identity_of(request.merge, request.located, prepared.plan, device)


def _files(prepared: PreparedMerge) -> dict[str, int]:
    return {shard.file: shard.bytes for shard in prepared.plan.shards}


def _pieces(prepared: PreparedMerge) -> list[tuple[Piece, int]]:
    """All pieces of a plan with their bytes, in the order of the files."""
    producer = prepared.inputs.producer
    return [
        ((output.number, number), (spans[-1][1] - spans[0][0]) * output.dtype.itemsize)
        for output in prepared.plan.outputs
        for number, spans in enumerate(output.pieces(whole=producer.whole(output)))
    ]


def _slice_of(pieces: list[tuple[Piece, int]], count: int) -> Iterator[int]:
    """The slice of every piece: neighbours together, and about as many bytes in each.

    A tensor at the edge of two slices is shared by them, and both compute its statistics.
    """
    total, before = sum(size for _, size in pieces), 0
    for _, size in pieces:
        yield 1 + (2 * before + size) * count // max(1, 2 * total + 1)
        before += size
