"""Work on many blocks at once, one thread for each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")
CORES = min(8, os.cpu_count() or 1)


def in_order(
    function: Callable[[Item], Result], items: Iterable[Item], *, workers: int = CORES
) -> Iterator[Result]:
    """function(item) for every item, in the order of the items.

    Within a worker torch has one thread: a decomposition spread over several waits for itself on
    a busy machine (20 times slower was measured), and rounds by their number.
    """
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield from pool.map(function, items)
    finally:
        torch.set_num_threads(before)
