"""How a command reads its arguments and what `--help` says: panels, and defaults that are true.

What a recipe has a key for is described by that key: its meaning, choices and default come from the
recipe's model, and plugins add their names. Help is plain text, since drawing it with rich would
take longer than all the rest of the start.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from atlas_cli import __version__
from atlas_cli.cli import completion, console

if TYPE_CHECKING:
    from atlas_cli.recipes.model import Recipe

PANELS: dict[str, tuple[str, ...]] = {
    "Data": (
        *("data", "split", "shots", "templates", "classes", "control", "prior"),
        *("workers", "skip_broken"),
    ),
    "Model": (
        "model",
        "vectors",
        "exclude",
        "storage",
        "base",
        "arch",
        "text",
        "scope",
        "allow_target",
        "name",
    ),
    "Learning": (
        *(
            "objective",
            "forget",
            "keep",
            "method",
            "select",
            "granularity",
            "tune",
            "lora",
            "adapter",
            "basis",
            "preset",
            "adapter_stage",
        ),
        *("epochs", "steps", "lr", "batch_size", "augment", "seed"),
    ),
    "Output": (
        *("folder", "output", "path", "vector", "vectors_dir", "predictions", "plot", "dtype"),
        *("rank", "energy", "dry_run", "compare", "disentanglement", "push", "evaluation", "log"),
        *(
            "blocks",
            "classifier",
            "formats",
            "keep_files",
            "resume",
            "force",
            "as_json",
            "quiet",
            "verbose",
            "schema",
            "help",
        ),
    ),
}
_ADVANCED = "Advanced"
_WIDEST = 26  # characters of an option's names and value before its text begins on a new line


def _show_version(wanted: bool) -> None:
    if wanted:
        console.emit(f"atlas {__version__}")
        raise typer.Exit


def _show_script(shell: str | None) -> None:
    if shell:
        console.emit(completion.script_of(shell).rstrip())
        raise typer.Exit


def _install_script(shell: str | None) -> None:
    if shell:
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


class Command(TyperCommand):
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

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words behind the name of the command: its options and arguments."""
        arguments = [p for p in self.get_params(ctx) if isinstance(p, TyperArgument)]
        shown = [p.metavar if p.required else f"[{p.metavar}]" for p in arguments]
        return ["[OPTIONS]", *map(str, shown)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, and the options in panels."""
        described = describe(self)
        arguments = [p for p in self.get_params(ctx) if isinstance(p, TyperArgument)]
        if arguments:
            with formatter.section("Arguments"):
                formatter.write_dl([(str(p.metavar), p.help or "") for p in arguments])
        panels: dict[str, list[tuple[str, str]]] = {panel: [] for panel in (*PANELS, _ADVANCED)}
        for option in self.get_params(ctx):
            if isinstance(option, TyperOption) and not option.hidden:
                names = _names(option, ctx)
                text = described.get(option.name or "") or option.help or ""
                panels[panel_of(option)].append((names, text))
        for panel, rows in panels.items():
            if rows:
                with formatter.section(panel):
                    formatter.write_dl(rows, col_max=_WIDEST)
        if self.name == "merge":
            from atlas_cli.registry import MERGE_METHODS

            with formatter.section("Methods of recipes (merge_method)"):
                formatter.write_text(", ".join(MERGE_METHODS))


class Group(TyperGroup):
    """The list of commands, with all of what each is for."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the first sentence of every command, on as many lines as it takes."""
        rows = [
            (name, (command.help or "").split("\n\n")[0].replace("\n", " "))
            for name in self.list_commands(ctx)
            if (command := self.get_command(ctx, name)) is not None
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def panel_of(option: TyperOption) -> str:
    """The panel in which help shows an option."""
    name = key_of(option)
    return next((panel for panel, names in PANELS.items() if name in names), _ADVANCED)


def _names(option: TyperOption, ctx: Any) -> str:
    short_first = ", ".join(sorted(option.opts, key=lambda name: name.startswith("--")))
    if option.is_flag:
        return short_first
    kind = option.metavar or {"int": "N", "float": "X"}.get(option.bare_type(), "TEXT")
    return f"{short_first} {kind}"


# Descriptions from recipes --------------------------------------------------------------------

_RECIPES = {
    "eval": ("learning", "EvalRecipe"),
    "fit": ("learning", "FitRecipe"),
    "negate": ("learning", "NegateRecipe"),
    "add": ("learning", "AddRecipe"),
    "tta": ("learning", "TtaRecipe"),
    "finetune": ("finetune", "FinetuneRecipe"),
}
_KEYS = {"template": "templates"}  # where an option is called otherwise


def key_of(option: TyperOption) -> str:
    """The key of a recipe that an option stands for, if it does."""
    return _KEYS.get(option.name or "", option.name or "")


def recipe_of(command: str) -> type[Recipe] | None:
    """The model of a command's recipe. Importing one takes a tenth of a second."""
    from importlib import import_module

    if command not in _RECIPES:
        return None
    module, name = _RECIPES[command]
    found: type[Recipe] = getattr(import_module(f"atlas_cli.recipes.{module}"), name)
    return found


def describe(command: TyperCommand) -> dict[str, str]:
    """What help says of every option: by its recipe, or as it is declared, with its default."""
    from atlas_cli.recipes.schema import json_schema

    schema = recipe_of(command.name or "")
    keys = json_schema(schema)["properties"] if schema else {}
    found = {}
    for option in command.params:
        if isinstance(option, TyperOption):
            key = keys.get(key_of(option), {})
            # pydantic's own default, since JSON has no infinity and no null
            field = schema.model_fields[key_of(option)] if schema and key else None
            default = None if field is None or field.is_required() else field.default
            default = default if field else option.default
            found[option.name or ""] = _text(option.help or "", key, default)
    return found


def _text(own: str, key: dict[str, Any], default: Any) -> str:
    text = key.get("description", "").replace("`", "") or own
    shown = shown_default(default)
    if shown:
        text = re.sub(rf"; (default )?{re.escape(shown)}( if it is not given)?(?=\.$)", "", text)
    words = choices_of(key)
    new = [w for w in words if not re.search(rf"(?<![\w-]){re.escape(w)}(?![\w-])", text)]
    if new:
        text = f"{text.rstrip('.')}{': ' if new == words else '; also '}{_listed(new)}."
    return f"{text} [default: {shown}]" if shown else text


def choices_of(key: dict[str, Any]) -> list[str]:
    """The words that a key takes, by its JSON Schema; none if it takes anything."""
    return [str(word) for word in key.get("enum") or key.get("examples") or ()]


def shown_default(default: Any) -> str:
    """A default as help shows it; nothing for none, for an empty list and for a switch."""
    if default is None or isinstance(default, bool) or default in ([], "") or callable(default):
        return ""
    return f"{default:g}" if isinstance(default, float) else str(default)


def _listed(words: Sequence[str]) -> str:
    *some, last = words
    return f"{', '.join(some)} or {last}" if some else last


# Values of repeatable options -----------------------------------------------------------------


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
