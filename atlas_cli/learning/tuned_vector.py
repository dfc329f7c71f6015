"""Tensors of the base that a run changed, written as a task vector of their own."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from atlas_cli.io.checkpoint import write_tensors
from atlas_cli.io.files import sha256_of
from atlas_cli.learning.run import Inputs
from atlas_cli.recipes.learned import VectorEntry
from atlas_cli.sources.locate import locate, parse_reference
from atlas_cli.vectors.bases import open_base
from atlas_cli.vectors.extract import Options, extract_to

_SCOPE = "visual"


def write_tuned(
    inputs: Inputs, changed: Mapping[str, torch.Tensor], path: Path, told: str
) -> VectorEntry:
    """Write the change of some tensors of the base as a vector; `told` says where it is from."""
    base = open_base(inputs.model, _SCOPE)
    tensors = {name: block.read() for name, block in base.blocks.items()}
    tensors |= {name: tensor.cpu().clone() for name, tensor in changed.items()}
    with tempfile.TemporaryDirectory(prefix="atlas-") as folder:
        tuned = Path(folder) / "tuned.safetensors"
        write_tensors(tuned, tensors)
        source = locate(parse_reference(str(tuned)))
        # The folder is gone afterwards, and its name would differ between runs.
        source = replace(source, reference=replace(source.reference, text=told))
        extract_to(path, path.stem, base, source, Options())
    return VectorEntry(name=path.stem, file=str(path), sha256=sha256_of(path))
