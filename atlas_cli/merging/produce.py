"""How the values of an output come about: by a method on tiles, by composition, or as they were."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import torch

from atlas_cli.core.compose import Composition, compose_block, map_blocks
from atlas_cli.core.granularity import Layout, choose_layout
from atlas_cli.errors import AtlasError, CheckpointError, MismatchError, UsageError, nearest
from atlas_cli.io.checkpoint import open_safetensors
from atlas_cli.io.files import sha256_of
from atlas_cli.io.tensors import LazyTensor
from atlas_cli.merge_methods.method import MergeMethod, Values
from atlas_cli.merge_methods.tiling import Tile, check_size
from atlas_cli.merging.plan import Output, Resolved
from atlas_cli.merging.segments import Model, Segment
from atlas_cli.models import tensor_names
from atlas_cli.models.clip import open_model
from atlas_cli.models.heads import SavedHead, head_from_text, open_head
from atlas_cli.models.tensor_names import block_of, normalised, piece
from atlas_cli.native.operands import Operands
from atlas_cli.recipes.learned import HeadEntry
from atlas_cli.recipes.merge import MergeRecipe
from atlas_cli.sources.locate import Source
from atlas_cli.vectors.format import in_scope
from atlas_cli.vectors.gather import GatheredVector
from atlas_cli.vectors.pool import Pool, moved, open_pool

CPU = torch.device("cpu")
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # not learned by gradients
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


# Learned coefficients -------------------------------------------------------------------------


@dataclass(frozen=True)
class ByCoefficients:
    """theta0 + sum of lambda * tau by block, in float32; all else as the base has it."""

    layout: Model
    blocks: Mapping[str, LazyTensor]
    pool: Pool
    columns: Layout
    coefficients: torch.Tensor
    transformers: bool
    how: Conversion
    together: bool = False

    def changes(self, name: str) -> bool:
        """Whether a vector has a block of that tensor."""
        return self._place(name)[0] in self.columns.placements

    def whole(self, output: Output) -> bool:
        """Blocks are composed whole: those of an image tower are small."""
        return output.merged

    def need(self, output: Output) -> int:
        """The base, the sum and its rounded copy; vectors are mapped, and read in tiles."""
        if not output.merged:
            return 16 * max(stop - start for start, stop in output.tiles())
        size = math.prod(self.blocks[self._place(output.name)[0]].shape)
        return size * (12 + 4 * len(self.pool.members))

    def statistics(self, outputs: Sequence[Output]) -> None:
        """A block can be composed right away."""

    def make(self, output: Output, span: tuple[int, int], statistics: Any) -> torch.Tensor:
        """The composed block, or the part of it that the output is."""
        if not output.merged:
            return copied(self.layout, output, span, allow_nonfinite=self.how.allow_nonfinite)
        block, part = self._place(output.name)
        base = self.blocks[block].read()
        device = self.how.device
        if not self.how.allow_nonfinite:
            check_finite(base, output.name, self.layout.reference)
        found = {
            number: moved(member.vector.read(block), device)
            for number, member in enumerate(self.pool.members)
            if block in member.vector.names
        }
        stacks = {block: map_blocks(found)}
        one = Composition({block: base.to(device)}, stacks, self.columns, len(self.pool.members))
        composed = compose_block(one, block, self.coefficients.to(device)).cpu()
        lazy = LazyTensor(tuple(composed.shape), composed.dtype, lambda: composed)
        return piece(lazy, part).read().reshape(-1)[slice(*span)].to(output.dtype)

    def check_inputs(self, output: Output, span: tuple[int, int]) -> None:
        """They have been checked when they were read."""

    def _place(self, name: str) -> tuple[str, str]:
        if self.transformers and name.endswith("position_ids"):
            return name, ""
        return block_of(name, transformers=self.transformers)


def open_learned(
    recipe: MergeRecipe,
    source: Source,
    layout: Model,
    how: Conversion,
    vectors: Sequence[str | GatheredVector],
) -> ByCoefficients:
    """Open the vectors of a learned recipe and lay its coefficients out."""
    blocks = normalised(layout.tensors, layout.reference)
    names = [n for n in in_scope(blocks, recipe.scope) if not n.endswith(STATISTICS)]
    if isinstance(recipe.coefficients, str) and _is_tensor(recipe.coefficients):
        names = _in_order_of_module(source)  # a bare tensor has no names: they are in its order
    pool = Pool((), (), (), "as stored", 0)
    if vectors:
        pool = open_pool(vectors, blocks, names, scope=recipe.scope)
    columns = choose_layout(pool.shapes, recipe.granularity, recipe.groups, recipe.seed)
    table = coefficient_table(recipe.coefficients, pool, columns)
    return ByCoefficients(
        *(layout, blocks, pool, columns, table),
        transformers=tensor_names.is_transformers(layout.tensors),
        how=how,
    )


def open_entry(entry: HeadEntry) -> SavedHead:
    """The learned head of a recipe. Raises MismatchError if its file is not what it was."""
    if entry.data is not None:
        return head_from_text(entry.data)
    path = Path(entry.file or "").expanduser()
    if entry.sha256 is not None and sha256_of(path) != entry.sha256:
        raise MismatchError(f"{path}: is not the head that the recipe speaks of: another sha256")
    return open_head(path)


# Coefficients ---------------------------------------------------------------------------------


def _is_tensor(path: str) -> bool:
    return path.endswith(".safetensors")


def _in_order_of_module(source: Source) -> list[str]:
    module: Any = open_model(source).module
    return [f"visual.{name}" for name, _ in module.visual.named_parameters()]


def coefficient_table(given: object, pool: Pool, columns: Layout) -> torch.Tensor:
    """The table as a tensor: a row for each vector, a column for each label, else 0."""
    shape = (len(pool.members), len(columns.labels))
    if isinstance(given, str) and _is_tensor(given):
        found = open_safetensors(Path(given).expanduser()).get("coefficients")
        if found is None or found.shape != shape:
            kind = found.shape if found else "no coefficients"
            raise MismatchError(f"{given}: holds {kind}, expected a table of {shape}")
        return found.read().float()
    table = _read_table(given) if isinstance(given, str) else given
    assert isinstance(table, dict)
    rows = {member.name: number for number, member in enumerate(pool.members)}
    column = {label: number for number, label in enumerate(columns.labels)}
    result = torch.zeros(shape)
    for vector, row in table.items():
        if vector not in rows:
            raise UsageError(f"coefficients: no vector is called '{vector}'{nearest(vector, rows)}")
        for label, value in row.items():
            if label not in column:
                hint = nearest(label, column)
                raise UsageError(f"coefficients.{vector}: there is no '{label}'{hint}")
            result[rows[vector], column[label]] = value
    return result


def _read_table(path: str) -> dict[str, dict[str, float]]:
    """A table in a JSON file, as `atlas fit -o` writes it."""
    try:
        found = json.loads(Path(path).expanduser().read_text("utf-8"))
        return {v: {k: float(n) for k, n in row.items()} for v, row in found.items()}
    except (OSError, ValueError, AttributeError, TypeError) as problem:
        raise AtlasError(f"{path}: is no table of coefficients: {problem}") from problem
