"""The files of the built-in world: one small model and a task vector for each of its tasks."""

from __future__ import annotations

from pathlib import Path

MODELS: tuple[str, ...] = ("tiny",)
VECTORS: tuple[str, ...] = (
    "digits",
    "letters",
    "house_numbers",
    "signs",
    "textures",
    "terrain",
    "counts",
    "silhouettes",
)


def model_folder(name: str) -> Path:
    """The folder of a built-in model, as open_clip reads it with `local-dir:`."""
    return Path(__file__).parent / name


def vector_file(name: str) -> Path:
    """The task vector of the built-in model for a task, as `atlas extract` writes it."""
    return Path(__file__).parent / "vectors" / f"{name}.safetensors"
