"""A model and its head as one image classifier that runs without atlas: in torch, or as ONNX."""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.nn.functional as F

from atlas_cli.core.adapters import Head
from atlas_cli.datasets.pixels import view_of
from atlas_cli.errors import AtlasError, install_hint
from atlas_cli.models.clip import Clip
from atlas_cli.models.saving import whole_folder
from atlas_cli.registry import ADAPTERS

FORMATS = ("torch", "onnx")
_FILES = {"torch": "classifier.pt2", "onnx": "classifier.onnx"}
_CALLS = {
    "torch": """```python
import torch
classifier = torch.export.load("classifier.pt2").module()
logits = classifier(images)
```""",
    "onnx": """```python
import onnxruntime
session = onnxruntime.InferenceSession("classifier.onnx")
(logits,) = session.run(None, {"images": images.numpy()})
```""",
}


class ImageClassifier(torch.nn.Module):
    """(images, 3, size, size) in 0..1 -> (images, classes)."""

    def __init__(self, visual: torch.nn.Module, head: torch.nn.Module, view: Any) -> None:
        super().__init__()
        self.visual, self.head = visual, head
        self.register_buffer("mean", view.mean)
        self.register_buffer("std", view.std)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.visual((images - self.mean) / self.std))  # type: ignore[no-any-return, operator]


class LinearHead(torch.nn.Module):
    """One linear layer on features of length 1."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        super().__init__()
        self.classifier = torch.nn.Linear(weight.shape[1], weight.shape[0])
        with torch.no_grad():
            self.classifier.weight.copy_(weight)
            self.classifier.bias.copy_(bias)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.classifier(F.normalize(features, dim=-1))  # type: ignore[no-any-return]


class AdapterHead(torch.nn.Module):
    """A head that is no linear layer, with its numbers as buffers."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self._kind, self._names = ADAPTERS[head.adapter], tuple(head.parameters)
        for name, value in head.parameters.items():
            self.register_buffer(name, value)
        self.register_buffer("text", head.text)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        numbers: Mapping[str, torch.Tensor] = {name: getattr(self, name) for name in self._names}
        text: torch.Tensor = self.text  # type: ignore[assignment]
        return self._kind.logits(numbers, features, text)


@dataclass(frozen=True)
class ExportedClassifier:
    """A classifier that was written. Shown as its folder, or as JSON."""

    folder: str
    files: list[str]
    classes: int
    linear: bool

    def __str__(self) -> str:
        return self.folder


def classifier_of(clip: Clip, head: torch.Tensor | Head) -> ImageClassifier:
    """The image tower of a model with a head, as one module in float32 on the CPU."""
    if isinstance(head, torch.Tensor):
        linear: tuple[torch.Tensor, torch.Tensor] | None = head, head.new_zeros(len(head))
    else:
        linear = head.linear()
    last = LinearHead(*linear) if linear else AdapterHead(head)  # type: ignore[arg-type]
    visual: torch.nn.Module = clip.module.visual  # type: ignore[assignment]
    made = ImageClassifier(visual, last, view_of(clip.preprocess))
    return made.float().cpu().eval().requires_grad_(False)


def check_formats(formats: Sequence[str]) -> None:
    """Raise AtlasError if what a format needs is not installed."""
    if "onnx" in formats and (find_spec("onnx") is None or find_spec("onnxscript") is None):
        raise AtlasError(f"--format onnx needs onnxscript; run: {install_hint('onnx')}")


def write_classifier(
    clip: Clip,
    head: torch.Tensor | Head,
    classes: Sequence[str],
    formats: Sequence[str],
    folder: Path,
) -> ExportedClassifier:
    """Write a classifier in every format, with its labels, its preprocessing and how to call it."""
    check_formats(formats)
    module, view = classifier_of(clip, head), view_of(clip.preprocess)
    images = torch.zeros(2, 3, view.size, view.size)  # they become part of the file
    with whole_folder(folder) as target:
        program = _program(module, images)
        if "torch" in formats:
            _write_torch(program, target / _FILES["torch"])
        if "onnx" in formats:
            _write_onnx(program, target / _FILES["onnx"])
        labels = json.dumps(list(classes), ensure_ascii=False, indent=1) + "\n"
        (target / "labels.json").write_text(labels, "utf-8")
        facts = {"size": view.size, **_geometry(clip), "range": [0, 1], "channels": "RGB"}
        (target / "preprocess.json").write_text(json.dumps(facts, indent=1) + "\n", "utf-8")
        (target / "README.md").write_text(_card(clip, classes, formats, facts), "utf-8")
    files = sorted(path.name for path in folder.iterdir())
    return ExportedClassifier(str(folder), files, len(classes), isinstance(module.head, LinearHead))


def _geometry(clip: Clip) -> dict[str, Any]:
    given = clip.blueprint.preprocess
    found = {"resize": "shortest", "interpolation": "bicubic", "crop": "center"}
    if given.get("interpolation"):
        found["interpolation"] = given["interpolation"]
    if given.get("resize_mode"):
        found["resize"] = given["resize_mode"]
    return found


def _program(module: ImageClassifier, images: torch.Tensor) -> torch.export.ExportedProgram:
    shapes = {"images": {0: torch.export.Dim("count", min=1)}}
    with _quiet(), torch.no_grad():
        return torch.export.export(module, (images,), dynamic_shapes=shapes)


class _Remembering(io.RawIOBase):
    """A file whose writer in C++ ends the process where a disk is full: it hears of it later."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.problem: OSError | None = None

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, place: int, whence: int = 0, /) -> int:
        return place  # torch goes back to the start when all is written

    def write(self, data: Any, /) -> int:
        try:
            if self.problem is None:
                self._file.write(data)
        except OSError as problem:
            self.problem = problem
        return len(data)


def _write_torch(program: torch.export.ExportedProgram, path: Path) -> None:
    with path.open("wb") as file:
        remembering = _Remembering(file)
        torch.export.save(program, remembering)  # type: ignore[arg-type]
    if remembering.problem:
        raise remembering.problem


def _write_onnx(program: torch.export.ExportedProgram, path: Path) -> None:
    with _quiet():
        made = torch.onnx.export(
            program, dynamo=True, input_names=["images"], output_names=["logits"], verbose=False
        )
        assert made is not None
        made.save(str(path))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what exporters say of their own insides."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _card(
    clip: Clip, classes: Sequence[str], formats: Sequence[str], facts: Mapping[str, Any]
) -> str:
    size, calls = facts["size"], "\n\n".join(_CALLS[name] for name in formats)
    return f"""# An image classifier of {len(classes)} classes

Made by atlas from {clip.name}.

It takes RGB images as float32, (images, 3, {size}, {size}), with values in 0..1: the shorter side
resized to {size} ({facts["interpolation"]}), the centre cropped. Normalisation is part of it.
It gives logits, (images, classes); `labels.json` has the names of the classes in order.

{calls}
"""
