"""Which images are held out of training to score what was learned. They are held out by class."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from atlas_cli.datasets.pixels import Pixels
from atlas_cli.errors import DataError
from atlas_cli.learning.batches import generator_of

_HELD_OUT = 4  # one image in so many of a class
_TENTH, _MOST = 0.1, 5000  # of all images, where there are many of them


def check_divisible(tasks: Sequence[Pixels], select: str) -> None:
    """Raise DataError if a class has one image only, which cannot be held out."""
    for pixels in tasks:
        if min(map(len, _by_class(pixels, 0))) < 2:
            raise DataError(
                f"{pixels.dataset.name}: --select {select} needs two images of every class or "
                "more; use --select last, or val:DATA"
            )


def hold_out_quarter(tasks: Sequence[Pixels], seed: int) -> list[list[int]]:
    """For each task one image in four of every class, but one at least."""
    return [
        [index for some in _by_class(pixels, seed) for index in some[: _quarter(some)]]
        for pixels in tasks
    ]


def _quarter(members: Sequence[int]) -> int:
    return max(1, len(members) // _HELD_OUT)


def hold_out_folds(tasks: Sequence[Pixels], seed: int, most: int) -> list[list[list[int]]]:
    """For each fold, and in it for each task, the images that it holds out: each image once.

    Every fold holds out images of every class, so there are as many folds as the smallest class
    has images, but not more than `most`. There are none if a class has one image.
    """
    classes = [_by_class(pixels, seed) for pixels in tasks]
    folds = min(most, min(len(some) for each in classes for some in each))
    return [
        [[index for some in each for index in some[fold::folds]] for each in classes]
        for fold in range(folds if folds > 1 else 0)
    ]


def hold_out(pixels: Pixels, seed: int) -> tuple[int, ...]:
    """A tenth of every class, but one image at least of every class that has two, and 5000 in all.

    None if every class has one image only.
    """
    classes = _by_class(pixels, seed)
    share = min(_TENTH, _MOST / len(pixels.dataset.samples))
    held = [some[: max(1, int(share * len(some)))] for some in classes if len(some) > 1]
    return tuple(sorted(index for some in held for index in some))


def _by_class(pixels: Pixels, seed: int) -> list[list[int]]:
    """The images of every class, shuffled."""
    found: dict[int, list[int]] = {}
    for index, label in enumerate(pixels.labels.tolist()):
        found.setdefault(label, []).append(index)
    random = generator_of(seed, "folds")
    return [
        [members[place] for place in torch.randperm(len(members), generator=random).tolist()]
        for _, members in sorted(found.items())
    ]
