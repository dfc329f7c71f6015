"""Options of atlas itself and those that commands share, and how a command reads its arguments."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperArgument, TyperCommand

from atlas_cli import __version__
from atlas_cli.cli import console
from atlas_cli.cli.console import OutputOptions
from atlas_cli.errors import UsageError

if TYPE_CHECKING:
    from atlas_cli.recipes.model import AnyRecipe


class SpreadingCommand(TyperCommand):
    """A command whose repeatable options take any number of values: `--data A B C`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse after writing `--data A B` as `--data A --data B`.

        Where that leaves a required argument without a value, the last value is the argument's.
        """
        repeatable = {n for p in self.params if getattr(p, "multiple", False) for n in p.opts}
        spelt = spread(args, repeatable)
        argument = next((p for p in self.params if isinstance(p, TyperArgument)), None)
        if argument and not {*ctx.help_option_names, "--online"} & set(args):
            taking = {n for p in self.params for n in p.opts if not getattr(p, "is_flag", False)}
            if found := handed_back(spelt, repeatable, taking):
                spelt, value = found
                name = (argument.metavar or "").rstrip(".")
                console.note(f"'{value}' is taken for {name}, which is missing")
        return list(super().parse_args(ctx, spelt))


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


def handed_back(
    spelt: Sequence[str], repeatable: set[str], taking: set[str]
) -> tuple[list[str], str] | None:
    """The arguments with the last value of a repeatable option as one of no option, and the value.

    None if there is such an argument already, or no option has two values. A value that is a
    file of weights is not taken for data. `taking` are the options that take a value.
    """
    last = None
    number = 0
    while number < len(spelt):
        one = spelt[number]
        if not one.startswith("-") or one in ("-", "--"):
            return None
        if one in taking:
            before = spelt[number - 2] if number > 1 else ""
            if one in repeatable and before == one:
                last = number
            number += 1
        number += 1
    if last is None or last + 1 >= len(spelt) or spelt[last + 1].endswith(".safetensors"):
        return None
    value = spelt[last + 1]
    return [*spelt[:last], *spelt[last + 2 :], value], value


# Options of atlas itself ----------------------------------------------------------------------


def _show_version(wanted: bool) -> None:
    if wanted:
        console.emit(f"atlas {__version__}")
        raise typer.Exit


def _show_script(shell: str | None) -> None:
    if shell:
        from atlas_cli.cli import completion

        console.emit(completion.script_of(shell).rstrip())
        raise typer.Exit


def _install_script(shell: str | None) -> None:
    if shell:
        from atlas_cli.cli import completion

        path, told = completion.install(shell)
        console.note(told)
        console.emit(path)
        raise typer.Exit


_SHELL: dict[str, Any] = {"metavar": "SHELL", "is_eager": True}


def atlas(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True),
    ] = False,
    show_completion: Annotated[
        str | None,
        typer.Option(
            help="Print the script that completes with Tab, for bash, zsh or fish.",
            callback=_show_script,
            **_SHELL,
        ),
    ] = None,
    install_completion: Annotated[
        str | None,
        typer.Option(
            help="Write that script where bash, zsh or fish finds it.",
            callback=_install_script,
            **_SHELL,
        ),
    ] = None,
) -> None:
    """Learn, merge and evaluate task vectors of CLIP models."""


# Options that commands share ------------------------------------------------------------------


def _check_device(device: str) -> str:
    from atlas_cli.errors import nearest

    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", device):
        hint = nearest(device, ["auto", "cpu", "cuda", "mps"])
        raise UsageError(f"--device {device}: expected auto, cpu, cuda, cuda:N or mps{hint}")
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
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Nothing on stderr but errors.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Also say what was decided, and why.")
]
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
KeepDownloads = Annotated[
    bool, typer.Option("--keep-downloads", help="Keep models whose vectors were extracted.")
]


def _option(kind: Any, *names: str, **more: Any) -> Any:
    return Annotated[kind | None, typer.Option(*names, **more)]


# The keys of recipes, which say what each is for: see help.py.
_FLAGS: dict[str, Any] = {
    "model": _option(str, "--model", metavar="BASE"),
    "vectors": _option(list[str], "--vectors", "--vector", metavar="VECTOR..."),
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
    "keep_downloads": KeepDownloads,
    "as_json": AsJson,
    "quiet": Quiet,
    "verbose": Verbose,
}
_ACCESS: dict[str, Any] = {"data_root": DataRoot, "download": Download}  # their callbacks do it all
_DEFAULTS: dict[str, Any] = {"device": "auto"}
_SWITCHES = {"linearised", "resume", "force", "download", "keep_downloads", "as_json", "quiet"}
_SWITCHES |= {"verbose"}


def _signature(function: Callable[..., None]) -> inspect.Signature:
    """The signature with its annotations. Options of a run are no flags, and slow to import."""
    return inspect.signature(function, eval_str=True, locals={"RunOptions": Any})


def learning_command(
    function: Callable[..., None], without: Collection[str] = ()
) -> Callable[..., None]:
    """The command with the options of learning, `without` some, beside its own.

    `function` is called with its own options, and with `flags`, the keys of a recipe that were
    given, `options` of the run, and `output`.
    """
    own = {
        name: parameter
        for name, parameter in _signature(function).parameters.items()
        if name not in ("flags", "options", "output")
    }
    offered = [name for name in _FLAGS if name not in without]
    kinds = {**_FLAGS, **_RUN_OPTIONS, **_ACCESS}
    shared = {n: _parameter(n, kind) for n, kind in kinds.items() if n not in without}

    def command(**given: Any) -> None:
        given = {name: value for name, value in given.items() if name not in _ACCESS}
        output = OutputOptions(*(given.pop(name) for name in ("as_json", "quiet", "verbose")))
        from atlas_cli.learning.run import RunOptions  # only once a command is run

        options = RunOptions(**{name: given.pop(name) for name in _RUN_OPTIONS if name in given})
        flags = given_flags({name: given.pop(name) for name in offered})
        function(**given, flags=flags, options=options, output=output)

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


# Reading a recipe -----------------------------------------------------------------------------

_EXAMPLES = {
    "model": "--model builtin:tiny",
    "vectors": "--vectors v/",
    "control": "--control builtin:everything",
}


def given_recipe(
    schema: type[AnyRecipe],
    data: str | Sequence[str],
    flags: Mapping[str, Any],
    needed: Collection[str] = (),
) -> AnyRecipe:
    """The recipe of a command: a file with the flags laid over it, or the flags alone.

    `data` is a text if the recipe's data is one, else a list. `needed` are keys that must be given
    here though a recipe may do without them.
    """
    from atlas_cli.recipes.model import check_recipe, read_recipe

    first, *others = [data] if isinstance(data, str) else data
    if not others and (first == "-" or first.endswith((".yaml", ".yml"))):
        return read_recipe(schema, *console.read_text(first), flags)
    for key, field in schema.model_fields.items():
        required = key in needed or (field.is_required() and key != "data")
        if required and not flags.get(key):
            raise UsageError(f"no {key} given; for example {_EXAMPLES[key]}")
    return check_recipe(schema, {"data": data, **flags}, "--")
