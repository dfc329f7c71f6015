"""Images that cannot be decoded, found and left out before anything is learned from the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from atlas_cli.datasets.dataset import Dataset, Sample, load
from atlas_cli.errors import DataError

_AT_ONCE = 4


def without_broken(
    datasets: Iterable[Dataset], workers: int | None, warn: Callable[[str], None]
) -> tuple[Dataset, ...]:
    """The datasets without images that cannot be decoded; each of those is a warning.

    Every image is decoded once more than learning alone would: what is left out must be known
    before images are hashed, held out and dealt in batches. Raises DataError if none is left.
    """
    return tuple(_screened(dataset, workers, warn) for dataset in datasets)


def _screened(dataset: Dataset, workers: int | None, warn: Callable[[str], None]) -> Dataset:
    def problem_of(sample: Sample) -> str | None:
        try:
            load(dataset, sample)
        except DataError as problem:
            return str(problem)
        return None

    kept = []
    with ThreadPoolExecutor(_AT_ONCE if workers is None else max(workers, 1)) as pool:
        found = pool.map(problem_of, dataset.samples)
        for sample, problem in zip(dataset.samples, found, strict=True):
            if problem is None:
                kept.append(sample)
            else:
                warn(f"{problem} (left out)")
    if dataset.samples and not kept:
        raise DataError(
            f"{dataset.name}: none of its {len(dataset.samples)} images could be decoded"
        )
    return replace(dataset, samples=tuple(kept))
