"""atlas draw: write a built-in task, or any other labelled data, as a folder of images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from atlas_cli.cli import console
from atlas_cli.cli.console import progress
from atlas_cli.cli.options import (
    AsJson,
    DataRoot,
    Download,
    OutputFolder,
    Quiet,
    Seed,
    Shots,
    SkipBroken,
    Split,
    Workers,
)

if TYPE_CHECKING:
    from atlas_cli.datasets.dataset import Dataset

Data = Annotated[str, typer.Argument(metavar="DATA", help="A built-in task, or any labelled data.")]


def draw(
    data: Data,
    folder: OutputFolder,
    shots: Shots = None,
    split: Split = None,
    data_root: DataRoot = None,
    download: Download = False,
    workers: Workers = None,
    skip_broken: SkipBroken = False,
    seed: Seed = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Write data as train/, val/ and test/ folders of PNG files, or one --split of it.

    --shots is for training; validation and test stay whole. --workers is for --skip-broken, which
    looks at every image before any is written.

    \b
    Example:
      atlas draw builtin:digits -o digits --shots 4
    """
    datasets = _open(data, split, shots, seed or 0)

    from atlas_cli.datasets.broken import without_broken
    from atlas_cli.datasets.export import write_folder  # numpy is slow to import

    if skip_broken:
        datasets = [*without_broken(datasets, workers, console.warner(quiet=quiet))]
    with progress("drawing", sum(len(d.samples) for d in datasets), quiet=quiet) as advance:
        result = write_folder(datasets, folder, advance)
    console.emit(result, as_json=as_json)


def _open(data: str, split: str | None, shots: int | None, seed: int) -> list[Dataset]:
    """Every split that there is, or the one that is asked for."""
    from atlas_cli.datasets.dataset import SPLITS, expand_references, has_split, open_dataset
    from atlas_cli.errors import DataError, UsageError

    (*several, name) = expand_references([data])
    if several:
        raise UsageError(f"{data}: stands for {len(several) + 1} tasks; draw them one by one")
    wanted: list[str | None] = [split]
    if split is None:
        wanted = [one for one in SPLITS if has_split(name, one)] or [None]
    datasets = [
        open_dataset(name, split=one, shots=shots if one in ("train", None) else None, seed=seed)
        for one in wanted
    ]
    if not all(dataset.labelled and dataset.classes for dataset in datasets):
        raise DataError(f"{data}: has no labels to name folders by")
    return datasets
