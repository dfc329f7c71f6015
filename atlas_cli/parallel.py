"""What of the machine does the work: threads, each with one core of torch, memory, and the device.

Results come in the order of the items, and do not depend on how many threads there are.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from threading import Barrier
from types import FrameType, TracebackType
from typing import Any, TypeVar

import torch

from atlas_cli.errors import UsageError

Item = TypeVar("Item")
Result = TypeVar("Result")
CORES = min(8, os.cpu_count() or 1)
_AHEAD = 16  # items per thread that wait their turn; after an error the others never begin

# Below this many numbers, a module gains more from one core per part of a batch than from
# several cores per operation; and its sums do not depend on how many cores there are.
_SMALL = 20_000_000
_PARTS = 4

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
_KEPT = 64 << 20  # bytes of freed memory that are not returned to the system

# Torch's first operation reads /proc/cpuinfo, and complains on stderr if too many files are open.
torch.ones(8)


class ThreadPool:
    """Threads, each with one core: an operation that torch spreads over several cores waits for
    itself on a busy machine (20 times slower was measured), and rounds by their number.

    `parts` says into how many parts a batch is cut that is spread over the threads. At the end of
    a `with` block what has not begun is dropped, and what has begun is waited for.
    """

    def __init__(self, threads: int, parts: int = 1) -> None:
        self.parts, self._alone = parts, threads == 1
        self._pool = ThreadPoolExecutor(
            threads, initializer=_take_one_core, thread_name_prefix="atlas"
        )
        everyone = Barrier(threads)
        with torch_threads(torch.get_num_threads()):  # what these threads set is also the default
            list(self._pool.map(lambda _: everyone.wait(), range(threads)))

    def submit(self, function: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Have a thread call function(*arguments)."""
        return self._pool.submit(function, *arguments)

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """function(item) for every item, in the order of the items.

        A single thread would only take turns with the one that calls: that one does the work
        itself if torch gives it one core, too.
        """
        if self._alone and torch.get_num_threads() == 1:
            return [function(item) for item in items]
        return list(self._pool.map(function, items))

    def close(self) -> None:
        """Wait for what has begun, drop the rest, and end the threads."""
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> ThreadPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _take_one_core() -> None:
    torch.set_num_threads(1)
    # A thread takes torch's number over when it first asks for it; from then on it has its own.
    torch.get_num_threads()


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch use so many threads for an operation of this thread; afterwards as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def in_order(
    function: Callable[[Item], Result], items: Iterable[Item], *, workers: int = CORES
) -> Iterator[Result]:
    """function(item) for every item, in the order of the items, each as soon as it is there."""
    rest = iter(items)
    with ThreadPool(workers) as pool:
        begun = deque(pool.submit(function, item) for item in islice(rest, _AHEAD * workers))
        while begun:
            yield begun.popleft().result()
            begun.extend(pool.submit(function, item) for item in islice(rest, 1))


@contextmanager
def thread_pool_for(module: torch.nn.Module, threads: int) -> Iterator[ThreadPool | None]:
    """A pool for a module on the CPU, which spreads batches if the module is small; else None."""
    if next(module.parameters()).device.type != "cpu":
        with torch_threads(threads):
            yield None
        return
    small = sum(parameter.numel() for parameter in module.parameters()) <= _SMALL
    with (
        ThreadPool(threads, _PARTS if small else 1) as pool,
        torch_threads(1 if small else threads),
    ):
        yield pool


@contextmanager
def signals_held() -> Iterator[None]:
    """Hold back what would end this process; it is raised at the end of the block.

    Processes that are forked in the block inherit that: a signal to the whole group, as a terminal
    sends it, does not interrupt them, so that they end when this process tells them to.
    """
    if threading.current_thread() is not threading.main_thread():  # signals go to that one alone
        yield
        return
    held: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        held.append(number)

    before = {number: signal.signal(number, hold) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for number in dict.fromkeys(held):
        signal.raise_signal(number)


_ENDING = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGALRM") if hasattr(signal, name)
]


def choose_device(wanted: str) -> torch.device:
    """The device of that name; `auto` is cuda, mps, another accelerator or cpu, the first there."""
    if wanted == "auto":
        accelerator = torch.accelerator.current_accelerator()
        other = [accelerator.type] if accelerator else []
        return torch.device(next(filter(_count, ["cuda", "mps", *other]), "cpu"))
    kind, _, number = wanted.partition(":")
    count = _count(kind)
    if not count:
        raise UsageError(f"--device {wanted}: this torch sees no {kind} device; use --device cpu")
    if number and int(number) >= count:
        raise UsageError(f"--device {wanted}: there are {count} {kind} devices")
    return torch.device(wanted)


def _count(kind: str) -> int:
    """How many devices of a kind there are; 0 for what torch has no module for."""
    if kind == "cpu":
        return 1
    try:
        module = torch.get_device_module(kind)
    except RuntimeError:
        return 0
    return int(module.device_count()) if module.is_available() else 0


# Memory ---------------------------------------------------------------------------------------


def resident() -> int:
    """The bytes of memory that this process takes now; 0 where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


class MemoryBudget:
    """Bytes of memory that threads share. A thread waits until enough are free."""

    def __init__(self, total: int) -> None:
        self._free = self.total = total
        self._changed = threading.Condition()

    @contextmanager
    def take(self, wanted: int) -> Iterator[None]:
        """Hold so many bytes, once they are free; more than there are at all, once all are."""
        enough = min(wanted, self.total)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= enough)
            self._free -= wanted
        try:
            yield
        finally:
            with self._changed:
                self._free += wanted
                self._changed.notify_all()


def keep_freed_memory() -> None:
    """Let the C library reuse freed memory for what comes next instead of returning it."""
    with contextlib.suppress(AttributeError, OSError):  # another C library
        for option, size in ((_TRIM_THRESHOLD, _KEPT), (_MMAP_THRESHOLD, _KEPT // 2)):
            ctypes.CDLL(None).mallopt(option, size)
