"""Trimmed vectors hold the largest values of each, where it has the sign that all have together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from makers import write_moved_tiny

from atlas_cli.core.storage import decode
from atlas_cli.errors import UsageError
from atlas_cli.vectors.format import open_checked
from atlas_cli.vectors.trim import trim


def dense(path: Path | str) -> dict[str, torch.Tensor]:
    vector = open_checked(Path(path))
    return {name: decode(vector.read(name)).float() for name in vector.names}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("vectors")
    for seed, name in enumerate(("a", "b", "c")):
        write_moved_tiny(folder / f"{name}.safetensors", seed=seed)
    return [str(folder / f"{name}.safetensors") for name in "abc"]


def reference(paths: list[str], share: float) -> list[dict[str, torch.Tensor]]:
    """TIES on flat vectors: trim each, elect a sign, keep what agrees."""
    vectors = [dense(path) for path in paths]
    names = list(vectors[0])
    flat = torch.stack(
        [torch.cat([vector[name].flatten() for name in names]) for vector in vectors]
    )
    count = round(share * flat.shape[1])
    trimmed = torch.zeros_like(flat)
    for row, values in enumerate(flat):
        places = values.abs().topk(count).indices
        trimmed[row, places] = values[places]
    signs = torch.where(trimmed.sum(dim=0) < 0, -1.0, 1.0)
    kept = torch.where(trimmed.sign() == signs, trimmed, 0.0)
    sizes = [vectors[0][name].numel() for name in names]
    return [
        {
            name: piece.view_as(vectors[0][name])
            for name, piece in zip(names, row.split(sizes), strict=True)
        }
        for row in kept
    ]


@pytest.mark.parametrize("share", [0.2, 0.05, 1.0])
def test_trimmed_vectors_are_those_of_ties(paths: list[str], tmp_path: Path, share: float):
    found = trim(paths, share, tmp_path / "trimmed")
    for path, wanted in zip(found, reference(paths, share), strict=True):
        blocks = dense(path)
        for name, values in wanted.items():
            if values.any():
                assert torch.equal(blocks[name], values), name
            else:
                assert name not in blocks


def test_vectors_of_one_name_are_refused(paths: list[str], tmp_path: Path):
    with pytest.raises(UsageError, match="vectors of one name"):
        trim([paths[0], paths[0]], 0.2, tmp_path)
