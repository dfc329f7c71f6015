"""What `atlas inspect` shows of learned coefficients, by vector and by block."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from atlas_cli import __version__
from atlas_cli.cli import console
from atlas_cli.cli.console import read_text
from atlas_cli.errors import AtlasError
from atlas_cli.recipes.coefficients import Summary, Table, summarise
from atlas_cli.recipes.reading import LearnedRecipe, read_recipe
from atlas_cli.reports.runs import (
    Record,
    is_run,
    is_table,
    read_coefficients,
    read_numbers,
    read_run,
)

_TEXTS = (".yaml", ".yml", ".json")


def record_in(subject: str) -> Record | None:
    """The coefficients that a subject names: a run's folder, a recipe, or a table of them."""
    path = Path(subject)
    if path.suffix in _TEXTS:
        return read_coefficients(*read_text(subject))
    if path.is_dir() and is_run(path):
        return read_run(path)
    if (inside := path / "recipe.yaml").is_file():
        return read_coefficients(*read_text(str(inside)))
    if path.suffix == ".safetensors" and path.is_file() and is_table(path):
        return Record(subject, read_numbers(path))
    return None


def is_text(path: Path) -> bool:
    """Whether a file starts as a learned recipe or a table in JSON does."""
    with path.open("rb") as file:
        start = file.read(4096)
    return b"\0" not in start and (b"merge_method:" in start or start.lstrip().startswith(b"{"))


def show_record(record: Record, *, as_json: bool, drawn: bool) -> None:
    """Print coefficients. There may be none yet in a run of which something else was drawn."""
    if not record.table:
        if not drawn:
            raise AtlasError(f"{record.name}: has no coefficients yet; --resume goes on with it")
        return
    if as_json:
        console.emit({"atlas": __version__, **_facts(record)}, as_json=True)
    elif console.is_terminal():
        console.emit_table([_cells(row) for row in summarise(record.table)], _caption(record))
    else:
        console.emit_rows(("vector", "block", "coefficient"), list(_rows(record.table)))


def _facts(record: Record) -> dict[str, object]:
    summary = [dataclasses.asdict(row) for row in summarise(record.table)]
    if recipe := _recipe(record):
        return {"recipe": dataclasses.asdict(recipe), "summary": summary}
    return {"coefficients": record.table, "summary": summary}


def _caption(record: Record) -> str:
    recipe = _recipe(record)
    return f"{recipe.base_model}, one coefficient per {recipe.granularity}" if recipe else ""


def _recipe(record: Record) -> LearnedRecipe | None:
    return read_recipe(LearnedRecipe, record.recipe, record.name) if record.recipe else None


def _rows(table: Table) -> Iterator[list[str]]:
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
