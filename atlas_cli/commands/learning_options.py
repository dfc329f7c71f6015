"""The options that every learning command has, declared once and added to each."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

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


def _option(kind: Any, *names: str, **more: Any) -> Any:
    return Annotated[kind | None, typer.Option(*names, **more)]


_FLAGS: dict[str, Any] = {
    "model": _option(str, "--model", metavar="BASE", help="The base model."),
    "vectors": _option(
        list[str],
        "--vectors",
        "--vector",
        metavar="FILE...",
        help="Task vectors, or folders of them.",
    ),
    "shots": _option(
        str, "--shots", metavar="K", help="Images per class, a fraction, or all (default)."
    ),
    "method": _option(
        str,
        "--method",
        metavar="HOW",
        help="learned (default), or search: the best single scale; for add also isotropic.",
    ),
    "select": _option(str, "--select", metavar="HOW", help="What decides which epoch is kept."),
    "granularity": _option(
        str, "--granularity", metavar="WHAT", help="block (default), vector, qkv or partition:K."
    ),
    "groups": _option(
        list[str], "--group", metavar="REGEX", help="Blocks that share a coefficient, by name."
    ),
    "epochs": _option(int, "--epochs", help="Passes over the images."),
    "lr": _option(float, "--lr", help="Learning rate."),
    "schedule": _option(str, "--schedule", metavar="HOW", help="cosine or constant."),
    "weight_decay": _option(float, "--weight-decay", help="AdamW's weight decay."),
    "batch_size": _option(int, "--batch-size", help="Images per step; 128."),
    "accumulate": _option(int, "--accumulate", help="Parts of a batch; 1."),
    "min_steps": _option(int, "--min-steps", help="Steps per epoch, at least; 10."),
    "clip": _option(float, "--clip", help="Largest norm of a gradient; 1."),
    "penalty": _option(
        str, "--penalty", metavar="NORM", help="l1:WEIGHT or l2:WEIGHT on coefficients."
    ),
    "augment": _option(
        str,
        "--augment",
        metavar="HOW",
        help="flip (crops and mirror images), crop or none.",
    ),
    "linearised": Annotated[
        bool, typer.Option("--linearised", help="First-order Taylor expansion at the base.")
    ],
    "memory": _option(
        str, "--memory", metavar="SIZE", help="Budget for the vectors; default 2GiB."
    ),
    "split": Split,
    "templates": Templates,
    "arch": Architecture,
    "text": TextModel,
    "seed": Seed,
}
_WISHES: dict[str, Any] = {
    "folder": _option(Path, "--output", "-o", metavar="DIR", help="Folder of the run."),
    "resume": Annotated[bool, typer.Option("--resume", help="Go on with the run in -o DIR.")],
    "force": Force,
    "threads": _option(int, "--threads", min=1, help="Cores to use; default all."),
    "device": Device,
    "as_json": AsJson,
    "quiet": Quiet,
}
_DEFAULTS: dict[str, Any] = {"device": "auto"}
_SWITCHES = {"linearised", "resume", "force", "as_json", "quiet"}


@dataclass(frozen=True)
class Wishes:
    """What concerns this run only and does not change its result."""

    folder: Path | None = None
    resume: bool = False
    force: bool = False
    threads: int | None = None
    device: str = "auto"
    as_json: bool = False
    quiet: bool = False


def learning_command(
    function: Callable[..., None], without: Collection[str] = ()
) -> Callable[..., None]:
    """The command with the options of learning, `without` some, beside its own.

    `function` is called with its own options, and with `flags`, the keys of a recipe that were
    given, and `wishes`.
    """
    own = {
        name: parameter
        for name, parameter in inspect.signature(function, eval_str=True).parameters.items()
        if name not in ("flags", "wishes")
    }
    offered = [name for name in _FLAGS if name not in without]
    kinds = {**{name: _FLAGS[name] for name in offered}, **_WISHES}
    shared = {name: _parameter(name, kind) for name, kind in kinds.items()}

    def command(**given: Any) -> None:
        wishes = Wishes(**{name: given.pop(name) for name in _WISHES})
        flags = given_flags({name: given.pop(name) for name in offered})
        function(**given, flags=flags, wishes=wishes)

    parameters = {**own, **shared}
    command.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    command.__annotations__ = {name: p.annotation for name, p in parameters.items()}
    command.__doc__ = function.__doc__
    command.__name__ = function.__name__
    return command


def _parameter(name: str, kind: Any) -> inspect.Parameter:
    default = False if name in _SWITCHES else _DEFAULTS.get(name)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def given_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The flags that were given: a switch that is off and an empty list were not."""
    return {k: v for k, v in flags.items() if v is not None and v is not False and v != []}
