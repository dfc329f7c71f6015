"""What was learned in a model's own tensors -> a task vector, and the recipe that adds it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from atlas_cli.io.checkpoint import write_tensors
from atlas_cli.learning.setup import PreparedRun
from atlas_cli.recipes.reading import LearnedRecipe, VectorEntry
from atlas_cli.sources.locate import locate, sha256_of
from atlas_cli.sources.references import parse_reference
from atlas_cli.vectors.bases import open_base
from atlas_cli.vectors.extract import Options, extract_to
from atlas_cli.vectors.format import open_vector

_SCOPE = "visual"


def write_tuned(ready: PreparedRun, values: torch.Tensor, path: Path) -> LearnedRecipe:
    """Write the difference from the base as a task vector; the recipe adds all of it."""
    inputs = ready.inputs
    base = open_base(inputs.model, _SCOPE)
    changed = ready.setting.tower.load(values)
    tensors = {name: block.read() for name, block in base.blocks.items()}
    tensors |= {name: tensor.cpu().clone() for name, tensor in changed.items()}
    with tempfile.TemporaryDirectory(prefix="atlas-") as folder:
        tuned = Path(folder) / "tuned.safetensors"
        write_tensors(tuned, tensors)
        extract_to(path, path.stem, base, locate(parse_reference(str(tuned))), Options())
    entry = VectorEntry(path.stem, str(path), sha256_of(path))
    blocks = [block.name for block in open_vector(path).header.blocks if block.norm]
    return LearnedRecipe(
        merge_method="atlas",
        base_model=inputs.recipe.model,
        vectors=[entry],
        coefficients={path.stem: dict.fromkeys(blocks, 1.0)},
        seed=inputs.recipe.seed,
    )
