"""Named tensors that have not been read yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class FileSpan:
    """Where a file keeps the bytes of a tensor. `stamp` tells whether it is still that file."""

    path: bytes
    stamp: tuple[int, int, int, int]
    start: int


@dataclass(frozen=True)
class LazyTensor:
    """A named tensor that has not been read yet. `part` reads some of its elements alone.

    `place` tells where its elements are, if a file has them as memory would.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]
    part: Callable[[int, int], torch.Tensor] | None = None
    place: FileSpan | None = None

    def span(self, start: int, stop: int) -> torch.Tensor:
        """The elements from `start` to `stop`, flat. Without `part` the whole tensor is read."""
        return self.part(start, stop) if self.part else self.read().reshape(-1)[start:stop]


LazyTensors = Mapping[str, LazyTensor]
