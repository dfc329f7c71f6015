"""Options of atlas itself and those that commands share: names, help and checks.

A check is a callback. app.py drops those of options that are not given: a default needs no check.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Collection
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atlas_cli import __version__
from atlas_cli.errors import UsageError

if TYPE_CHECKING:
    pass


# Options of atlas itself ----------------------------------------------------------------------


def _show_version(wanted: bool) -> None:
    if wanted:
        from atlas_cli.cli import console

        console.emit(f"atlas {__version__}")
        raise typer.Exit


def _show_script(shell: str | None) -> None:
    if shell:
        from atlas_cli.cli import completion, console

        console.emit(completion.script_of(shell).rstrip())
        raise typer.Exit


def _install_script(shell: str | None) -> None:
    if shell:
        from atlas_cli.cli import completion, console

        path, told = completion.install(shell)
        console.note(told)
        console.emit(path)
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True),
]
_SHELL: dict[str, Any] = {"metavar": "SHELL", "is_eager": True}
ShowCompletion = Annotated[
    str | None,
    typer.Option(
        help="Print the script that completes with Tab, for bash, zsh or fish.",
        callback=_show_script,
        **_SHELL,
    ),
]
InstallCompletion = Annotated[
    str | None,
    typer.Option(
        help="Write that script where bash, zsh or fish finds it.",
        callback=_install_script,
        **_SHELL,
    ),
]


# Options that commands share ------------------------------------------------------------------


def _check_device(device: str) -> str:
    """Raise UsageError for what is no name of a device; torch says later whether it is there."""
    from importlib.metadata import entry_points

    from atlas_cli.errors import nearest

    kind, colon, number = device.partition(":")
    known = ["auto", "cpu", "cuda", "mps", "xpu", "hpu", "mtia", "xla"]
    if "torch" in sys.modules or entry_points(group="torch.backends"):  # packages extend torch
        known.append(import_module("torch")._C._get_privateuse1_backend_name())
    if kind not in known or (colon and not number.isdecimal()) or device.startswith("auto:"):
        expected = "expected auto, cpu, cuda, cuda:N, mps, xpu or another that torch knows"
        hint = nearest(kind.replace("gpu", "cuda"), known)
        raise UsageError(f"--device {device}: {expected}{hint}")
    return device


def _check_split(split: str | None) -> str | None:
    from atlas_cli.datasets.dataset import SPLITS
    from atlas_cli.errors import nearest

    if split is not None and split not in SPLITS:
        raise UsageError(f"--split {split}: expected {', '.join(SPLITS)}{nearest(split, SPLITS)}")
    return split


def _check_templates(templates: list[str] | None) -> list[str]:
    from atlas_cli.datasets.dataset import check_templates

    return list(check_templates(templates or [], "--template"))


def _set_data_root(folder: Path | None) -> None:
    """Kinds of datasets look where ATLAS_DATA says, in this process and in those it starts."""
    if folder is not None:
        os.environ["ATLAS_DATA"] = str(folder)


def _set_download(wanted: bool) -> None:
    if wanted:
        os.environ["ATLAS_DOWNLOAD"] = "1"


def _check_precision(given: str) -> str:
    if given not in ("auto", "fp32", "bf16", "fp16"):
        raise UsageError(f"--precision {given}: expected auto, fp32, bf16 or fp16")
    return given


def _check_size(given: str | None) -> str | None:
    from atlas_cli.recipes.model import parse_bytes

    if given is not None and given != "0" and parse_bytes(given) is None:
        raise UsageError(f"--device-memory {given}: expected a size such as 8GB, or 0")
    return given


def _hide_downloads(quiet: bool) -> bool:
    """Libraries that download look here before they show how far they are."""
    if quiet:
        for name in ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
            os.environ[name] = "1"
        os.environ["TQDM_DISABLE"] = "1"
    return quiet


DataRoot = Annotated[
    Path | None,
    typer.Option(
        "--data-root",
        metavar="DIR",
        help="Where torchvision: finds its datasets; default ATLAS_DATA.",
        callback=_set_data_root,
        expose_value=False,
    ),
]
Download = Annotated[
    bool,
    typer.Option(
        "--download",
        help="Let torchvision: download what is not there.",
        callback=_set_download,
        expose_value=False,
    ),
]
Launch = Annotated[
    int | None,
    typer.Option(
        "--launch",
        metavar="N",
        help="Run in N processes, each with its share of every batch.",
        expose_value=False,  # app.py starts them before a command line is parsed
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="Nothing on stderr but errors.", callback=_hide_downloads),
]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Also say what was decided, and why.")
]
Seed = Annotated[
    int | None, typer.Option(help="Decides everything that is random; default 0.", min=0)
]
Device = Annotated[
    str,
    typer.Option(
        help="auto, cpu, cuda, cuda:N, mps, xpu, ...", metavar="DEVICE", callback=_check_device
    ),
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
    typer.Option(metavar="SPLIT", help="train, val or test alone.", callback=_check_split),
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
    int | None, typer.Option(min=0, help="Images decoded at once; 0 for none in the background.")
]
SkipBroken = Annotated[
    bool, typer.Option("--skip-broken", help="Leave out images that cannot be decoded.")
]
ShardVectors = Annotated[
    bool,
    typer.Option("--shard-vectors", help="Of several processes, each holds a part of the vectors."),
]
Precision = Annotated[
    str,
    typer.Option(
        metavar="HOW",
        help="Of passes: fp32, bf16, fp16, or auto: what the device is good at.",
        callback=_check_precision,
    ),
]
Compile = Annotated[
    bool, typer.Option("--compile", help="Compile the passes by torch.compile, where it can.")
]
DeviceMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="For vectors on a device; beyond it they stay on the host.",
        callback=_check_size,
    ),
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
KeepDownloads = Annotated[
    bool, typer.Option("--keep-downloads", help="Keep models whose vectors were extracted.")
]


def _option(kind: Any, *names: str, **more: Any) -> Any:
    return Annotated[kind | None, typer.Option(*names, **more)]


# The keys of recipes, which say what each is for: see help.py.
_FLAGS: dict[str, Any] = {
    "model": _option(str, "--model", metavar="BASE"),
    "vectors": _option(list[str], "--vectors", "--vector", "--pool", metavar="VECTOR..."),
    "exclude": _option(list[str], "--exclude", metavar="NAME..."),
    "storage": _option(str, "--storage", metavar="DTYPE"),
    "shots": _option(str, "--shots", metavar="K"),
    "split": Split,
    "templates": Templates,
    "method": _option(str, "--method", metavar="HOW"),
    "select": _option(str, "--select", metavar="HOW"),
    "granularity": _option(str, "--granularity", metavar="WHAT"),
    "epochs": _option(int, "--epochs"),
    "lr": _option(float, "--lr"),
    "batch_size": _option(int, "--batch-size"),
    "augment": _option(str, "--augment", metavar="HOW"),
    "seed": Seed,
    "groups": _option(list[str], "--group", metavar="REGEX"),
    "schedule": _option(str, "--schedule", metavar="HOW"),
    "weight_decay": _option(float, "--weight-decay"),
    "accumulate": _option(int, "--accumulate"),
    "min_steps": _option(int, "--min-steps"),
    "clip": _option(float, "--clip"),
    "penalty": _option(str, "--penalty", metavar="NORM"),
    "linearised": Annotated[bool, typer.Option("--linearised")],
    "memory": _option(str, "--memory", metavar="SIZE"),
    "arch": Architecture,
    "text": TextModel,
}
_RUN_OPTIONS: dict[str, Any] = {
    "folder": _option(Path, "--output", "-o", metavar="DIR", help="Folder of the run."),
    "resume": Annotated[bool, typer.Option("--resume", help="Go on with the run in -o DIR.")],
    "force": Force,
    "threads": _option(int, "--threads", min=1, help="Cores to use; default all."),
    "device": Device,
    "workers": Workers,
    "skip_broken": SkipBroken,
    "shard_vectors": ShardVectors,
    "precision": Precision,
    "device_memory": DeviceMemory,
    "compile": Compile,
    "keep_downloads": KeepDownloads,
    "log": _option(
        list[str],
        "--log",
        metavar="TRACKER",
        help="tensorboard or wandb, beside metrics.jsonl in -o DIR (extras of these names).",
    ),
    "as_json": AsJson,
    "quiet": Quiet,
    "verbose": Verbose,
}
# Their callbacks do it all, or app.py does.
_ACCESS: dict[str, Any] = {"launch": Launch, "data_root": DataRoot, "download": Download}
_DEFAULTS: dict[str, Any] = {"device": "auto", "precision": "auto"}
_SWITCHES = {"linearised", "resume", "force", "download", "keep_downloads", "as_json", "quiet"}
_SWITCHES |= {"verbose", "skip_broken", "shard_vectors", "compile"}


def learning_command(
    function: Callable[..., None], without: Collection[str] = ()
) -> Callable[..., None]:
    """The command with the options of learning, `without` some, beside its own.

    It is called with them as keywords, which `console.learning_options` tells apart.
    """
    own = [
        one
        for one in inspect.signature(function, eval_str=True).parameters.values()
        if one.kind != inspect.Parameter.VAR_KEYWORD
    ]
    kinds = {**_FLAGS, **_RUN_OPTIONS, **_ACCESS}
    shared = [_parameter(name, kind) for name, kind in kinds.items() if name not in without]
    parameters = [*own, *shared]
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {one.name: one.annotation for one in parameters}
    return function


def _parameter(name: str, kind: Any) -> inspect.Parameter:
    default = False if name in _SWITCHES else _DEFAULTS.get(name)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
