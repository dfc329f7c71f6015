"""Learned heads in files: beside a model, and as the head that its images are classified by."""

from __future__ import annotations

import base64
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from atlas_cli.core.adapters import Head
from atlas_cli.errors import CheckpointError
from atlas_cli.io.checkpoint import open_safetensors, read_metadata, write_tensors
from atlas_cli.models.clip import HEAD, Clip, Warn, zero_shot_head
from atlas_cli.registry import ADAPTERS

_KEY, _TEXT = "atlas_head", "text"


@dataclass(frozen=True)
class SavedHead:
    """A head, and the classes that it tells apart."""

    head: Head
    classes: tuple[str, ...]


def write_head(path: Path, saved: SavedHead) -> None:
    """Write a head as safetensors."""
    facts = {"adapter": saved.head.adapter, "classes": list(saved.classes)}
    tensors = {**saved.head.parameters, _TEXT: saved.head.text}
    kept = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    write_tensors(path, kept, {_KEY: json.dumps(facts, ensure_ascii=False)})


def open_head(path: Path) -> SavedHead:
    """Read a head. Raises CheckpointError if the file holds none that atlas knows."""
    try:
        facts = json.loads(read_metadata(path)[_KEY])
        tensors = {name: lazy.read().clone() for name, lazy in open_safetensors(path).items()}
        text, name = tensors.pop(_TEXT), facts["adapter"]
        head, classes = Head(name, tensors, text), tuple(map(str, facts["classes"]))
        known = ADAPTERS.get(name)
        width = 1 if known is None or known.pooled else text.shape[1]
        if known is None or head(torch.ones(1, width)).shape != (1, len(classes)):
            raise ValueError(f"adapter {name!r} of {len(classes)} classes")
    except (KeyError, ValueError, TypeError, RuntimeError, IndexError) as problem:
        message = f"{path}: is no head that atlas can use: {problem}"
        raise CheckpointError(message) from problem
    return SavedHead(head, classes)


def to_text(path: Path) -> str:
    """A small file as text, for a recipe that has no folder to name a file in."""
    return base64.b64encode(path.read_bytes()).decode("ascii")


def head_from_text(text: str) -> SavedHead:
    """The head of such a text. Raises CheckpointError if it is none."""
    with tempfile.TemporaryDirectory(prefix="atlas-") as folder:
        path = Path(folder) / "head.safetensors"
        try:
            path.write_bytes(base64.b64decode(text, validate=True))
        except ValueError as problem:
            raise CheckpointError("head.data: is no base64 of a head") from problem
        return open_head(path)


def head_of(
    clip: Clip, classes: Sequence[str], templates: Sequence[str], warn: Warn
) -> torch.Tensor | Head:
    """The learned head beside a model, if it tells these classes apart; else the zero-shot head."""
    saved = open_head(clip.source.folder / HEAD)
    if saved.classes == tuple(classes):
        return saved.head.to(clip.device)
    some = ", ".join(saved.classes[:3])
    warn(f"{clip.name}: its learned head is for other classes ({some}, ...): zero-shot here")
    return zero_shot_head(clip, classes, templates, warn)
