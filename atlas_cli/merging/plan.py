"""Models are opened and checked against each other; every parameter and every byte is planned.

No value is read.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

from atlas_cli.core.patterns import find_pattern
from atlas_cli.errors import AtlasError, MismatchError, UsageError
from atlas_cli.io.checkpoint import WORDS, header_text, open_tensors
from atlas_cli.io.tensors import LazyTensor, LazyTensors
from atlas_cli.merging.provenance import Located
from atlas_cli.merging.segments import Segment
from atlas_cli.models.adapters import adapted
from atlas_cli.models.language import is_vocabulary
from atlas_cli.models.tensor_names import has_factors, is_adapter, plain, renamed
from atlas_cli.recipes.merge import Levels, Merge, MergeRecipe
from atlas_cli.recipes.merge_checks import long_dtype
from atlas_cli.recipes.merge_parameters import resolve
from atlas_cli.registry import MERGE_METHODS

TILE = 1 << 19  # elements that are read, merged and written at a time
_TILES = 16  # in a piece of work, which is done by one thread and noted in the journal
_SHOWN = 5  # problems of an error message


# Opening --------------------------------------------------------------------------------------


def open_layout(reference: str, located: Located) -> LazyTensors:
    """The tensors of the model whose names the result has."""
    return _adapted(plain(_opened(reference, located), reference), located)


def open_like(reference: str, located: Located, like: LazyTensors) -> LazyTensors:
    """The tensors of a model under the names of another, to which they must fit."""
    return _adapted(renamed(_opened(reference, located), like, reference), located)


def _opened(reference: str, located: Located) -> LazyTensors:
    """The tensors of a model. Raises MismatchError for an adapter, which is none by itself."""
    tensors = open_tensors(located.model.weights)
    if is_adapter(located.model, tensors) or has_factors(tensors):
        raise MismatchError(
            f"{reference}: is a LoRA adapter, not a model; write MODEL+{reference} for the model "
            "that it makes, or list adapters only, to merge them into one adapter"
        )
    return tensors


def _adapted(tensors: LazyTensors, located: Located) -> LazyTensors:
    if located.adapter is None:
        return tensors
    return adapted(tensors, located.adapter, open_tensors(located.adapter.weights))


# Fitting --------------------------------------------------------------------------------------


def check_fit(layout: LazyTensors, models: Mapping[str, LazyTensors]) -> None:
    """Raise MismatchError that lists every tensor which is missing, extra, or of another kind."""
    problems = [
        f"{reference}: {line}"
        for reference, tensors in models.items()
        for line in _problems(layout, tensors)
    ]
    if problems:
        more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise MismatchError(
            "the models do not fit each other: " + "; ".join(problems[:_SHOWN] + more)
        )


def _problems(layout: LazyTensors, tensors: LazyTensors) -> Sequence[str]:
    lines = []
    for name, wanted in layout.items():
        if not wanted.dtype.is_floating_point:
            continue
        found = tensors.get(name)
        if found is None:
            lines.append(f"{name} is missing")
        elif found.shape != wanted.shape and {found.shape, wanted.shape} != {(), (1,)}:
            rows = found.shape[1:] == wanted.shape[1:] and is_vocabulary(name)
            way = " (tokenizer_source: base or union aligns vocabularies)" if rows else ""
            lines.append(f"{name} has shape {found.shape}, expected {wanted.shape}{way}")
        elif not found.dtype.is_floating_point:
            lines.append(f"{name} has dtype {_word(found.dtype)}, expected {_word(wanted.dtype)}")
    extra = [n for n, t in tensors.items() if n not in layout and t.dtype.is_floating_point]
    return lines + [f"{name} is unknown" for name in extra]


def promoted(tensors: Iterable[LazyTensor]) -> torch.dtype:
    """The dtype that tensors of several are merged in: one that holds the values of all."""
    return reduce(torch.promote_types, (tensor.dtype for tensor in tensors))


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Files ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Output:
    """A tensor of the result: in which file, where in its data, and how it is computed.

    `merged` is False for what is copied from the base: integers, and blocks without a vector.
    """

    number: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    compute: torch.dtype
    file: str
    start: int
    merged: bool

    @property
    def size(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """How many bytes of the file it takes."""
        return self.size * self.dtype.itemsize

    def facts(self) -> dict[str, Any]:
        """The tensor in the JSON of a plan."""
        return {
            "tensor": self.name,
            "shape": list(self.shape),
            "dtype": _word(self.dtype),
            "file": self.file,
            "offset": self.start,
            "bytes": self.bytes,
            "merged": self.merged,
        }

    def tiles(self, *, whole: bool = False) -> list[tuple[int, int]]:
        """Where to cut: whole rows of what has rows, anywhere in a vector."""
        if whole or self.size == 0:
            return [(0, self.size)]
        row = math.prod(self.shape[1:]) if len(self.shape) > 1 else 1
        step = row * max(1, TILE // row)
        return [(start, min(start + step, self.size)) for start in range(0, self.size, step)]

    def pieces(self, *, whole: bool = False) -> list[list[tuple[int, int]]]:
        """The tiles, a few at a time."""
        tiles = self.tiles(whole=whole)
        return [tiles[first : first + _TILES] for first in range(0, len(tiles), _TILES)]


@dataclass(frozen=True)
class Shard:
    """A file of the result: the bytes of its header and of its data, and the header's entries."""

    file: str
    header: int
    data: int
    entries: Mapping[str, Any]

    @property
    def bytes(self) -> int:
        """The length of the file."""
        return 8 + self.header + self.data


@dataclass(frozen=True)
class Plan:
    """All that will be written."""

    outputs: tuple[Output, ...]
    shards: tuple[Shard, ...]

    @property
    def bytes(self) -> int:
        """What the files of weights take."""
        return sum(shard.bytes for shard in self.shards)

    @property
    def index(self) -> dict[str, Any] | None:
        """The table of shards that loaders look for, if there are several."""
        if len(self.shards) == 1:
            return None
        where = {output.name: output.file for output in self.outputs}
        total = sum(output.bytes for output in self.outputs)
        return {"metadata": {"total_size": total}, "weight_map": where}


def dtype_of(word: str | None) -> torch.dtype | None:
    """The dtype that a recipe names, as float32 or torch.float32."""
    return getattr(torch, long_dtype(word)) if word else None


def lay_out(
    layout: LazyTensors,
    merged: Iterable[str],
    dtypes: Mapping[str, torch.dtype],
    recipe: MergeRecipe,
    *,
    limit: int,
    stem: str,
) -> list[list[Output]]:
    """Every output, file by file; a file is full when the next tensor would pass the limit.

    `dtypes` are those to compute in, where it is not the one that the tensor has.
    """
    wanted, written = dtype_of(recipe.dtype), dtype_of(recipe.out_dtype)
    chosen = set(merged)
    groups: list[list[tuple[str, torch.dtype, torch.dtype]]] = [[]]
    filled = 0
    for name, tensor in layout.items():
        floating = tensor.dtype.is_floating_point
        compute = (wanted or dtypes.get(name, tensor.dtype)) if floating else tensor.dtype
        dtype = (written or compute) if floating else tensor.dtype
        size = math.prod(tensor.shape) * dtype.itemsize
        if groups[-1] and filled + size > limit:
            groups.append([])
            filled = 0
        groups[-1].append((name, compute, dtype))
        filled += size
    files = list(_file_names(stem, len(groups)))
    outputs: list[list[Output]] = []
    number = 0
    for file, group in zip(files, groups, strict=True):
        start = 0
        outputs.append([])
        for name, compute, dtype in group:
            shape = layout[name].shape
            made = Output(number, name, shape, dtype, compute, file, start, name in chosen)
            outputs[-1].append(made)
            start += made.bytes
            number += 1
    return outputs


def _file_names(stem: str, count: int) -> Iterator[str]:
    if count == 1:
        yield f"{stem}.safetensors"
        return
    for number in range(1, count + 1):
        yield f"{stem}-{number:05d}-of-{count:05d}.safetensors"


def plan_files(groups: Sequence[Sequence[Output]], metadata: Mapping[str, str]) -> Plan:
    """The plan of these files. The first one carries the metadata, which may change in content
    but not in length until it is written.
    """
    shards = []
    for number, group in enumerate(groups):
        entries = {
            output.name: {
                "dtype": WORDS[output.dtype],
                "shape": list(output.shape),
                "data_offsets": [output.start, output.start + output.bytes],
            }
            for output in group
        }
        text = header_text(entries, {**(metadata if number == 0 else {}), "format": "pt"})
        data = sum(output.bytes for output in group)
        shards.append(Shard(group[0].file, -(-len(text) // 8) * 8, data, entries))
    return Plan(tuple(output for group in groups for output in group), tuple(shards))


# Parameters -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Resolved:
    """The parameters of one tensor: those of each model, those of the whole merge, its depth."""

    models: tuple[dict[str, Any], ...]
    merge: dict[str, Any]
    depth: float | None


def resolve_all(segment: Segment, names: Iterable[str]) -> dict[str, Resolved]:
    """What every parameter is for every tensor. Raises AtlasError if one has no value."""
    return {name: _resolve_one(segment, name) for name in names}


def check_together(
    method: str, resolved: Mapping[str, Resolved], dtypes: Collection[object]
) -> None:
    """Raise UsageError if tensors that are merged as one vector differ in more than their names."""
    who = f"{method} with scope model"
    first = next(iter(resolved.values()))
    for name, one in resolved.items():
        if (one.models, one.merge) != (first.models, first.merge):
            raise UsageError(f"{who}: give every parameter as one value; {name} has another")
    if len(dtypes) > 1:
        raise UsageError(f"{who}: tensors have several dtypes; give a dtype to compute in")


def _resolve_one(segment: Segment, name: str) -> Resolved:
    """Filters look for what the model itself calls a tensor, or the result for the whole merge."""
    part, depth = segment.part, segment.depths[name]
    row = MERGE_METHODS[part.method]

    def value(levels: Levels, key: str, default: Any, own: str, whose: str) -> Any:
        found = resolve(levels, key, own, depth)
        if found is None and default is None:
            raise AtlasError(f"{name}: no filter gives it a {key}{whose}; add an entry without one")
        return default if found is None else found

    models = tuple(
        {
            key: value(levels, key, knob.default, model.own_name(name), f" of {who}")
            for key, knob in row.per_model.items()
        }
        for (who, levels), model in zip(part.models, segment.models, strict=True)
    )
    whole = {
        key: value(part.levels, key, knob.default, name, "") for key, knob in row.per_merge.items()
    }
    return Resolved(models, whole, depth)


def idle_filters(merge: Merge, names: Sequence[str]) -> list[str]:
    """Filters that no tensor's name contains."""
    tables = [
        table
        for part in merge.parts
        for table in (*part.levels, *(levels[0] for _, levels in part.models))
    ]
    used = dict.fromkeys(text for table in tables for text in _filters_of(table))
    return [text for text in used if not any(text in name for name in names)]


def _filters_of(parameters: Mapping[str, Any]) -> Iterator[str]:
    """Every filter that a table of parameters uses."""
    for setting in parameters.values():
        for entry in setting if isinstance(setting, list) else [setting]:
            if isinstance(entry, dict) and entry.get("filter") not in (None, "*"):
                yield entry["filter"]


def explained(
    segments: Iterable[Segment], resolved: Mapping[str, Resolved], pattern: str
) -> list[dict[str, Any]]:
    """The parameters of every tensor whose name the regular expression is found in."""
    return [
        {
            "tensor": name,
            "parameters": resolved[name].merge,
            "models": {
                who: own
                for (who, _), own in zip(segment.part.models, resolved[name].models, strict=True)
            },
        }
        for segment in segments
        for name in segment.layout.tensors
        if name in resolved and find_pattern(pattern, name)
    ]
