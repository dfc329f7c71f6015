"""Options that commands share, and how every learning command runs its verb."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperOption

from atlas_cli import __version__
from atlas_cli.cli import console
from atlas_cli.cli.console import ConsoleListener, OutputOptions
from atlas_cli.errors import AtlasError, UsageError

if TYPE_CHECKING:
    from atlas_cli.learning.run import LearningResult
    from atlas_cli.recipes.model import AnyRecipe


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
    "granularity": _option(str, "--granularity", metavar="WHAT"),  # VariadicCommand has its help
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
_RUN_OPTIONS: dict[str, Any] = {
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
    kinds = {**{name: _FLAGS[name] for name in offered}, **_RUN_OPTIONS}
    shared = {name: _parameter(name, kind) for name, kind in kinds.items()}

    def command(**given: Any) -> None:
        output = OutputOptions(as_json=given.pop("as_json"), quiet=given.pop("quiet"))
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


# The command line itself ----------------------------------------------------------------------


class VariadicCommand(TyperCommand):
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

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options. Only now are plugins asked for the names that they add."""
        from atlas_cli.registry import granularity_labels

        for parameter in self.params:
            if isinstance(parameter, TyperOption) and parameter.name == "granularity":
                names = granularity_labels().replace("block", "block (default)", 1)
                parameter.help = f"{names}."
            if isinstance(parameter, TyperOption) and parameter.name in ("objective", "forget"):
                parameter.help = _with_plugins(parameter.help or "", self.name or "")
        super().format_options(ctx, formatter)


def _with_plugins(text: str, command: str) -> str:
    """What help says of a command's objectives, with those that plugins add."""
    from atlas_cli.registry import OBJECTIVES, objectives_of

    ours = "atlas_cli.learning.objectives"
    names = [n for n in objectives_of(command) if OBJECTIVES[n].function.__module__ != ours]
    return text.partition(" Of plugins:")[0] + (
        f" Of plugins: {', '.join(names)}." if names else ""
    )


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


def _show_version(wanted: bool) -> None:
    if wanted:
        console.emit(f"atlas {__version__}")
        raise typer.Exit


def atlas(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Learn, merge and evaluate task vectors of CLIP models."""


# Running a learning verb ----------------------------------------------------------------------

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


def run_learning(verb: Callable[..., LearningResult], output: OutputOptions) -> None:
    """Run a verb, show its result, and leave with the exit code that it deserves."""
    listener = ConsoleListener(output)
    result = verb(on_event=listener, stop=listener.stop)
    for line in result.notes:
        console.note(line)
    if result.rows and not output.quiet:
        console.tell_table(
            [
                {
                    key: cell if isinstance(cell, str) else console.percent(cell)
                    for key, cell in row.items()
                }
                for row in result.rows
            ]
        )
    if output.as_json:
        console.emit({"atlas": __version__, **result.facts}, as_json=True)
    else:
        console.write(result.text)
    if result.stopped:
        raise typer.Exit(130)
    if result.failed:
        raise AtlasError(result.failed)
