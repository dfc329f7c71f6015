"""Options that several commands share, each declared once."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand


class VariadicCommand(TyperCommand):
    """A command whose repeatable options take any number of values: `--data A B C`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse after writing `--data A B` as `--data A --data B`."""
        repeatable = {n for p in self.params if getattr(p, "multiple", False) for n in p.opts}
        return list(super().parse_args(ctx, spread(args, repeatable)))


def spread(arguments: Iterable[str], repeatable: set[str]) -> list[str]:
    """Repeat an option before each of its values; another option, or --, ends them."""
    spelt: list[str] = []
    current, taken = "", 0
    for argument in arguments:
        if argument.startswith("-") and argument != "-":
            current, taken = (argument if argument in repeatable else ""), 0
            spelt.append(argument)
        else:
            spelt += [current, argument] if current and taken else [argument]
            taken += 1
    return spelt


def _check_device(device: str) -> str:
    from atlas_cli.errors import UsageError, nearest

    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", device):
        hint = nearest(device, ["auto", "cpu", "cuda", "mps"])
        raise UsageError(f"--device {device}: expected auto, cpu, cuda, cuda:N or mps{hint}")
    return device


def _check_split(split: str | None) -> str | None:
    from atlas_cli.data import SPLITS
    from atlas_cli.errors import UsageError, nearest

    if split is not None and split not in SPLITS:
        raise UsageError(f"--split {split}: expected {', '.join(SPLITS)}{nearest(split, SPLITS)}")
    return split


def _check_templates(templates: list[str] | None) -> list[str]:
    from atlas_cli.data import check_templates

    return list(check_templates(templates or [], "--template"))


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no notes on stderr.")]
Seed = Annotated[
    int | None, typer.Option(help="Decides everything that is random; default 0.", min=0)
]
Device = Annotated[
    str,
    typer.Option(help="auto, cpu, cuda, cuda:N or mps.", metavar="DEVICE", callback=_check_device),
]
Architecture = Annotated[
    str | None,
    typer.Option("--arch", metavar="NAME", help="open_clip architecture of a bare weight file."),
]
TextModel = Annotated[
    str | None,
    typer.Option("--text", metavar="MODEL", help="Model whose text tower an image tower takes."),
]
Split = Annotated[
    str | None,
    typer.Option(metavar="SPLIT", help="train, val or test; default test.", callback=_check_split),
]
Templates = Annotated[
    list[str] | None,
    typer.Option(
        "--template",
        metavar="TEXT",
        help="Prompt with {} for the class name, instead of the data's own.",
        callback=_check_templates,
    ),
]
Shots = Annotated[
    int | None, typer.Option(min=1, help="Take this many images per class, drawn by the seed.")
]
BatchSize = Annotated[
    int | None, typer.Option(min=1, help="Images at once; smaller by itself if memory ends.")
]
Workers = Annotated[
    int | None, typer.Option(min=0, help="Processes that decode images; 0 for none.")
]
SkipBroken = Annotated[
    bool, typer.Option("--skip-broken", help="Leave out images that cannot be decoded.")
]
OutputFolder = Annotated[
    Path, typer.Option("--output", "-o", metavar="DIR", help="Folder to write; must not exist.")
]
PlotFile = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        metavar="FILE",
        help="Draw .png, .svg, .html or .pdf (extra: plot).",
    ),
]
AllowGlobals = Annotated[
    list[str] | None,
    typer.Option("--allow-global", metavar="NAME", help="Names a pickle may hold; never called."),
]
Force = Annotated[bool, typer.Option("--force", help="Replace a file that exists.")]
