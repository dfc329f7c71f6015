"""Samples -> batches of preprocessed images, decoded by worker processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from PIL import Image
from torch.utils.data import DataLoader

from atlas_cli.data import Dataset
from atlas_cli.errors import DataError
from atlas_cli.images import load

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
