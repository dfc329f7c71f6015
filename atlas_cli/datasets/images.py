"""Samples -> batches of preprocessed images, decoded by worker processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image, ImageOps
from torch.utils.data import DataLoader

from atlas_cli.datasets import builtin
from atlas_cli.datasets.dataset import Dataset, Sample
from atlas_cli.errors import DataError


def load(dataset: Dataset, sample: Sample) -> Image.Image:
    """The image of a sample in RGB. Raises DataError that names a file that cannot be decoded."""
    if dataset.drawn:
        task, split, index = dataset.drawn, dataset.split, int(sample.key)
        return Image.fromarray(builtin.draw(task, split, index))
    return decode(dataset.root / sample.key)


def decode(path: Path) -> Image.Image:
    """Read a file as RGB: EXIF rotation applied, transparency laid on white, 16 bits made 8."""
    try:
        with Image.open(path) as image:
            image.load()
            return _to_rgb(ImageOps.exif_transpose(image))
    except FileNotFoundError as problem:
        raise DataError(f"{path}: no such image") from problem
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as problem:
        raise DataError(f"{path}: cannot be decoded: {_first_line(problem)}") from problem


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16-bit grey, which convert() would clip rather than scale
        return image.convert("I").point(lambda value: value * (1 / 257)).convert("L").convert("RGB")
    if image.mode == "F":
        raise ValueError("floating-point pixels have no defined range; save it with 8 or 16 bits")
    if image.has_transparency_data:
        page = image.convert("RGBA")
        white = Image.new("RGBA", page.size, "white")
        return Image.alpha_composite(white, page).convert("RGB")
    return image.convert("RGB")


def _first_line(problem: Exception) -> str:
    return (str(problem).splitlines() or [type(problem).__name__])[0]


Preprocess = Callable[[Image.Image], torch.Tensor]
_FEW = 64  # below this many images, starting a worker costs more than it saves


@dataclass(frozen=True)
class Batch:
    """Images and their positions in the dataset; `broken` holds what could not be decoded."""

    images: torch.Tensor
    indices: list[int]
    broken: list[str]


@dataclass(frozen=True)
class _Images:
    """What a worker process needs to decode one image. A broken one becomes its message."""

    dataset: Dataset
    preprocess: Preprocess

    def __len__(self) -> int:
        return len(self.dataset.samples)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor | str]:
        try:
            return index, self.preprocess(load(self.dataset, self.dataset.samples[index]))
        except DataError as problem:
            return index, str(problem)


def batches(
    dataset: Dataset,
    preprocess: Preprocess,
    *,
    size: int,
    workers: int | None = None,
    skip_broken: bool = False,
) -> Iterator[Batch]:
    """The images in order. Raises DataError for the first broken one unless `skip_broken`."""
    if workers is None:
        workers = min(os.cpu_count() or 1, 8) if len(dataset.samples) > _FEW else 0
    loader: DataLoader[Batch] = DataLoader(
        _Images(dataset, preprocess),  # type: ignore[arg-type]
        batch_size=size,
        num_workers=workers,
        collate_fn=_collate,
    )
    for batch in loader:
        if batch.broken and not skip_broken:
            raise DataError(f"{batch.broken[0]} (--skip-broken leaves such images out)")
        yield batch


def _collate(items: list[tuple[int, torch.Tensor | str]]) -> Batch:
    good = [(index, image) for index, image in items if isinstance(image, torch.Tensor)]
    images = torch.stack([image for _, image in good]) if good else torch.empty(0)
    broken = [image for _, image in items if isinstance(image, str)]
    return Batch(images, [index for index, _ in good], broken)
