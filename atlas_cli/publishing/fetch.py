"""A published run, or the folder of one -> its recipe, with the files that came with it."""

from __future__ import annotations

from pathlib import Path

from atlas_cli.errors import UsageError
from atlas_cli.recipes.text import parse_mapping, write_mapping
from atlas_cli.sources.hub import open_snapshot
from atlas_cli.sources.locate import parse_reference

HUB = "hf://"
RECIPE, LARGE, VECTORS = "recipe.yaml", "coefficients.safetensors", "vectors"


def read_published(name: str) -> tuple[str, str]:
    """The recipe of a run on the Hub, hf://OWNER/NAME[@REVISION], and what to call it."""
    reference = parse_reference(name)
    snapshot = open_snapshot(reference.name, reference.revision, [RECIPE])
    if RECIPE not in snapshot.files:
        raise UsageError(f"{name}: holds no run: there is no {RECIPE} in it")
    own = [file for file in snapshot.files if file.startswith(f"{VECTORS}/")]
    folder = snapshot.fetch([RECIPE, LARGE, "layernorm.safetensors", *own])
    return with_own_files((folder / RECIPE).read_text("utf-8"), folder), name


def with_own_files(text: str, folder: Path) -> str:
    """A recipe in which files that lie in its folder are named by their full paths."""
    recipe = parse_mapping(text, str(folder))
    changed = False
    for entry in recipe.get("vectors") or []:
        if isinstance(entry, dict) and (found := _own(folder, entry.get("file"))):
            entry["file"], changed = found, True
    if found := _own(folder, recipe.get("coefficients")):
        recipe["coefficients"], changed = found, True
    return write_mapping(recipe, "") if changed else text


def _own(folder: Path, name: object) -> str | None:
    if not isinstance(name, str) or Path(name).is_absolute() or ".." in Path(name).parts:
        return None
    path = folder / name
    return str(path) if path.is_file() and not Path(name).is_file() else None
