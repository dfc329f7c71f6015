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
    from atlas_cli.cli.app import main

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    base = write_open_clip(root / "base")
    (root / "v").mkdir()
    for seed, name in enumerate(("birds", "<cars>")):
        folder = write_tuned(base, root / f"tuned{seed}", seed)
        target = root / "v" / f"{seed}.safetensors"
        given = ["extract", base, folder, "-o", target, "--name", name, "--quiet"]
        assert main([str(argument) for argument in given]) == 0
    write_images(root / "photos", ("cat", "dog & <fox>"), 4)
    return root


def write_tuned(base: Path, folder: Path, seed: int) -> Path:
    """The base with an image tower that is moved a little, as by fine-tuning."""
    random = torch.Generator().manual_seed(seed)
    moved = {
        name: tensor + 0.03 * torch.randn(tensor.shape, generator=random)
        if name.startswith("visual.")
        else tensor
        for name, tensor in load_file(base / WEIGHTS).items()
    }
    save_file(moved, write_open_clip(folder) / WEIGHTS, {"format": "pt"})
    return folder


def learn(world: Path, command: str, folder: Path, *more: str | Path) -> Path:
    """The folder of a run."""
    from atlas_cli.cli.app import main

    given = [command, world / "photos", "--model", world / "base", "--vectors", world / "v"]
    given += [*QUICK, *more, "-o", folder]
    assert main([str(argument) for argument in given]) == 0
    return folder
