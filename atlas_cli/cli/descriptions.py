"""What is said of an option, in help and in completion: meaning, choices, and a true default.

What a recipe has a key for is described by that key, from the recipe's model, and plugins add their
names.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from typer.core import TyperCommand, TyperOption

if TYPE_CHECKING:
    from atlas_cli.recipes.model import Recipe

_RECIPES = {
    "eval": ("evaluation", "EvalRecipe"),
    "fit": ("fit", "FitRecipe"),
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
