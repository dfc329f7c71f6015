"""atlas finetune: train an image tower on a task, and write its task vector."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from atlas_cli import __version__
from atlas_cli.cli import console
from atlas_cli.cli.console import ConsoleListener, given_recipe, learning_options
from atlas_cli.cli.options import learning_command

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
    "exclude",
    "storage",
    "keep_downloads",
    "shard_vectors",
    "device_memory",
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
    **shared: Any,
) -> None:
    """Train the image tower on each task with its zero-shot head frozen, and write its task vector.

    Epochs are those of the published task vectors by the name of the data, else 10. The last step
    is kept, or with --select best the best epoch on the val split; where there is none, on images
    held out for that.

    \b
    Example:
      atlas finetune builtin:signs --model builtin:tiny --steps 20 --lr 0.001 \\
        -o signs --vector signs.safetensors
    """
    from atlas_cli.recipes.finetune import FinetuneRecipe
    from atlas_cli.recipes.model import UNIT

    own = {
        "tune": tune,
        "lora": lora,
        "steps": steps,
        "warmup": warmup,
        "checkpoint_activations": checkpoint_activations,
    }
    flags, options, output = learning_options(shared, own)
    recipe = given_recipe(FinetuneRecipe, data, flags)
    from atlas_cli.learning.finetune import VectorOutput
    from atlas_cli.learning.finetune import finetune as run

    vectors = VectorOutput(vector, vectors_dir)
    with ConsoleListener(output) as listener:
        result = run(recipe, options, vectors=vectors, on_event=listener, stop=listener.stop)
    listener.note(*result.notes)
    if output.as_json and result.tasks:
        runs = [dataclasses.asdict(task) for task in result.tasks]
        console.emit({"atlas": __version__, "unit": UNIT, "runs": runs}, as_json=True)
    if result.stopped:
        raise typer.Exit(130)
