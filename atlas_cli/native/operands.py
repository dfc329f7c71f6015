"""Tensors of one shape and dtype that are combined: in memory, or in files until then."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # methods are known by name without torch, and mention operands
    import torch

    from atlas_cli.io.tensors import FileSpan


@dataclass(frozen=True)
class Operands:
    """Several tensors, each of `shape`, which are read when they are asked for.

    `read` gives some elements of each, flat; these are the ones from `start` on. `places` tells
    where their first elements are, if files have them as memory would.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    read: Callable[[int, int], Iterable[torch.Tensor]]
    start: int = 0
    places: tuple[FileSpan, ...] = ()

    @cached_property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors in memory."""
        found = self.read(self.start, self.start + self.size)
        return tuple(values.reshape(self.shape) for values in found)

    @cached_property
    def size(self) -> int:
        """The elements of each."""
        return math.prod(self.shape)

    def rows(self, first: int, last: int) -> Operands:
        """Some rows of each, or elements of vectors."""
        shape = (min(last, self.shape[0]) - first, *self.shape[1:])
        return replace(self, shape=shape, start=self.start + first * math.prod(shape[1:]))


@dataclass(frozen=True)
class Sum:
    """One sum over operands x that is the same for every element.

    (w_1 x_1 + ... + w_n x_n) / divisor in float32, from left to right, rounded once; or with a
    `scale` x_0 + scale * (sum_t w_t (x_t - x_0)) / divisor, every step in the dtype of x.
    """

    weights: Sequence[float]
    divisor: float = 1.0
    scale: float | None = None


def in_memory(tensors: Sequence[torch.Tensor]) -> Operands:
    """Tensors that have been read."""
    first, flat = tensors[0], [tensor.reshape(-1) for tensor in tensors]

    def read(start: int, stop: int) -> list[torch.Tensor]:
        return [values[start:stop] for values in flat]

    return Operands(tuple(first.shape), first.dtype, first.device, read)
