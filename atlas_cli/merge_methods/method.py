"""What a merge method is: parameters with defaults, statistics of whole tensors, and a formula."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from atlas_cli.native.operands import Operands, Sum, in_memory


@dataclass(frozen=True)
class Tile:
    """The same elements of one tensor in the base and in every model.

    `start` is the flat position of the first element; `shape` is the whole tensor's. Tiles of
    tensors with two or more dimensions hold whole rows (the first dimension), as many as fit; the
    values have the shape (rows, *shape[1:]). A vector is cut anywhere. `inputs` has the base, if
    there is one, before the models; what is in files is read when it is asked for.
    """

    name: str
    start: int
    shape: tuple[int, ...]
    inputs: Operands
    has_base: bool

    @property
    def base(self) -> torch.Tensor | None:
        """The base, in memory."""
        return self.inputs.tensors[0] if self.has_base else None

    @property
    def models(self) -> tuple[torch.Tensor, ...]:
        """The models, in memory."""
        return self.inputs.tensors[self.has_base :]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all values."""
        return self.inputs.dtype

    @property
    def device(self) -> torch.device:
        """Where all values are."""
        return self.inputs.device


def tile_of(
    name: str,
    start: int,
    shape: tuple[int, ...],
    base: torch.Tensor | None,
    models: Sequence[torch.Tensor],
) -> Tile:
    """A tile of tensors that are in memory."""
    tensors = tuple(models) if base is None else (base, *models)
    return Tile(name, start, shape, in_memory(tensors), base is not None)


@dataclass(frozen=True)
class Values:
    """Parameters resolved for one tensor: those of each model, and those of the whole merge."""

    models: tuple[Mapping[str, Any], ...]
    merge: Mapping[str, Any]
    seed: int = 0
    depth: float | None = None  # of the tensor's layer, from 0 (first) to 1 (last)


@dataclass(frozen=True)
class Parameter:
    """A number or a switch that a recipe may set. `default` None means it must be given."""

    name: str
    default: float | bool | str | None
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()  # of a parameter that is a word


Tiles = Callable[[], Iterator[Tile]]  # go over the tensor once more; tiles may be all of it


@dataclass(frozen=True)
class Method:
    """A way to merge. `survey` looks at the whole tensor, as often as it must, and may keep a few
    numbers; `apply` gives the merged values of one tile. `whole` methods get one tile per tensor.
    `total` says by which sum over its inputs `apply` does that, if it is one.
    `spreads`: an element that is not finite in an input is not finite in the result either.
    """

    name: str
    apply: Callable[[Tile, Values, Any], torch.Tensor]
    statistics: Callable[[Tiles, Values], Any] = lambda tiles, values: None
    per_model: Sequence[Parameter] = ()
    per_merge: Sequence[Parameter] = ()
    needs_base: bool = False
    total: Callable[[Values, Any, torch.dtype], Sum | None] = lambda values, found, dtype: None
    models: tuple[int, int | None] = (1, None)  # how many, not counting the base
    whole: bool = False
    spreads: bool = False
    ignores_base: bool = False  # a base is one of the models, as linear has it
    fields: Mapping[str, Any] = field(default_factory=dict)
