"""The list of commands, and the one place where errors become exit codes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperOption

from atlas_cli import __version__
from atlas_cli.cli import console
from atlas_cli.cli.add import add
from atlas_cli.cli.demo import demo
from atlas_cli.cli.draw import draw
from atlas_cli.cli.eval import evaluate
from atlas_cli.cli.extract import extract
from atlas_cli.cli.finetune import finetune
from atlas_cli.cli.fit import fit
from atlas_cli.cli.inspect import inspect
from atlas_cli.cli.merge import merge
from atlas_cli.cli.negate import negate
from atlas_cli.cli.report import report
from atlas_cli.cli.tta import tta
from atlas_cli.errors import AtlasError, nearest

_EPILOG = "Exit codes: 0 done, 1 the work failed, 2 bad usage, 3 unreachable, 130 interrupted."


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


# Plain help: drawing it with rich would take longer than all the rest of the start.
app = typer.Typer(
    name="atlas", rich_markup_mode=None, pretty_exceptions_enable=False, epilog=_EPILOG
)
app.command("demo", cls=VariadicCommand)(demo)
app.command("eval", cls=VariadicCommand)(evaluate)
app.command("draw", cls=VariadicCommand)(draw)
app.command("finetune", cls=VariadicCommand)(finetune)
app.command("extract", cls=VariadicCommand)(extract)
app.command("fit", cls=VariadicCommand)(fit)
app.command("negate", cls=VariadicCommand)(negate)
app.command("add", cls=VariadicCommand)(add)
app.command("tta", cls=VariadicCommand)(tta)
app.command("inspect", cls=VariadicCommand)(inspect)
app.command("merge", cls=VariadicCommand)(merge)
app.command("report", cls=VariadicCommand)(report)


def _show_version(wanted: bool) -> None:
    if wanted:
        console.emit(f"atlas {__version__}")
        raise typer.Exit


@app.callback()
def _atlas(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Learn, merge and evaluate task vectors of CLIP models."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and give its exit code. A user's mistake is one line on stderr."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = app(given or ["--help"], prog_name="atlas", standalone_mode=False)
    except AtlasError as problem:
        for line in str(problem).splitlines():
            console.error(line)
        return problem.exit_code
    except typer.TyperException as problem:
        console.error(_in_one_line(problem))
        return problem.exit_code
    except SystemExit:  # typer's answer to a reader that went away while help was printed
        console.error(console.CLOSED)
        return 1
    if code == 130:
        console.note("interrupted")
    return code or 0


def _in_one_line(problem: typer.TyperException) -> str:
    """What typer says of a bad command line, with the nearest right word."""
    option = getattr(problem, "option_name", None)
    if option and hasattr(problem, "possibilities"):
        command = getattr(problem, "cmd", None)
        names = [name for param in getattr(command, "params", []) for name in param.opts]
        close = nearest(option.strip("-"), [name.strip("-") for name in names])
        return f"no such option: {option}" + close.replace(" '", " '--")
    return " ".join(problem.format_message().split())
