"""A plan -> bytes in files: pieces of tensors made by a few threads within a memory budget."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from atlas_cli.errors import AtlasError
from atlas_cli.merging.plan import Output, Plan
from atlas_cli.merging.produce import CPU, Producer, check_finite, is_finite
from atlas_cli.merging.staging import StagingFolder
from atlas_cli.parallel import ThreadPool

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
_RESERVE = 64 << 20  # what the interpreter and torch still take when they begin to work


class Budget:
    """Bytes of memory that several threads share. One that finds none waits."""

    def __init__(self, total: int) -> None:
        self._free = self.total = total
        self._changed = threading.Condition()

    @contextmanager
    def take(self, wanted: int) -> Iterator[None]:
        """With so many bytes, once they are free."""
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
    """What is known of whole tensors: found by the first thread that asks."""

    outputs: tuple[Output, ...]
    lock: threading.Lock = field(default_factory=threading.Lock)
    known: bool = False
    value: Any = None

    def by(self, maker: Producer) -> Any:
        with self.lock:
            if not self.known:
                self.value, self.known = maker.statistics(self.outputs), True
        return self.value


@dataclass(frozen=True)
class Limits:
    """What of the machine a merge may take."""

    memory: int = 512_000_000
    threads: int = 1
    device: torch.device = CPU
    allow_nonfinite: bool = False


def working_memory(limits: Limits) -> int:
    """What the budget leaves for tensors, beside the program itself."""
    return limits.memory - resident() - _RESERVE


def resident() -> int:
    """The bytes of memory that this process takes now; 0 where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def check_device(plan: Plan, limits: Limits) -> None:
    """Raise AtlasError if the device cannot compute in a dtype of the plan."""
    wide = [made.name for made in plan.outputs if made.merged and made.compute == torch.float64]
    if limits.device.type == "mps" and wide:
        raise AtlasError(f"--device mps: has no float64, which {wide[0]} is computed in")


def check_memory(plan: Plan, maker: Producer, limits: Limits) -> int:
    """The bytes that the largest tile needs. Raises AtlasError if the budget has not as many."""
    largest = max(plan.outputs, key=maker.need)
    needed, there = maker.need(largest), working_memory(limits)
    if needed > there:
        total = (needed + limits.memory - there) / 1e6
        raise AtlasError(
            f"{largest.name}: needs {total:,.0f} MB of memory at once; use --memory {total:.0f}MB"
        )
    return needed


def peak_memory(tile: int, limits: Limits) -> int:
    """What the process will take: itself, and as many tiles as threads within the budget."""
    return min(limits.memory, resident() + _RESERVE + tile * limits.threads)


def run(
    plan: Plan, maker: Producer, part: StagingFolder, limits: Limits, advance: Callable[[int], None]
) -> None:
    """Make every piece that is not there yet. `advance` hears of bytes that are done."""
    starts = {shard.file: 8 + shard.header for shard in plan.shards}
    budget = Budget(working_memory(limits))
    shared = _Statistics(tuple(output for output in plan.outputs if output.merged))
    work: list[list[_Job]] = []
    # The largest first, so that no thread is left with a large one at the end.
    for output in sorted(plan.outputs, key=lambda output: -output.bytes):
        statistics = shared if maker.together and output.merged else _Statistics((output,))
        jobs = []
        for number, spans in enumerate(output.pieces(whole=maker.whole(output))):
            if (output.number, number) in part.done:
                advance(_bytes(output, spans))
            else:
                jobs.append(_Job(output, number, spans, statistics))
        work += [jobs] if jobs else []
    _keep_freed_memory()
    with ThreadPool(limits.threads) as pool:
        waiting: dict[Future[None], int] = {}
        for job in _surveys_ahead(work, limits.threads):
            if job.spans:
                start = starts[job.output.file]
                future = pool.submit(_work, job, maker, part, budget, start, limits)
            else:
                future = pool.submit(_statistics, job, maker, budget)
            waiting[future] = _bytes(job.output, job.spans)
        for future in as_completed(waiting):
            future.result()
            advance(waiting[future])


def _surveys_ahead(work: list[list[_Job]], threads: int) -> Iterator[_Job]:
    """All jobs, and before them one without spans that surveys the output.

    It comes so early that no thread waits while another one surveys what both work on.
    """
    ahead = (replace(jobs[0], spans=[]) for jobs in work)
    yield from islice(ahead, threads - 1)
    for jobs in work:
        yield from islice(ahead, 1)
        yield from jobs


def _bytes(output: Output, spans: list[tuple[int, int]]) -> int:
    return (spans[-1][1] - spans[0][0]) * output.dtype.itemsize if spans else 0


@dataclass(frozen=True)
class _Job:
    output: Output
    number: int
    spans: list[tuple[int, int]]
    statistics: _Statistics


def _statistics(job: _Job, maker: Producer, budget: Budget) -> None:
    with budget.take(maker.need(job.output)):
        job.statistics.by(maker)


def _work(
    job: _Job, maker: Producer, part: StagingFolder, budget: Budget, start: int, limits: Limits
) -> None:
    output, finite = job.output, not limits.allow_nonfinite
    with budget.take(maker.need(output)):
        statistics = job.statistics.by(maker)
        for span in job.spans:
            values = maker.make(output, span, statistics)
            if finite and not is_finite(values):
                maker.check_inputs(output, span)  # to name the one that is at fault
                check_finite(values, output.name, "the merged model")
            offset = start + output.start + span[0] * output.dtype.itemsize
            part.write(output.file, offset, values)
            del values
    part.note((output.number, job.number))


def _keep_freed_memory() -> None:
    """Have the C library use the memory of a tile for the next one, not give it back between."""
    with contextlib.suppress(AttributeError, OSError):  # another C library
        for option, size in ((_TRIM_THRESHOLD, _RESERVE), (_MMAP_THRESHOLD, _RESERVE // 2)):
            ctypes.CDLL(None).mallopt(option, size)
