"""The verb `merge`: a recipe -> one model in a folder, written whole or not at all.

This module imports no torch: that happens once the recipe, the folder and all inputs are known.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atlas_cli.errors import AtlasError, UsageError
from atlas_cli.io.staging import recover
from atlas_cli.merging.model_card import Evaluated
from atlas_cli.merging.provenance import (
    MANIFEST,
    Located,
    check_inputs,
    locate_inputs,
    origin_lines,
)
from atlas_cli.merging.steps import folder_of_steps, make_steps, planned_steps
from atlas_cli.sources.locate import source_problems

if TYPE_CHECKING:
    from atlas_cli.merging.plan import PreparedMerge
    from atlas_cli.recipes.merge import Merge
    from atlas_cli.vectors.pool import GatheredVector

_MEMORY = 512_000_000  # bytes
_MANY = 8  # threads; with more, a merge waits for the disk and for memory


@dataclass(frozen=True)
class MergeOptions:
    """What concerns one run of a merge and does not change the values of the result.

    `memory` is the budget of the whole process in bytes; None stands for 512 MB beyond what it
    takes already. `shard` is how many bytes a file has before another one begins.
    """

    memory: int | None = None
    threads: int | None = None  # default: all cores, up to 8
    device: str = "cpu"
    shard: int = 5_000_000_000
    force: bool = False
    evaluation: Evaluated | None = None
    allow_nonfinite: bool = False
    keep_downloads: bool = False
    keep: Path | None = None  # where results of merges between go; else they go in the end
    tokenizer: bool = True  # whether the tokenizer of the base is copied
    card: bool = True  # whether a model card is written


# Events and results ---------------------------------------------------------------------------


@dataclass(frozen=True)
class FilterUnused:
    """No tensor's name contains a filter of the recipe."""

    text: str


@dataclass(frozen=True)
class SettingsUnused:
    """Keys and parameters of the recipe, by their paths, that have no effect."""

    paths: tuple[str, ...]


@dataclass(frozen=True)
class Doubt:
    """Something that is not refused, but should be known."""

    text: str


@dataclass(frozen=True)
class MergeStarted:
    """Values are about to be computed; the files of weights will have so many bytes."""

    bytes: int


@dataclass(frozen=True)
class BytesWritten:
    """So many more bytes are in their files."""

    count: int


@dataclass(frozen=True)
class RankReduced:
    """An adapter of a limited rank was written: |what it leaves out| / |the exact sum|."""

    rank: int
    error: float


@dataclass(frozen=True)
class VectorNoted:
    """Where a task vector came from; as a warning, what may surprise about it."""

    text: str
    warning: bool = False


MergeEvent = (
    RankReduced | FilterUnused | SettingsUnused | VectorNoted | Doubt | MergeStarted | BytesWritten
)
MergeListener = Callable[[MergeEvent], None]


@dataclass(frozen=True)
class Merged:
    """A model that was written. Shown as its path, or as JSON."""

    model: str
    method: str
    tensors: int
    parameters: int
    bytes: int
    files: dict[str, str]

    def __str__(self) -> str:
        return self.model


@dataclass(frozen=True)
class MergePlan:
    """What a merge would read and write. `beside` names the companion files that are copied."""

    method: str
    tensors: int
    merged: int
    copied: int
    bytes_read: int
    bytes_written: int
    peak_memory: int
    threads: int
    beside: list[str]
    files: list[dict[str, Any]]
    steps: list[dict[str, Any]]
    layers: list[dict[str, Any]]
    explained: list[dict[str, Any]]
    outputs: list[dict[str, Any]]

    def __str__(self) -> str:
        lines = [
            f"method   {self.method}",
            f"tensors  {self.tensors} ({self.merged} merged, {self.copied} copied)",
            f"read     {self.bytes_read / 1e6:,.1f} MB",
            f"written  {self.bytes_written / 1e6:,.1f} MB in {len(self.files)} file(s)",
            f"memory   {self.peak_memory / 1e6:,.1f} MB at most, {self.threads} threads",
            f"beside   {', '.join(self.beside) or 'nothing'}",
        ]
        lines += [
            f"step     {one['name']}: {one['method']}, {one['tensors']} tensors, "
            f"{one['bytes_written'] / 1e6:,.1f} MB"
            for one in self.steps
        ]
        lines += [f"layers   {line}" for line in origin_lines(self.layers)]
        for one in self.explained:
            values = {key: one[key] for key in ("parameters", "models")}
            lines.append(f"{one['tensor']}: {json.dumps(values)}")
        return "\n".join(lines)


# The verb -------------------------------------------------------------------------------------


def merge(
    recipe: Merge | str | Path,
    output: str | Path,
    options: MergeOptions | None = None,
    *,
    on_event: MergeListener = lambda event: None,
) -> Merged:
    """Merge models as a recipe, checked or in a file, says, and write the result to a folder.

    The folder appears when it is complete. A merge that was stopped is resumed by the same call.
    """
    checked, target, options = _checked(recipe), Path(output), options or MergeOptions()
    check_place(target, force=options.force)
    if not checked.steps:
        return _write(checked, target, options, on_event)
    between = replace(options, force=True, evaluation=None)
    with folder_of_steps(target, options.keep) as folder:
        last = make_steps(
            *(checked, folder, locate_inputs),
            lambda step, place: _write(step, place, between, on_event),
        )
        return _write(last, target, options, on_event)


def _write(merge: Merge, target: Path, options: MergeOptions, on_event: MergeListener) -> Merged:
    prepared = prepare_merge(merge, target, options, on_event)
    check_target(target, force=options.force)

    from atlas_cli.merging.execute import write

    on_event(MergeStarted(prepared.plan.bytes))
    write(prepared, lambda count: on_event(BytesWritten(count)))
    adapter = prepared.inputs.adapter
    if adapter and merge.recipe.max_rank and (error := adapter.error()) is not None:
        on_event(RankReduced(merge.recipe.max_rank, error))
    return merged_of(prepared)


def merged_of(prepared: PreparedMerge) -> Merged:
    """What is told of a model that was written."""
    plan, target = prepared.plan, prepared.request.target
    return Merged(
        str(target),
        prepared.request.merge.method,
        len(plan.outputs),
        sum(tensor.size for tensor in plan.outputs),
        plan.bytes,
        {shard.file: str(target / shard.file) for shard in plan.shards},
    )


def plan_merge(
    recipe: Merge | str | Path,
    options: MergeOptions | None = None,
    *,
    output: str | Path = "merged",
    explain: str | None = None,
    on_event: MergeListener = lambda event: None,
) -> MergePlan:
    """Check everything that `merge` checks, and give what it would do; nothing is written.

    `explain` is a regular expression: the parameters of tensors whose names it finds are given.
    """
    checked, options = _checked(recipe), options or MergeOptions()

    def prepare(merge: Merge, target: Path) -> PreparedMerge:
        return prepare_merge(merge, target, options, on_event)

    with planned_steps(checked, prepare) as (last, steps):
        prepared = prepare(last, Path(output))
        listed = [_step(one) for one in steps]
        return _plan_of(prepared, explain, listed)


def _step(prepared: PreparedMerge) -> dict[str, Any]:
    merge, plan = prepared.request.merge, prepared.plan
    facts = {"name": merge.name, "method": merge.method, "tensors": len(plan.outputs)}
    return {**facts, "bytes_written": plan.bytes}


def _plan_of(
    prepared: PreparedMerge, explain: str | None, steps: list[dict[str, Any]]
) -> MergePlan:
    from atlas_cli.merging.execute import peak_memory
    from atlas_cli.merging.segments import explained

    plan, inputs = prepared.plan, prepared.inputs
    merged = sum(tensor.merged for tensor in plan.outputs)
    return MergePlan(
        method=prepared.request.merge.method,
        tensors=len(plan.outputs),
        merged=merged,
        copied=len(plan.outputs) - merged,
        bytes_read=prepared.bytes_read,
        bytes_written=plan.bytes,
        peak_memory=peak_memory(prepared.peak, prepared.request.limits),
        threads=prepared.request.limits.threads,
        beside=prepared.companions,
        files=[{"file": shard.file, "bytes": shard.bytes} for shard in plan.shards],
        steps=steps,
        layers=inputs.origins,
        explained=explained(inputs.segments, inputs.resolved, explain) if explain else [],
        outputs=[tensor.facts() for tensor in plan.outputs],
    )


def with_max_rank(merge: Merge, rank: int) -> Merge:
    """The same merge of adapters with a limit on the rank, which its lockfile keeps."""
    recipe = merge.recipe.model_copy(update={"max_rank": rank})
    return replace(merge, recipe=recipe, raw={**merge.raw, "max_rank": rank})


def _checked(recipe: Merge | str | Path) -> Merge:
    from atlas_cli.recipes.merge import read_merge

    if not isinstance(recipe, str | Path):
        return recipe
    try:
        text = Path(recipe).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise UsageError(f"{recipe}: cannot be read as UTF-8 text") from problem
    return read_merge(text, str(recipe), source_problems)


def prepare_merge(
    merge: Merge, target: Path, options: MergeOptions, on_event: MergeListener
) -> PreparedMerge:
    """Find and open all inputs of one merge, and plan it. Nothing is written."""
    if merge.idle:
        on_event(SettingsUnused(merge.idle))
    located = locate_inputs(merge)
    check_inputs(target, located)

    from atlas_cli.merging.execute import prepare
    from atlas_cli.merging.plan import Limits, MergeRequest, idle_filters
    from atlas_cli.parallel import choose_device, resident

    threads = options.threads or min(_MANY, os.cpu_count() or 1)
    device = choose_device(options.device)
    memory = _MEMORY + resident() if options.memory is None else options.memory
    limits = Limits(memory, threads, device, options.allow_nonfinite)
    vectors = _gathered(merge, located, options, on_event)
    request = MergeRequest(
        *(_pinned(merge, vectors), located, target, limits, options.shard, options.evaluation),
        *(vectors, options.tokenizer, options.card),
    )
    prepared = prepare(request)
    for text in prepared.inputs.doubts:
        on_event(Doubt(text))
    for text in idle_filters(merge, [tensor.name for tensor in prepared.plan.outputs]):
        on_event(FilterUnused(text))
    return prepared


def _gathered(
    merge: Merge, located: Mapping[str, Located], options: MergeOptions, on_event: MergeListener
) -> tuple[GatheredVector, ...]:
    """The files of the recipe's task vectors, extracted on the way if need be."""
    if merge.method != "atlas":
        return ()
    from atlas_cli.merging.learned import gather_vectors
    from atlas_cli.vectors.pool import Gathering

    how = Gathering(
        keep_downloads=options.keep_downloads,
        tell=lambda text: on_event(VectorNoted(text)),
        warn=lambda text: on_event(VectorNoted(text, warning=True)),
    )
    return tuple(gather_vectors(merge.recipe, located[merge.layout].model, how))


def _pinned(merge: Merge, vectors: Sequence[GatheredVector]) -> Merge:
    """The merge with vectors by the names that stay true; as it is if all are plain files."""
    from atlas_cli.recipes.learned import VectorFile

    if all(one.storage is None and one.commit is None for one in vectors):
        return merge
    entries = [
        VectorFile(file=one.text, name=one.name, sha256=one.sha256, storage=one.storage)
        for one in vectors
    ]
    return merge.with_vectors(entries, {one.text: one.file for one in vectors})


def check_target(target: Path, *, force: bool, recovers: bool = True) -> None:
    """Raise AtlasError unless a model can be written to this folder without a loss."""
    check_place(target, force=force, recovers=recovers)
    if target.exists() and not target.is_dir():
        raise AtlasError(f"{target}: is a file; a model is a folder")
    if target.exists() and any(target.iterdir()) and not (target / MANIFEST).is_file():
        raise AtlasError(f"{target}: was not written by atlas merge; remove it yourself")


def check_place(target: Path, *, force: bool, recovers: bool = True) -> None:
    """Raise AtlasError for what can be wrong with the folder whatever the inputs are.

    What a kill left is put right first, unless other processes may be writing there.
    """
    if not target.absolute().parent.is_dir():
        raise AtlasError(f"{target.parent}: no such folder")
    if recovers:
        recover(target)
    if target.is_dir() and any(target.iterdir()) and not force:
        raise AtlasError(f"{target}: exists already; use --force to replace it")
