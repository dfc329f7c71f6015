"""What `atlas inspect` shows of a learned recipe: its coefficients, by vector and by block."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from atlas_cli import __version__
from atlas_cli.coefficients import Summary, summarise
from atlas_cli.commands import output
from atlas_cli.errors import UsageError
from atlas_cli.recipe import LearnedRecipe, read_recipe

_RECIPES = (".yaml", ".yml")


def recipe_in(subject: str) -> Path | None:
    """The learned recipe that a subject names: a YAML file, or the folder of a run."""
    path = Path(subject)
    if path.suffix in _RECIPES:
        return path
    inside = path / "recipe.yaml"
    return inside if inside.is_file() else None


def is_recipe(path: Path) -> bool:
    """Whether a file starts as a learned recipe does."""
    with path.open("rb") as file:
        start = file.read(4096)
    return b"\0" not in start and b"merge_method:" in start


def show_recipe(text: str, where: str, *, as_json: bool) -> None:
    """Print the coefficients of a learned recipe."""
    recipe = read_recipe(LearnedRecipe, text, where)
    table = recipe.coefficients
    if isinstance(table, str):
        raise UsageError(f"{where}: its coefficients are kept in {table}, not in the recipe")
    if as_json:
        found = {
            "atlas": __version__,
            "recipe": dataclasses.asdict(recipe),
            "summary": [dataclasses.asdict(row) for row in summarise(table)],
        }
        output.emit(found, as_json=True)
    elif output.is_terminal():
        caption = f"{recipe.base_model}, one coefficient per {recipe.granularity}"
        output.emit_table([_cells(row) for row in summarise(table)], caption)
    else:
        output.emit_rows(("vector", "block", "coefficient"), list(_rows(table)))


def _rows(table: dict[str, dict[str, float]]) -> Iterator[list[str]]:
    for vector, row in table.items():
        for block, value in row.items():
            yield [vector, block, repr(value)]


def _cells(row: Summary) -> dict[str, str]:
    return {
        "vector": row.vector,
        "coefficients": str(row.blocks),
        "mean": f"{row.mean:.3f}",
        "mean size": f"{row.mean_size:.3f}",
        "lowest": f"{row.lowest:.3f}",
        "highest": f"{row.highest:.3f}",
        "largest at": row.largest.removeprefix("visual."),
    }
