"""A request -> a plan -> bytes in files: tensors are made by threads within a memory budget."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from atlas_cli.errors import AtlasError
from atlas_cli.io.checkpoint import header_text
from atlas_cli.io.files import write_text
from atlas_cli.io.staging import StagingFolder, check_space
from atlas_cli.merging.inputs import Inputs, open_inputs, write_companions
from atlas_cli.merging.model_card import Evaluated, Shown, card_text
from atlas_cli.merging.plan import Output, Plan, lay_out, plan_files
from atlas_cli.merging.produce import (
    CPU,
    Conversion,
    Producer,
    check_finite,
    is_finite,
    open_entry,
)
from atlas_cli.merging.provenance import (
    MANIFEST,
    Located,
    check_hashes,
    identity_of,
    lock_text,
    locked,
    promised_hashes,
    take_hashes,
    written_hashes,
)
from atlas_cli.models.clip import HEAD
from atlas_cli.models.folders import companion_files
from atlas_cli.models.heads import SavedHead, write_head
from atlas_cli.models.tensor_names import is_clip, is_transformers
from atlas_cli.parallel import ThreadPool
from atlas_cli.recipes.merge import Merge
from atlas_cli.vectors.gather import GatheredVector

_KEY = "atlas_recipe"
_DIFFUSERS = "diffusion_pytorch_model"
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
_RESERVE = 64 << 20  # bytes that the interpreter and torch still take when they begin to work


@dataclass(frozen=True)
class Limits:
    """What of the machine a merge may take."""

    memory: int = 512_000_000
    threads: int = 1
    device: torch.device = CPU
    allow_nonfinite: bool = False


@dataclass(frozen=True)
class MergeRequest:
    """A checked recipe, the files of its models, and the folder for the result."""

    merge: Merge
    located: Mapping[str, Located]
    target: Path
    limits: Limits = field(default_factory=Limits)
    shard: int = 5_000_000_000
    evaluation: Evaluated | None = None
    vectors: tuple[GatheredVector, ...] = ()
    tokenizer: bool = True  # whether that of the layout's model is copied
    card: bool = True

    @property
    def stem(self) -> str:
        """How the names of files begin: loaders of diffusers look for another one."""
        first = self.located[self.merge.layout].model.weights[0].name
        return _DIFFUSERS if first.startswith(_DIFFUSERS) else "model"


@dataclass(frozen=True)
class PreparedMerge:
    """A merge that is ready to be written: all inputs are open and fit each other."""

    request: MergeRequest
    inputs: Inputs
    plan: Plan
    peak: int  # bytes of memory for the largest tile
    head: SavedHead | None = None

    @property
    def bytes_read(self) -> int:
        """The bytes of all inputs."""
        found = self.request.located.values()
        return sum(path.stat().st_size for one in found for path in one.model.weights)

    @property
    def companions(self) -> list[str]:
        """The files that are copied along with the weights."""
        layout = self.request.located[self.request.merge.layout]
        names = [path.name for path in companion_files(layout.model)]
        return [*names, HEAD] if self.head else names


# Preparing ------------------------------------------------------------------------------------


def prepare(request: MergeRequest) -> PreparedMerge:
    """Open every header, check that all fits, and plan every byte. Reads no values of models."""
    merge, located, limits = request.merge, request.located, request.limits
    how = Conversion(merge.recipe.seed, limits.device, limits.allow_nonfinite)
    inputs = open_inputs(merge, located, how, request.vectors)
    clip = is_clip(inputs.base) and not is_transformers(inputs.base)
    # open_clip looks for one file of this name.
    stem, limit = ("open_clip_model", 1 << 62) if clip else (request.stem, request.shard)
    if inputs.adapter:
        stem, limit = "adapter_model", 1 << 62  # peft looks for one file
    names = (inputs.layout, inputs.merged, inputs.compute)
    groups = lay_out(*names, merge.recipe, limit=limit, stem=stem)
    promise = locked(merge, located, promised_hashes(merge, located))
    plan = plan_files(groups, _metadata(promise))
    check_device(plan, limits)
    companion_files(located[merge.layout].model)  # raises for what cannot be copied
    peak = check_memory(plan, inputs.producer, limits)
    head = open_entry(merge.recipe.head) if merge.recipe.head else None
    return PreparedMerge(request, inputs, plan, peak, head)


def _metadata(recipe: Mapping[str, Any]) -> dict[str, str]:
    return {_KEY: json.dumps(recipe, sort_keys=True, ensure_ascii=False)}


def resident() -> int:
    """The bytes of memory that this process takes now; 0 where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def working_memory(limits: Limits) -> int:
    """The part of the budget that is left for tensors."""
    return limits.memory - resident() - _RESERVE


def check_device(plan: Plan, limits: Limits) -> None:
    """Raise AtlasError if the device cannot compute in a dtype of the plan."""
    wide = [made.name for made in plan.outputs if made.merged and made.compute == torch.float64]
    if limits.device.type == "mps" and wide:
        raise AtlasError(f"--device mps: has no float64, which {wide[0]} is computed in")


def check_memory(plan: Plan, producer: Producer, limits: Limits) -> int:
    """The bytes that the largest tile needs. Raises AtlasError if the budget is smaller."""
    largest = max(plan.outputs, key=producer.need)
    needed, there = producer.need(largest), working_memory(limits)
    if needed > there:
        total = (needed + limits.memory - there) / 1e6
        raise AtlasError(
            f"{largest.name}: needs {total:,.0f} MB of memory at once; use --memory {total:.0f}MB"
        )
    return needed


def peak_memory(tile: int, limits: Limits) -> int:
    """The bytes that the process will take: its own, and a tile per thread within the budget."""
    return min(limits.memory, resident() + _RESERVE + tile * limits.threads)


# Writing --------------------------------------------------------------------------------------


def write(prepared: PreparedMerge, advance: Callable[[int], None] = lambda count: None) -> None:
    """Write the model, or go on with what a stopped run left. `advance` is told of bytes done."""
    request, plan = prepared.request, prepared.plan
    merge, located, target = request.merge, request.located, request.target
    check_space(target, plan.bytes)
    # One more waits for all the others.
    with ThreadPoolExecutor(1 + request.limits.threads) as pool:
        taken = pool.submit(take_hashes, merge, located, pool)
        if merge.recipe.locked:
            check_hashes(merge, taken.result())
        identity = identity_of(merge, located, plan, request.limits.device.type)
        try:
            staging = StagingFolder(target, identity, {s.file: s.bytes for s in plan.shards})
        except OSError as problem:
            raise AtlasError(f"{target}: cannot be written: {problem.strerror}") from problem
        try:
            run(plan, prepared.inputs.producer, staging, request.limits, advance)
            _finish(prepared, staging, locked(merge, located, taken.result()))
        except OSError as problem:
            staging.abandon()
            raise AtlasError(f"{target}: cannot be written: {problem.strerror}") from problem
        except AtlasError:
            staging.abandon()
            raise
        finally:
            staging.close()


def _finish(prepared: PreparedMerge, staging: StagingFolder, recipe: dict[str, Any]) -> None:
    """Write headers and companion files, and give the folder its name."""
    for number, shard in enumerate(prepared.plan.shards):
        metadata = {**(_metadata(recipe) if number == 0 else {}), "format": "pt"}
        text = header_text(shard.entries, metadata).ljust(shard.header)
        staging.write(shard.file, 0, shard.header.to_bytes(8, "little") + text)
    request, folder = prepared.request, staging.folder
    write_companions(
        request.merge, request.located, prepared.inputs, folder, tokenizer=request.tokenizer
    )
    if (index := prepared.plan.index) is not None:
        listed = json.dumps(index, indent=2, sort_keys=True) + "\n"
        write_text(folder / f"{request.stem}.safetensors.index.json", listed)
    manifest = lock_text(recipe, prepared.inputs.origins, request.merge.preceding)
    write_text(folder / MANIFEST, manifest)
    if prepared.head:
        write_head(folder / HEAD, prepared.head)
    if request.card:
        _write_card(prepared, folder, recipe)
    staging.finish()


def _write_card(prepared: PreparedMerge, folder: Path, recipe: dict[str, Any]) -> None:
    request, shown = prepared.request, None
    if request.evaluation:
        digests = written_hashes(prepared.plan, folder)  # they tell which results are of this model
        shown = Shown(request.evaluation, request.target.absolute().name, digests)
    write_text(folder / "README.md", card_text(request.merge, recipe, request.located, shown))


# Threads --------------------------------------------------------------------------------------


class Budget:
    """Bytes of memory that threads share. A thread waits until enough are free."""

    def __init__(self, total: int) -> None:
        self._free = self.total = total
        self._changed = threading.Condition()

    @contextmanager
    def take(self, wanted: int) -> Iterator[None]:
        """Hold so many bytes, once they are free."""
        with self._changed:
            self._changed.wait_for(lambda: self._free >= wanted)
            self._free -= wanted
        try:
            yield
        finally:
            with self._changed:
                self._free += wanted
                self._changed.notify_all()


@dataclass
class _Statistics:
    """The statistics of whole tensors, computed by the first thread that asks for them."""

    outputs: tuple[Output, ...]
    lock: threading.Lock = field(default_factory=threading.Lock)
    known: bool = False
    value: Any = None

    def by(self, producer: Producer) -> Any:
        with self.lock:
            if not self.known:
                self.value, self.known = producer.statistics(self.outputs), True
        return self.value


@dataclass(frozen=True)
class _Job:
    """A piece of a tensor to make, or without spans the statistics of the tensor."""

    output: Output
    number: int
    spans: list[tuple[int, int]]
    statistics: _Statistics

    @property
    def bytes(self) -> int:
        width = self.output.dtype.itemsize
        return (self.spans[-1][1] - self.spans[0][0]) * width if self.spans else 0


def run(
    plan: Plan,
    producer: Producer,
    staging: StagingFolder,
    limits: Limits,
    advance: Callable[[int], None],
) -> None:
    """Make every piece that is not there yet. `advance` is told of bytes that are done."""
    starts = {shard.file: 8 + shard.header for shard in plan.shards}
    budget = Budget(working_memory(limits))
    shared = _Statistics(tuple(output for output in plan.outputs if output.merged))
    work: list[list[_Job]] = []
    # The largest first, so that no thread is left with a large one at the end.
    for output in sorted(plan.outputs, key=lambda output: -output.bytes):
        statistics = shared if producer.together and output.merged else _Statistics((output,))
        pieces = output.pieces(whole=producer.whole(output))
        jobs = [_Job(output, number, spans, statistics) for number, spans in enumerate(pieces)]
        left = [job for job in jobs if (output.number, job.number) not in staging.done]
        advance(sum(job.bytes for job in jobs) - sum(job.bytes for job in left))
        work += [left] if left else []
    _keep_freed_memory()
    with ThreadPool(limits.threads) as pool:
        waiting: dict[Future[None], int] = {}
        for job in _statistics_ahead(work, limits.threads):
            start = starts[job.output.file]
            future = pool.submit(_do, job, producer, staging, budget, start, limits)
            waiting[future] = job.bytes
        for future in as_completed(waiting):
            future.result()
            advance(waiting[future])


def _statistics_ahead(work: list[list[_Job]], threads: int) -> Iterator[_Job]:
    """All jobs, and for each tensor one without spans that computes its statistics.

    It comes so early that no thread waits while another one computes what both need.
    """
    ahead = (replace(jobs[0], spans=[]) for jobs in work)
    yield from islice(ahead, threads - 1)
    for jobs in work:
        yield from islice(ahead, 1)
        yield from jobs


def _do(
    job: _Job,
    producer: Producer,
    staging: StagingFolder,
    budget: Budget,
    start: int,
    limits: Limits,
) -> None:
    output, finite = job.output, not limits.allow_nonfinite
    with budget.take(producer.need(output)):
        statistics = job.statistics.by(producer)
        for span in job.spans:
            values = producer.make(output, span, statistics)
            if finite and not is_finite(values):
                producer.check_inputs(output, span)  # to name the one that is at fault
                check_finite(values, output.name, "the merged model")
            offset = start + output.start + span[0] * output.dtype.itemsize
            staging.write(output.file, offset, _bytes_of(values))
            del values
    if job.spans:
        staging.note((output.number, job.number))


def _bytes_of(values: torch.Tensor) -> memoryview:
    content: Any = values.contiguous().view(torch.uint8).numpy() if values.numel() else b""
    return memoryview(content)


def _keep_freed_memory() -> None:
    """Let the C library reuse the memory of a tile for the next one instead of returning it."""
    with contextlib.suppress(AttributeError, OSError):  # another C library
        for option, size in ((_TRIM_THRESHOLD, _RESERVE), (_MMAP_THRESHOLD, _RESERVE // 2)):
            ctypes.CDLL(None).mallopt(option, size)
