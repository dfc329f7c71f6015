"""Task vectors extracted from model files, and read again."""

from __future__ import annotations

from pathlib import Path

import torch

from atlas_cli.core.storage import decode
from atlas_cli.sources.locate import locate, parse_reference
from atlas_cli.vectors.bases import open_base
from atlas_cli.vectors.differences import Choice
from atlas_cli.vectors.extract import Extracted, Options, extract_to
from atlas_cli.vectors.format import open_vector

WEIGHTS = "open_clip_model.safetensors"
Tensors = dict[str, torch.Tensor]


def run(
    base: Path, finetuned: Path | str, path: Path, choice: Choice | None = None, **options
) -> Extracted:
    choice = choice or Choice()
    architecture = options.pop("architecture", None)
    opened = open_base(locate(parse_reference(str(base))), choice.scope, choice.allow, architecture)
    source = locate(parse_reference(str(finetuned)))
    return extract_to(path, "test", opened, source, Options(choice, **options))


def read(path: Path) -> Tensors:
    vector = open_vector(path)
    return {name: decode(vector.read(name)) for name in vector.names}
