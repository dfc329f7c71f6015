"""How the values of an output come about: by a method on tiles, or as they were."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol

import torch

from atlas_cli.errors import CheckpointError
from atlas_cli.io.tensors import LazyTensor
from atlas_cli.merge_methods.method import MergeMethod, Values
from atlas_cli.merge_methods.tiling import Tile, check_size
from atlas_cli.merging.plan import CPU, Output
from atlas_cli.merging.segments import Model, Resolved, Segment
from atlas_cli.native.operands import Operands

_TEMPORARIES = 6  # float32 copies of a tile that a formula may hold beside its inputs


class Producer(Protocol):
    """Gives the values of outputs, some elements at a time."""

    @property
    def together(self) -> bool:
        """Whether all merged outputs share statistics, as if they were one long vector."""

    def whole(self, output: Output) -> bool:
        """Whether an output is made in one go."""

    def need(self, output: Output) -> int:
        """The bytes of memory that making a tile of it takes."""

    def statistics(self, outputs: Sequence[Output]) -> Any:
        """What has to be known of whole tensors before a tile of them can be made."""

    def make(self, output: Output, span: tuple[int, int], statistics: Any) -> torch.Tensor:
        """The elements of a span, in the dtype of the file."""

    def check_inputs(self, output: Output, span: tuple[int, int]) -> None:
        """Raise CheckpointError if an input has an element of the span that is not finite."""


@dataclass(frozen=True)
class Conversion:
    """What decides the result beside the recipe's method, and where it is computed."""

    seed: int = 0
    device: torch.device = CPU
    allow_nonfinite: bool = False


@dataclass(frozen=True)
class ByMethod:
    """base and models -> a method's formula, tile by tile."""

    method: MergeMethod
    segment: Segment
    resolved: Mapping[str, Resolved]
    how: Conversion

    @cached_property
    def together(self) -> bool:
        """Whether the recipe wants the model taken as one vector."""
        return any(own.merge.get("scope") == "model" for own in self.resolved.values())

    def whole(self, output: Output) -> bool:
        """Whether the method wants whole tensors."""
        return self.method.whole and output.merged

    def need(self, output: Output) -> int:
        """Inputs as they are stored and as they are computed with, and what the formula holds."""
        tile = max(stop - start for start, stop in output.tiles(whole=self.whole(output)))
        inputs = len(self.segment.inputs) if output.merged else 1
        stored = self.segment.layout.tensors[output.name].dtype.itemsize
        return tile * (inputs * (stored + output.compute.itemsize + 4) + 4 * _TEMPORARIES)

    def statistics(self, outputs: Sequence[Output]) -> Any:
        """Whatever the method looks for in whole tensors."""
        if not outputs[0].merged:
            return None

        def tiles() -> Iterator[Tile]:
            for output in outputs:
                yield self._tile(output, (0, output.size), check=False)

        return self.method.statistics(tiles, self._values(outputs[0].name))

    def make(self, output: Output, span: tuple[int, int], statistics: Any) -> torch.Tensor:
        """The method's formula, rounded to the dtype of the file."""
        if not output.merged:
            layout = self.segment.layout
            return copied(layout, output, span, allow_nonfinite=self.how.allow_nonfinite)
        # What spreads is seen in the result, which is checked anyway.
        check = not self.how.allow_nonfinite and not self.method.spreads
        tile = self._tile(output, span, check=check)
        merged = self.method.apply(tile, self._values(output.name), statistics)
        return check_size(merged, tile).reshape(-1).cpu().to(output.dtype)

    def check_inputs(self, output: Output, span: tuple[int, int]) -> None:
        """Every model, if they are merged here; what is copied has been checked."""
        for model in self.segment.inputs if output.merged else ():
            check_finite(model.tensors[output.name].span(*span), output.name, model.reference)

    def _values(self, name: str) -> Values:
        own = self.resolved[name]
        seed = hashlib.sha256(f"{self.how.seed}:{name}".encode()).digest()[:7]
        return Values(own.models, own.merge, int.from_bytes(seed, "big"), own.depth)

    def _tile(self, output: Output, span: tuple[int, int], *, check: bool) -> Tile:
        tensors = [model.tensors[output.name] for model in self.segment.inputs]

        def read(start: int, stop: int) -> Iterator[torch.Tensor]:
            for model, tensor in zip(self.segment.inputs, tensors, strict=True):
                values = tensor.span(start, stop)
                if check:
                    check_finite(values, output.name, model.reference)
                yield values.to(self.how.device, output.compute)

        files = [t.place for t in tensors if t.place and t.dtype == output.compute]
        as_is = len(files) == len(tensors) and self.how.device == CPU and not check
        inputs = Operands(
            (span[1] - span[0],) if self.together else shape_of(output, span),
            output.compute,
            self.how.device,
            read,
            span[0],
            tuple(files) if as_is else (),
        )
        start, shape = span[0], output.shape
        if self.together:
            start, shape = start + self._starts[output.name], (self._starts[""],)
        return Tile(output.name, start, shape, inputs, self.segment.base is not None)

    @cached_property
    def _starts(self) -> dict[str, int]:
        """Where each merged tensor begins if they follow each other; under "" where all end."""
        tensors = self.segment.layout.tensors
        sizes = [math.prod(tensors[name].shape) for name in self.resolved]
        return dict(zip([*self.resolved, ""], accumulate(sizes, initial=0), strict=True))


@dataclass(frozen=True)
class BySegment:
    """Every output by the producer of its segment. `copied` are left as a model has them."""

    producers: Mapping[str, Producer]
    layout: Model
    how: Conversion
    together: bool = False

    def whole(self, output: Output) -> bool:
        """Whether the method of its segment wants whole tensors."""
        return output.name in self.producers and self.producers[output.name].whole(output)

    def need(self, output: Output) -> int:
        """What its segment needs; for a copy, the tile twice."""
        if output.name in self.producers:
            return self.producers[output.name].need(output)
        return 16 * max(stop - start for start, stop in output.tiles())

    def statistics(self, outputs: Sequence[Output]) -> Any:
        """Those of its segment."""
        own = self.producers.get(outputs[0].name)
        return own.statistics(outputs) if own else None

    def make(self, output: Output, span: tuple[int, int], statistics: Any) -> torch.Tensor:
        """The values by its segment, or a copy."""
        if own := self.producers.get(output.name):
            return own.make(output, span, statistics)
        return copied(self.layout, output, span, allow_nonfinite=self.how.allow_nonfinite)

    def check_inputs(self, output: Output, span: tuple[int, int]) -> None:
        """The models of its segment."""
        if own := self.producers.get(output.name):
            own.check_inputs(output, span)


def shape_of(output: Output, span: tuple[int, int]) -> tuple[int, ...]:
    """Whole rows in the shape of rows; what has no rows stays flat, and a scalar is a scalar."""
    if len(output.shape) < 2:
        return (span[1] - span[0],) if output.shape else ()
    row = math.prod(output.shape[1:])
    return ((span[1] - span[0]) // row if row else output.shape[0], *output.shape[1:])


def copied(
    layout: Model, output: Output, span: tuple[int, int], *, allow_nonfinite: bool
) -> torch.Tensor:
    """The elements as the layout's model has them, in the dtype of the file."""
    tensor: LazyTensor = layout.tensors[output.name]
    values = tensor.span(*span)
    if not allow_nonfinite:
        check_finite(values, output.name, layout.reference)
    return values.to(output.dtype)


def check_finite(values: torch.Tensor, name: str, where: str) -> None:
    """Raise CheckpointError if a value is NaN or infinite."""
    if not is_finite(values):
        raise CheckpointError(
            f"{where}: {name} holds values that are not finite (NaN or Inf); "
            "use --allow-nonfinite to merge them anyway"
        )


def is_finite(values: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite."""
    if not values.dtype.is_floating_point:
        return True
    # A sum is finite only if all its terms are; one that is not may have overflowed.
    return math.isfinite(values.sum().item()) or bool(values.isfinite().all())
