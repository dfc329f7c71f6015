"""What a merge is asked for, what it has opened, and every byte that it will write.

No value is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from atlas_cli.errors import MismatchError
from atlas_cli.io.checkpoint import WORDS, header_text, open_tensors
from atlas_cli.io.tensors import LazyTensor, LazyTensors
from atlas_cli.merging.provenance import Located
from atlas_cli.merging.segments import Resolved, Segment
from atlas_cli.models.adapters import add_adapter
from atlas_cli.models.clip import HEAD
from atlas_cli.models.folders import companion_files, has_factors, is_adapter, plain, renamed
from atlas_cli.models.heads import SavedHead
from atlas_cli.recipes.merge import Merge, MergeRecipe
from atlas_cli.recipes.merge_checks import long_dtype
from atlas_cli.vectors.pool import GatheredVector

if TYPE_CHECKING:
    from atlas_cli.merging.adapters import MergedAdapter
    from atlas_cli.merging.model_card import Evaluated
    from atlas_cli.merging.produce import Producer
    from atlas_cli.merging.vocabulary import Vocabulary

CPU = torch.device("cpu")
TILE = 1 << 19  # elements that are read, merged and written at a time
_TILES = 16  # in a piece of work, which is done by one thread and noted in the journal
_DIFFUSERS = "diffusion_pytorch_model"


@dataclass(frozen=True)
class Limits:
    """What of the machine a merge may take."""

    memory: int = 512_000_000
    threads: int = 1
    device: torch.device = CPU
    allow_nonfinite: bool = False


@dataclass(frozen=True)
class MergeRequest:
    """A checked recipe, the files of its models, and the folder for the result."""

    merge: Merge
    located: Mapping[str, Located]
    target: Path
    limits: Limits = field(default_factory=Limits)
    shard: int = 5_000_000_000
    evaluation: Evaluated | None = None
    vectors: tuple[GatheredVector, ...] = ()
    tokenizer: bool = True  # whether that of the layout's model is copied
    card: bool = True

    @property
    def stem(self) -> str:
        """How the names of files begin: loaders of diffusers look for another one."""
        first = self.located[self.merge.layout].model.weights[0].name
        return _DIFFUSERS if first.startswith(_DIFFUSERS) else "model"


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
    return add_adapter(tensors, located.adapter)


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
            "dtype": word_of(self.dtype),
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


def word_of(dtype: torch.dtype) -> str:
    """The name of a dtype, without that of torch."""
    return str(dtype).removeprefix("torch.")


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


# Ready to be written ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Inputs:
    """All that a merge reads, opened and found to fit.

    `layout` has the tensors of the result in their order, of which `merged` are computed in the
    dtypes of `compute`, and all others copied. `base` are the tensors of the model whose
    configuration the result has.
    """

    layout: Mapping[str, LazyTensor]
    merged: Sequence[str]
    compute: Mapping[str, torch.dtype]
    base: LazyTensors
    producer: Producer
    resolved: Mapping[str, Resolved]
    segments: Sequence[Segment] = ()
    untied: bool = False  # whether the result has a head that the layout's model does not store
    vocabulary: Vocabulary | None = None  # of the result, if it is not that of the layout's model
    doubts: Sequence[str] = ()
    adapter: MergedAdapter | None = None  # the result, if it is no model

    @property
    def origins(self) -> list[dict[str, Any]]:
        """Where the layers come from of a result that is put together of slices."""
        return [origin for segment in self.segments for origin in segment.origins]


@dataclass(frozen=True)
class PreparedMerge:
    """A merge that is ready to be written: all inputs are open and fit each other."""

    request: MergeRequest
    inputs: Inputs
    plan: Plan
    peak: int  # bytes of memory for the largest tile
    head: SavedHead | None = None

    @property
    def bytes_read(self) -> int:
        """The bytes of all inputs."""
        found = self.request.located.values()
        return sum(path.stat().st_size for one in found for path in one.model.weights)

    @property
    def companions(self) -> list[str]:
        """The files that are copied along with the weights."""
        layout = self.request.located[self.request.merge.layout]
        names = [path.name for path in companion_files(layout.model)]
        return [*names, HEAD] if self.head else names


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
