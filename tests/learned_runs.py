"""Real runs of learning commands on random models and noise: small, quick, with all their files."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from conftest import write_images, write_open_clip
from safetensors.torch import load_file, save_file

WEIGHTS = "open_clip_model.safetensors"
QUICK = ("--batch-size", "8", "--epochs", "2", "--min-steps", "2", "--lr", "0.3", "--quiet")


def write_world(root: Path) -> Path:
    """A base, task vectors `birds` and `<cars>` of it, and images of two classes."""
    from atlas_cli.commands.app import main

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    base = write_open_clip(root / "base")
    weights = load_file(base / WEIGHTS)
    (root / "v").mkdir()
    for seed, name in enumerate(("birds", "<cars>")):
        random = torch.Generator().manual_seed(seed)
        moved = {
            key: tensor + 0.03 * torch.randn(tensor.shape, generator=random)
            if key.startswith("visual.")
            else tensor
            for key, tensor in weights.items()
        }
        folder = write_open_clip(root / f"tuned{seed}")
        save_file(moved, folder / WEIGHTS, {"format": "pt"})
        target = root / "v" / f"{seed}.safetensors"
        given = ["extract", base, folder, "-o", target, "--name", name, "--quiet"]
        assert main([str(argument) for argument in given]) == 0
    write_images(root / "photos", ("cat", "dog & <fox>"), 4)
    return root


def learn(world: Path, command: str, folder: Path, *more: str | Path) -> Path:
    """The folder of a run."""
    from atlas_cli.commands.app import main

    given = [command, world / "photos", "--model", world / "base", "--vectors", world / "v"]
    given += [*QUICK, *more, "-o", folder]
    assert main([str(argument) for argument in given]) == 0
    return folder
