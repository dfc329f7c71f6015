"""atlas fit: learn block coefficients from a few images per class."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atlas_cli.commands.options import (
    Architecture,
    AsJson,
    Device,
    Force,
    Quiet,
    Seed,
    Split,
    Templates,
    TextModel,
)

Data = Annotated[
    str, typer.Argument(metavar="DATA", help="Images, or a recipe (.yaml, - for stdin).")
]

Model = Annotated[str | None, typer.Option("--model", metavar="BASE", help="The base model.")]
Vectors = Annotated[
    list[str] | None,
    typer.Option("--vectors", metavar="FILE...", help="Task vectors, or folders of them."),
]
Folder = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="DIR", help="Folder of the run.")
]
Shots = Annotated[
    str | None,
    typer.Option("--shots", metavar="K", help="Images per class, a fraction, or all (default)."),
]
Select = Annotated[
    str | None,
    typer.Option(metavar="HOW", help="last (default), holdout, kfold or val:DATA."),
]
Granularity = Annotated[
    str | None,
    typer.Option(metavar="WHAT", help="block (default), vector, qkv or partition:K."),
]
Groups = Annotated[
    list[str] | None,
    typer.Option("--group", metavar="REGEX", help="Blocks that share a coefficient, by name."),
]
Penalty = Annotated[
    str | None, typer.Option(metavar="NORM", help="l1:WEIGHT or l2:WEIGHT on coefficients.")
]
Memory = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Budget for the vectors; default 2GiB.")
]
Augment = Annotated[
    str | None,
    typer.Option(metavar="HOW", help="flip (crops and mirror images; default), crop or none."),
]
Linearised = Annotated[
    bool, typer.Option("--linearised", help="First-order Taylor expansion at the base.")
]
AllowTarget = Annotated[
    bool, typer.Option("--allow-target", help="Take vectors learned on the target itself, too.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in -o DIR.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Cores to use; default all.")]


def fit(
    data: Data,
    model: Model = None,
    vectors: Vectors = None,
    output: Folder = None,
    shots: Shots = None,
    select: Select = None,
    granularity: Granularity = None,
    group: Groups = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the images; 10.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate; 0.1.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="AdamW's weight decay; 0.1.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Images per step; 128.")] = None,
    accumulate: Annotated[int | None, typer.Option(help="Parts of a batch; 1.")] = None,
    min_steps: Annotated[int | None, typer.Option(help="Steps per epoch, at least; 10.")] = None,
    clip: Annotated[float | None, typer.Option(help="Largest norm of a gradient; 1.")] = None,
    penalty: Penalty = None,
    augment: Augment = None,
    linearised: Linearised = False,
    memory: Memory = None,
    allow_target: AllowTarget = False,
    split: Split = None,
    template: Templates = None,
    arch: Architecture = None,
    text: TextModel = None,
    resume: Resume = False,
    force: Force = False,
    threads: Threads = None,
    device: Device = "auto",
    seed: Seed = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Learn a coefficient for every block of every task vector, and print the learned recipe.

    Example: atlas fit shots/ --model ViT-B-32/openai --vectors v/*.safetensors -o run
    """
    from atlas_cli.commands.fitting import Wishes, run

    flags = {
        "model": model,
        "vectors": vectors,
        "shots": shots,
        "select": select,
        "granularity": granularity,
        "groups": group,
        "epochs": epochs,
        "lr": lr,
        "weight_decay": weight_decay,
        "batch_size": batch_size,
        "accumulate": accumulate,
        "min_steps": min_steps,
        "clip": clip,
        "penalty": penalty,
        "augment": augment,
        "linearised": linearised or None,
        "memory": memory,
        "allow_target": allow_target or None,
        "split": split,
        "templates": template or None,
        "arch": arch,
        "text": text,
        "seed": seed,
    }
    wishes = Wishes(output, resume, force, threads, device, as_json, quiet)
    run(data, flags, wishes)
