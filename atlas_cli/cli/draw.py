"""atlas draw: write a built-in task as a folder of images."""

from __future__ import annotations

from typing import Annotated

import typer

from atlas_cli.cli import console
from atlas_cli.cli.options import AsJson, OutputFolder, Quiet, Seed, Shots

Task = Annotated[str, typer.Argument(metavar="builtin:NAME", help="A built-in task.")]


def draw(
    task: Task,
    folder: OutputFolder,
    shots: Shots = None,
    seed: Seed = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Write a built-in task as train/, val/ and test/ folders of PNG files.

    \b
    Example:
      atlas draw builtin:digits -o digits --shots 4
    """
    from atlas_cli.datasets import builtin
    from atlas_cli.datasets.dataset import SPLITS, few_shot, open_dataset
    from atlas_cli.errors import UsageError

    if not task.startswith("builtin:") or task == "builtin:all":
        known = ", ".join(f"builtin:{name}" for name in builtin.TASKS)
        raise UsageError(f"'{task}' is no built-in task ({known})")
    datasets = [open_dataset(task, split=split) for split in SPLITS]
    if shots:  # for training; validation and test stay whole
        datasets[0] = few_shot(datasets[0], shots, seed or 0)

    from atlas_cli.datasets.export import write_folder  # numpy is slow to import

    with console.progress("drawing", sum(len(d.samples) for d in datasets), quiet=quiet) as advance:
        result = write_folder(datasets, folder, advance)
    console.emit(result, as_json=as_json)
