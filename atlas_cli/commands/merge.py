"""atlas merge: merge models, or add task vectors to a base, by a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atlas_cli.commands.options import AsJson, Device, Quiet

RecipeFile = Annotated[
    str | None, typer.Argument(metavar="RECIPE", help="YAML recipe, or - for stdin.")
]
Folder = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="DIR", help="Folder of the model.")
]
Force = Annotated[
    bool, typer.Option("--force", help="Replace a folder that atlas merge has written.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the plan and write nothing.")]
Explain = Annotated[
    str | None,
    typer.Option(metavar="REGEX", help="With --dry-run: parameters of the tensors named so."),
]
Memory = Annotated[
    str, typer.Option(metavar="SIZE", help="Memory to use, whatever the size of the model.")
]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads; default all cores, up to 8.")]
ShardSize = Annotated[str, typer.Option(metavar="SIZE", help="Begin another file beyond it.")]
Schema = Annotated[
    bool, typer.Option("--schema", help="Print the JSON Schema of recipes, for editors.")
]
Push = Annotated[
    str | None, typer.Option(metavar="OWNER/NAME", help="Upload the model to the Hub, too.")
]
EvaluationFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="What atlas eval --json found, for the card.")
]
AllowNonfinite = Annotated[
    bool, typer.Option("--allow-nonfinite", help="Merge NaN and Inf instead of stopping.")
]


def merge(
    recipe: RecipeFile = None,
    output: Folder = None,
    force: Force = False,
    dry_run: DryRun = False,
    explain: Explain = None,
    memory: Memory = "512MB",
    threads: Threads = None,
    device: Device = "cpu",
    max_shard_size: ShardSize = "5GB",
    schema: Schema = False,
    evaluation: EvaluationFile = None,
    push: Push = None,
    allow_nonfinite: AllowNonfinite = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Merge models by a recipe and print the path of the result.

    Example: atlas merge recipes/merge/linear.yaml -o merged
    """
    from atlas_cli.commands.merging import Wishes, run, show_schema

    if schema:
        show_schema()
        return
    wishes = Wishes(
        *(output, force, dry_run, explain, memory, threads, device, max_shard_size),
        *(evaluation, push, allow_nonfinite, as_json, quiet),
    )
    run(recipe, wishes)
