"""atlas extract: write task vectors, fine-tuned minus base."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from atlas_cli.commands.options import AllowGlobals, Architecture, AsJson, Force, Quiet
from atlas_cli.errors import UsageError, nearest

SCOPES = ("visual", "text", "all")
DTYPES = ("fp32", "fp16", "bf16", "int8")


def _one_of(choices: Sequence[str], option: str, value: str) -> str:
    if value not in choices:
        listed = ", ".join(choices)
        raise UsageError(f"{option} {value}: expected {listed}{nearest(value, choices)}")
    return value


BaseModel = Annotated[str, typer.Argument(metavar="BASE", help="The model before fine-tuning.")]
Finetuned = Annotated[
    list[str],
    typer.Argument(metavar="FINETUNED...", help="Models, LoRA adapters, or vectors to rewrite."),
]
Output = Annotated[
    str,
    typer.Option(
        *("--output", "-o"),
        metavar="FILE",
        help="A .safetensors file, a folder for several, or - for stdout.",
    ),
]
Scope = Annotated[
    str,
    typer.Option(
        metavar="SCOPE",
        help="visual, text or all.",
        callback=lambda value: _one_of(SCOPES, "--scope", value),
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        metavar="DTYPE",
        help="fp32 loses nothing; fp16, bf16, or int8 with a scale for each row.",
        callback=lambda value: _one_of(DTYPES, "--dtype", value),
    ),
]
Rank = Annotated[int | None, typer.Option(min=1, help="Keep matrices as factors of this rank.")]
Energy = Annotated[
    float | None, typer.Option(help="Or of the rank that holds this share of the energy, as 0.99.")
]
Scale = Annotated[float, typer.Option(help="Multiply the vector; -1 negates it.")]
Ignore = Annotated[
    list[str] | None,
    typer.Option("--ignore", metavar="REGEX", help="Tensors that may be missing or not fit."),
]
Name = Annotated[
    str | None, typer.Option(metavar="NAME", help="What the vector is called; else by the model.")
]


def extract(
    base: BaseModel,
    finetuned: Finetuned,
    path: Output,
    scope: Scope = "visual",
    dtype: Dtype = "fp32",
    rank: Rank = None,
    energy: Energy = None,
    scale: Scale = 1.0,
    ignore: Ignore = None,
    allow_global: AllowGlobals = None,
    arch: Architecture = None,
    name: Name = None,
    force: Force = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Write the task vector of each fine-tuned model: its weights minus those of the base.

    Example: atlas extract ViT-B-32/openai cars/finetuned.pt -o cars.safetensors --dtype fp16
    """
    from atlas_cli.commands.extracting import Request, run

    run(
        Request(base, finetuned, path, scope, dtype, rank, energy, scale, ignore or [], name),
        allow_global or [],
        arch,
        force=force,
        as_json=as_json,
        quiet=quiet,
    )
