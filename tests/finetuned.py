"""A base and labelled images to fine-tune on, and the same models by open_clip's own door."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from conftest import write_open_clip
from PIL import Image

from atlas_cli.models.open_clip_import import import_open_clip

CLASSES = ("cat", "dog", "fish")
TRAIN, VAL = 6, 4  # images of a class


def write_task(folder: Path, *, turn: int = 0) -> Path:
    """Images of three classes in train/ and val/: noise, brighter in one channel for each class."""
    random = np.random.default_rng(turn)
    for split, count in (("train", TRAIN), ("val", VAL)):
        for channel, name in enumerate(CLASSES):
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 160, (32, 32, 3), dtype=np.uint8)
                pixels[..., (channel + turn) % 3] += 90
                Image.fromarray(pixels).save(folder / split / name / f"{number}.png")
    return folder


def write_world(root: Path) -> Path:
    """A base model and two tasks."""
    write_open_clip(root / "base")
    write_task(root / "pets")
    write_task(root / "birds", turn=1)
    return root


def opened(folder: Path) -> Any:
    """A model as open_clip itself opens it."""
    name = f"local-dir:{folder.resolve()}"
    return import_open_clip().create_model_and_transforms(name)[0].eval()


def read_split(folder: Path, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The images of a split in [-1, 1] and their labels, in order."""
    paths = sorted((folder / split).glob("*/*.png"))
    images = np.stack([np.asarray(Image.open(path)) for path in paths])
    labels = torch.tensor([CLASSES.index(path.parent.name) for path in paths])
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1, labels


def head_of(model: Any, folder: Path) -> torch.Tensor:
    """The zero-shot head of the three classes."""
    tokenizer = import_open_clip().get_tokenizer(f"local-dir:{folder.resolve()}")
    with torch.no_grad():
        tokens = tokenizer([f"a photo of a {name}." for name in CLASSES])
        return model.logit_scale.exp() * F.normalize(model.encode_text(tokens), dim=-1)
