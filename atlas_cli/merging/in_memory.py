"""A base, task vectors and coefficients -> a composed model in memory; nothing is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import torch

from atlas_cli.core.compose import Composition, Layout, choose_layout, compose_block, map_blocks
from atlas_cli.errors import UsageError
from atlas_cli.io.tensors import LazyTensors
from atlas_cli.merging.learned import STATISTICS, coefficient_table, gather_vectors, open_learned
from atlas_cli.merging.plan import open_layout
from atlas_cli.merging.produce import Conversion
from atlas_cli.merging.provenance import Located
from atlas_cli.merging.segments import Model
from atlas_cli.models.clip import Clip, Opening, open_model
from atlas_cli.models.folders import read_tensors
from atlas_cli.recipes.merge import MergeRecipe
from atlas_cli.sources.locate import Source
from atlas_cli.vectors.format import in_scope
from atlas_cli.vectors.pool import Gathering, Member, Pool, check_members
from atlas_cli.vectors.task_vector import TaskVector

Coefficients = float | Sequence[float] | Mapping[str, float] | Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class _Scaled:
    """Vectors, and a table with a row for each of them and a column for each label."""

    pool: Pool
    columns: Layout
    table: torch.Tensor


def compose_model(
    source: Source,
    vectors: Sequence[TaskVector] | None,
    coefficients: Coefficients | MergeRecipe,
    opening: Opening | None = None,
) -> Clip:
    """The model of a source with theta0 + sum of coefficient * tau in place of its weights.

    The weights are those that a merge by the same coefficients writes, bit for bit. Without
    vectors, those of the recipe are taken.
    """
    clip = open_model(source, opening)
    blocks = read_tensors(source)
    if vectors is None:
        scaled = _of_recipe(coefficients, source)
    else:
        scaled = _of_vectors(vectors, coefficients, blocks)
    places = clip.module.state_dict()
    with torch.no_grad():
        for name in scaled.pool.names:
            composed = _compose(scaled, blocks, name).reshape(places[name].shape)
            places[name].copy_(composed)
    names = ", ".join(member.name for member in scaled.pool.members)
    return replace(clip, name=f"{clip.name} + {names}")


def _compose(scaled: _Scaled, blocks: LazyTensors, name: str) -> torch.Tensor:
    """One block, rounded to the dtype that it has in the base, as a merge writes it."""
    members = scaled.pool.members
    found = {
        number: member.vector.read(name)
        for number, member in enumerate(members)
        if name in member.vector.names
    }
    base = blocks[name].read()
    one = Composition({name: base}, {name: map_blocks(found)}, scaled.columns, len(members))
    return compose_block(one, name, scaled.table).to(base.dtype)


def _of_recipe(recipe: object, source: Source) -> _Scaled:
    if not isinstance(recipe, MergeRecipe):
        raise UsageError("no task vectors given; name them, or give a learned recipe")
    layout = Model(source.reference.text, open_layout(source.reference.text, Located(source)))
    vectors = gather_vectors(recipe, source, Gathering())
    learned = open_learned(recipe, source, layout, Conversion(recipe.seed), vectors)
    return _Scaled(learned.pool, learned.columns, learned.coefficients)


def _of_vectors(
    vectors: Sequence[TaskVector], coefficients: Coefficients | MergeRecipe, blocks: LazyTensors
) -> _Scaled:
    if not vectors:
        raise UsageError("no task vectors given")
    scope = vectors[0].header.scope
    members = tuple(Member(vector.name, vector.name, "", vector) for vector in vectors)
    parameters = [name for name in in_scope(blocks, scope) if not name.endswith(STATISTICS)]
    pool = Pool(members, *check_members(members, blocks, parameters, scope), "as stored", 0)
    columns = choose_layout(pool.shapes, "vector")
    if isinstance(coefficients, MergeRecipe):
        recipe = coefficients
        columns = choose_layout(pool.shapes, recipe.granularity, recipe.groups, recipe.seed)
        return _Scaled(pool, columns, coefficient_table(recipe.coefficients, pool, columns))
    if isinstance(coefficients, Mapping):
        table: dict[str, Any] = dict(coefficients)
        if any(isinstance(row, Mapping) for row in table.values()):
            columns = choose_layout(pool.shapes, "block")
        else:
            table = {name: {columns.labels[0]: value} for name, value in table.items()}
        return _Scaled(pool, columns, coefficient_table(table, pool, columns))
    values = [coefficients] * len(members) if isinstance(coefficients, Real) else coefficients
    if not isinstance(values, Sequence) or len(values) != len(members):
        raise UsageError(
            f"coefficients: expected a number, {len(members)} numbers, a table or a learned recipe"
        )
    return _Scaled(pool, columns, torch.tensor([[float(value)] for value in values]))
