"""What `--help` says: panels, and defaults that are true.

What a recipe has a key for is described by that key: its meaning, choices and default come from the
recipe's model, and plugins add their names. Help is plain text, since drawing it with rich would
take longer than all the rest of the start.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from atlas_cli.cli.options import SpreadingCommand

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


class Command(SpreadingCommand):
    """A command whose help shows its options in panels."""

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
    "eval": ("evaluation", "EvalRecipe"),
    "fit": ("learning", "FitRecipe"),
    "negate": ("learning", "NegateRecipe"),
    "add": ("learning", "AddRecipe"),
    "tta": ("tta", "TtaRecipe"),
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
