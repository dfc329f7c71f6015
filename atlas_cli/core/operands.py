"""Tensors of one shape and dtype that are combined: in memory, or in files until then."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch


@dataclass(frozen=True)
class Place:
    """Where a file keeps the bytes of a tensor. `stamp` tells whether it is still that file."""

    path: bytes
    stamp: tuple[int, int, int, int]
    start: int


@dataclass(frozen=True)
class Operands:
    """Several tensors, each of `shape`. `places` tells where, if files have them just so."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Sequence[torch.Tensor]]
    places: tuple[Place, ...] = ()

    @cached_property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors in memory."""
        return tuple(self.read())

    @property
    def size(self) -> int:
        """The elements of each."""
        return math.prod(self.shape)

    def rows(self, first: int, last: int) -> Operands:
        """Some rows of each, or elements of vectors."""
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        return Operands(
            (min(last, self.shape[0]) - first, *self.shape[1:]),
            self.dtype,
            lambda: [tensor[first:last] for tensor in self.tensors],
            tuple(replace(place, start=place.start + first * row) for place in self.places),
        )


def in_memory(tensors: Sequence[torch.Tensor]) -> Operands:
    """Tensors that have been read."""
    return Operands(tuple(tensors[0].shape), tensors[0].dtype, lambda: tensors)
