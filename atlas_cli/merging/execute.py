"""A request -> a plan -> bytes in files: tensors are made by threads within a memory budget."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from atlas_cli.errors import AtlasError, UsageError
from atlas_cli.io.checkpoint import header_text
from atlas_cli.io.files import write_text
from atlas_cli.io.journal import Digest, Written
from atlas_cli.io.staging import StagingFolder, check_space
from atlas_cli.merging.adapters import CONFIG, are_adapters
from atlas_cli.merging.inputs import open_adapters, open_models
from atlas_cli.merging.learned import open_entry, open_vectors
from atlas_cli.merging.model_card import Shown, card_text
from atlas_cli.merging.plan import (
    Inputs,
    Limits,
    MergeRequest,
    Output,
    Plan,
    PreparedMerge,
    lay_out,
    plan_files,
)
from atlas_cli.merging.produce import Conversion, Producer, check_finite, is_finite
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
from atlas_cli.merging.segments import changed_config, restacked
from atlas_cli.models.clip import HEAD
from atlas_cli.models.folders import companion_files, copy_companion_files, is_clip, is_transformers
from atlas_cli.models.heads import write_head
from atlas_cli.models.language import with_special_ids, with_vocabulary
from atlas_cli.models.tokenizers import (
    read_template,
    tokenizer_files,
    write_template,
    write_tokenizer,
)
from atlas_cli.native.kernels import has_float64
from atlas_cli.parallel import MemoryBudget, ThreadPool, keep_freed_memory, resident
from atlas_cli.recipes.chat_templates import chat_template
from atlas_cli.recipes.merge import Merge
from atlas_cli.recipes.merge_checks import long_dtype

_KEY = "atlas_recipe"
_DTYPE_KEYS = ("torch_dtype", "dtype")
_RESERVE = 64 << 20  # bytes that the interpreter and torch still take when they begin to work


# Preparing ------------------------------------------------------------------------------------


def prepare(request: MergeRequest) -> PreparedMerge:
    """Open every header, check that all fits, and plan every byte. Reads no values of models."""
    merge, located, limits = request.merge, request.located, request.limits
    how = Conversion(merge.recipe.seed, limits.device, limits.allow_nonfinite)
    inputs = _open_inputs(request, how)
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


def _open_inputs(request: MergeRequest, how: Conversion) -> Inputs:
    merge, located = request.merge, request.located
    if merge.method != "atlas" and are_adapters(merge, located):
        return open_adapters(merge, located, how)
    if merge.recipe.max_rank is not None:
        raise UsageError("max_rank is for merges of LoRA adapters into one; these are models")
    if merge.method == "atlas":
        return open_vectors(merge, located, how, request.vectors)
    return open_models(merge, located, how)


def _metadata(recipe: Mapping[str, Any]) -> dict[str, str]:
    return {_KEY: json.dumps(recipe, sort_keys=True, ensure_ascii=False)}


def working_memory(limits: Limits) -> int:
    """The part of the budget that is left for tensors."""
    return limits.memory - resident() - _RESERVE


def check_device(plan: Plan, limits: Limits) -> None:
    """Raise AtlasError if the device cannot compute in a dtype of the plan."""
    wide = [made.name for made in plan.outputs if made.merged and made.compute == torch.float64]
    if wide and not has_float64(limits.device):
        raise AtlasError(
            f"--device {limits.device}: has no float64, which {wide[0]} is computed in"
        )


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
        staging: StagingFolder | None = None
        try:
            staging = StagingFolder(target, identity, {s.file: s.bytes for s in plan.shards})
            run(plan, prepared.inputs.producer, staging, request.limits, advance)
            complete(prepared, staging, locked(merge, located, taken.result()))
        except Exception as problem:  # an interrupt alone leaves what can be gone on with
            if staging:
                staging.abandon()
            if isinstance(problem, OSError):
                raise AtlasError(f"{target}: cannot be written: {problem.strerror}") from problem
            raise
        finally:
            if staging:
                staging.close()


def complete(prepared: PreparedMerge, staging: StagingFolder, recipe: dict[str, Any]) -> None:
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


# Files beside the weights --------------------------------------------------------------------


def write_companions(
    merge: Merge,
    located: Mapping[str, Located],
    inputs: Inputs,
    folder: Path,
    *,
    tokenizer: bool = True,
) -> None:
    """Copy the files beside the layout's model, with what the recipe changes in them."""
    change = partial(_changed, merge, located, inputs)
    copy_companion_files(located[merge.layout].model, folder, change)
    if inputs.adapter:
        write_text(folder / CONFIG, json.dumps(inputs.adapter.config, indent=2) + "\n")
    if not tokenizer:
        for path in tokenizer_files(folder):
            path.unlink()
    if inputs.vocabulary:
        write_tokenizer(inputs.vocabulary.tokenizer, folder)
    if merge.recipe.chat_template:
        models = [located[who].model.folder for who in merge.references]
        text = chat_template(merge.recipe.chat_template, map(read_template, models))
        if text is not None:
            write_template(folder, text)


def _changed(
    merge: Merge,
    located: Mapping[str, Located],
    inputs: Inputs,
    name: str,
    found: Mapping[str, Any],
) -> dict[str, Any]:
    """A configuration with the dtype, layers, head and vocabulary of the result."""
    result = dict(found)
    if inputs.vocabulary:
        old = inputs.vocabulary.models[merge.layout]
        result = with_special_ids(result, old, inputs.vocabulary.tokenizer.vocabulary)
    if name == "generation_config.json":
        return result
    word = merge.recipe.out_dtype or merge.recipe.dtype
    dtype = long_dtype(word) if word else None
    result |= {key: dtype for key in _DTYPE_KEYS if dtype and result.get(key) is not None}
    if inputs.untied:
        result["tie_word_embeddings"] = False
    if inputs.segments:
        configs = {who: one.model.config("config.json") or {} for who, one in located.items()}
        result = changed_config(result, restacked(inputs.segments, inputs.base, configs))
    if inputs.vocabulary:
        result = with_vocabulary(result, inputs.vocabulary.size)
    return result


# Threads --------------------------------------------------------------------------------------


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

    @property
    def offset(self) -> int:
        """Where it begins in the tensors of its file."""
        return self.output.start + self.spans[0][0] * self.output.dtype.itemsize


def run(
    plan: Plan,
    producer: Producer,
    staging: StagingFolder,
    limits: Limits,
    advance: Callable[[int], None],
) -> None:
    """Make every piece that is not there yet. `advance` is told of bytes that are done."""
    starts = {shard.file: 8 + shard.header for shard in plan.shards}
    budget = MemoryBudget(working_memory(limits))
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
    keep_freed_memory()
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
    budget: MemoryBudget,
    start: int,
    limits: Limits,
) -> None:
    output, finite, written = job.output, not limits.allow_nonfinite, 0
    with budget.take(producer.need(output)):
        statistics, digest = job.statistics.by(producer), Digest()
        for span in job.spans:
            values = producer.make(output, span, statistics)
            if finite and not is_finite(values):
                producer.check_inputs(output, span)  # to name the one that is at fault
                check_finite(values, output.name, "the merged model")
            content = _bytes_of(values)
            digest.update(content)
            staging.write(output.file, start + job.offset + written, content)
            written += len(content)
            del values, content
    if job.spans:
        place = Written(output.file, start + job.offset, written, digest.hexdigest())
        staging.note((output.number, job.number), place)


def _bytes_of(values: torch.Tensor) -> memoryview:
    content: Any = values.contiguous().view(torch.uint8).numpy() if values.numel() else b""
    return memoryview(content)
