"""Task vectors trimmed as TIES does: their largest values, where these have the elected sign."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch

from atlas_cli.core import storage
from atlas_cli.errors import UsageError
from atlas_cli.io.checkpoint import write_tensors
from atlas_cli.merge_methods.election import Rules, elected_signs, silence_
from atlas_cli.vectors.format import BlockInfo, StoredVector, check_same_base, to_metadata
from atlas_cli.vectors.pool import GatheredVector, open_member


def trim(paths: Sequence[str | GatheredVector], share: float, folder: Path) -> list[str]:
    """Write every vector with its largest values only, and of those the ones of the elected sign.

    `share` of the values of each vector, the largest by magnitude over all its blocks, are kept;
    then an element keeps its value only where it has the sign of the sum over the vectors. The
    files have the names of the vectors; those that are there are replaced.
    """
    members = [open_member(path) for path in paths]
    vectors = [member.vector for member in members]
    check_same_base({member.path: member.vector.header for member in members})
    names = [vector.header.name for vector in vectors]
    if len(set(names)) < len(names):
        raise UsageError(f"vectors of one name cannot be trimmed together: {', '.join(names)}")
    floors = [_floor(vector, share) for vector in vectors]
    kept: list[dict[str, torch.Tensor]] = [{} for _ in vectors]
    for name in dict.fromkeys(name for vector in vectors for name in vector.names):
        present = [n for n, vector in enumerate(vectors) if name in vector.names]
        blocks = [_largest(_values(vectors[n], name), floors[n]) for n in present]
        signs = elected_signs(blocks, Rules())
        for number, block in zip(present, blocks, strict=True):
            silence_(block, signs)
            if block.any():
                kept[number][name] = block
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for vector, tensors in zip(vectors, kept, strict=True):
        path = folder / f"{vector.header.name}.safetensors"
        blocks_kept = tuple(
            _info(info, tensors[info.name]) for info in vector.header.blocks if info.name in tensors
        )
        header = dataclasses.replace(vector.header, blocks=blocks_kept)
        write_tensors(path, tensors, to_metadata(header))
        found.append(str(path))
    return found


def _values(vector: StoredVector, name: str) -> torch.Tensor:
    return storage.decode(vector.read(name)).float().clone()


def _floor(vector: StoredVector, share: float) -> float:
    """The magnitude from which on values are among the largest `share` of a vector."""
    magnitudes = torch.cat([_values(vector, name).abs().flatten() for name in vector.names])
    count = max(1, round(share * len(magnitudes)))
    return magnitudes.kthvalue(len(magnitudes) - count + 1).values.item()


def _largest(values: torch.Tensor, floor: float) -> torch.Tensor:
    return values.masked_fill_(values.abs() < floor, 0.0)


def _info(info: BlockInfo, values: torch.Tensor) -> BlockInfo:
    norm = storage.norm(values)
    return dataclasses.replace(info, storage="fp32", norm=norm, error=0.0, starts=())
