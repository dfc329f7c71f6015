"""atlas finetune: train an image tower on a task, and write its task vector."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from atlas_cli.commands.learning_options import Wishes, given_flags, learning_command

Data = Annotated[
    list[str], typer.Argument(metavar="DATA...", help="Labelled images, or a recipe (.yaml, -).")
]
Vector = Annotated[
    Path | None, typer.Option("--vector", metavar="FILE", help="Write the task vector, too.")
]
VectorsFolder = Annotated[
    Path | None,
    typer.Option("--vectors-dir", metavar="DIR", help="Write DIR/NAME.safetensors of each task."),
]
Tune = Annotated[
    str | None, typer.Option(metavar="WHAT", help="all (default), layernorm or projection.")
]
Lora = Annotated[
    int | None, typer.Option(metavar="R", help="Train a LoRA adapter of rank R (extra: lora).")
]
Steps = Annotated[int | None, typer.Option(help="Steps in all, instead of --epochs.")]
Warmup = Annotated[
    int | None, typer.Option(help="Steps while the rate rises; 500, but a tenth at most.")
]
CheckpointActivations = Annotated[
    bool,
    typer.Option(
        "--checkpoint-activations", help="Compute activations twice instead of keeping them."
    ),
]
_COEFFICIENTS_ONLY = (
    "vectors",
    "method",
    "granularity",
    "groups",
    "min_steps",
    "penalty",
    "memory",
)


@partial(learning_command, without=_COEFFICIENTS_ONLY)
def finetune(
    data: Data,
    vector: Vector = None,
    vectors_dir: VectorsFolder = None,
    tune: Tune = None,
    lora: Lora = None,
    steps: Steps = None,
    warmup: Warmup = None,
    checkpoint_activations: CheckpointActivations = False,
    *,
    flags: dict[str, Any],
    wishes: Wishes,
) -> None:
    """Train the image tower on each task with its zero-shot head frozen; print what was written.

    --select is last (default) or best: the epoch with the best accuracy on the val split, or on
    images held out. --augment is slight (default: crops of nine tenths or more), flip, crop or
    none. Epochs are those of the published task vectors by the name of the data, else 10.

    Example: atlas finetune cars/ --model ViT-B-32/openai -o run --vector cars.safetensors
    """
    from atlas_cli.commands.finetuning import Wanted, run

    own = {
        "tune": tune,
        "lora": lora,
        "steps": steps,
        "warmup": warmup,
        "checkpoint_activations": checkpoint_activations,
    }
    run(data, {**flags, **given_flags(own)}, Wanted(vector, vectors_dir), wishes)
