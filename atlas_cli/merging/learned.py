"""Learned recipes: a base, its task vectors and their coefficients -> the values of the result."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from atlas_cli.core.compose import Composition, Layout, choose_layout, compose_block, map_blocks
from atlas_cli.errors import AtlasError, MismatchError, UsageError, nearest
from atlas_cli.io.checkpoint import open_safetensors
from atlas_cli.io.files import read_regular, sha256_of
from atlas_cli.io.tensors import LazyTensor
from atlas_cli.merging.plan import Inputs, Output, open_layout
from atlas_cli.merging.produce import Conversion, check_finite, copied
from atlas_cli.merging.provenance import Located
from atlas_cli.merging.segments import Model
from atlas_cli.models.clip import open_model
from atlas_cli.models.folders import block_of, is_transformers, normalised
from atlas_cli.models.heads import SavedHead, head_from_text, open_head
from atlas_cli.models.tensor_names import piece
from atlas_cli.recipes.learned import HeadEntry, VectorFile
from atlas_cli.recipes.merge import Merge, MergeRecipe
from atlas_cli.sources.locate import Source, VectorName, name_vectors
from atlas_cli.vectors.format import in_scope, read_header
from atlas_cli.vectors.pool import GatheredVector, Gathering, Pool, moved, open_pool, stored_vectors

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # not learned by gradients


# Task vectors ---------------------------------------------------------------------------------


def gather_vectors(recipe: MergeRecipe, base: Source, gathering: Gathering) -> list[GatheredVector]:
    """The files of a recipe's vectors; what is no vector yet is extracted from its model.

    Raises MismatchError for one that is not what the recipe says of it.
    """
    entries: list[VectorFile] = []
    names: list[VectorName] = []
    for entry in recipe.vectors or []:
        given = name_vectors([entry.file], gathering.tell)
        if len(given) > 1 and (entry.name or entry.sha256):
            raise UsageError(f"{entry.file}: stands for {len(given)} vectors, not for one")
        names += [replace(name, storage=entry.storage) for name in given]
        entries += [entry] * len(given)
    how = replace(gathering, scope=recipe.scope)
    found = stored_vectors(names, how)
    if found is None:
        from atlas_cli.vectors.gather import gather  # most vectors are files

        found = gather(names, base, how)
    return [_checked_entry(entry, one) for entry, one in zip(entries, found, strict=True)]


def _checked_entry(entry: VectorFile, found: GatheredVector) -> GatheredVector:
    if entry.sha256 is not None and entry.sha256 != found.sha256:
        raise MismatchError(
            f"{entry.file}: is not the file that the recipe speaks of: its sha256 is "
            f"{found.sha256[:12]}..., expected {entry.sha256[:12]}..."
        )
    if found.storage:  # a vector has the name that it is given; a file has its own
        return replace(found, name=entry.name or found.name)
    called = read_header(found.file).name
    if entry.name is not None and entry.name != called:
        raise MismatchError(f"{entry.file}: is called {called}, not {entry.name}")
    return found


# Composition ----------------------------------------------------------------------------------


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


def open_vectors(
    merge: Merge, located: Mapping[str, Located], how: Conversion, vectors: Sequence[GatheredVector]
) -> Inputs:
    """The base and the vectors of a learned recipe, which must fit it. No value is read."""
    layout = Model(merge.layout, open_layout(merge.layout, located[merge.layout]))
    learned = open_learned(merge.recipe, located[merge.layout].model, layout, how, vectors)
    names = [name for name in layout.tensors if learned.changes(name)]
    return Inputs(layout.tensors, names, {}, layout.tensors, learned, {})


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
        transformers=is_transformers(layout.tensors),
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
        found = json.loads(read_regular(Path(path).expanduser()))
        return {v: {k: float(n) for k, n in row.items()} for v, row in found.items()}
    except (OSError, ValueError, AttributeError, TypeError) as problem:
        raise AtlasError(f"{path}: is no table of coefficients: {problem}") from problem
