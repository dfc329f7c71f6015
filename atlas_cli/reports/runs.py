"""A learning run read back from its folder, or coefficients alone."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atlas_cli.errors import CheckpointError, UsageError
from atlas_cli.io.files import read_regular
from atlas_cli.learning.results import with_units
from atlas_cli.recipes.model import UNIT
from atlas_cli.recipes.text import Table, table_problems

if TYPE_CHECKING:
    from atlas_cli.recipes.learned import LearnedRecipe

_CONFIG, _METRICS, _RESULT, _RECIPE = "config.json", "metrics.jsonl", "result.json", "recipe.yaml"
_LARGE = "coefficients.safetensors"
_IMAGES = "images.jsonl"
_MODEL = "model"  # the folder that fine-tuning writes when it is done
TUNED = "fine-tuned"


@dataclass(frozen=True)
class ClassScores:
    """A number for every class of a task, before and after; `on` says on which images.

    The number is the accuracy on the class in percent or, without labels, how many images are
    classified as it. `after` is what the second number is called.
    """

    task: str
    on: str
    is_accuracy: bool
    rows: tuple[tuple[str, float, float], ...]
    after: str = "learned"


@dataclass(frozen=True)
class RunScores:
    """What was measured at the end, by method: a number or None for each column.

    Accuracies are in percent, of images `on` which the coefficients were learned or selected:
    training or validation.
    """

    is_accuracy: bool
    columns: tuple[str, ...]
    rows: dict[str, tuple[float | None, ...]]
    on: str = ""


@dataclass(frozen=True)
class ImageRow:
    """An image that was learned from, or a test image and what is predicted for it."""

    data: str
    split: str
    image: str
    label: str
    zero_shot: str | None = None
    learned: str | None = None


@dataclass(frozen=True)
class Run:
    """A learning run: its coefficients, and what else its folder holds.

    Coefficients alone, from a recipe or a table, leave the rest empty. A run that was killed may
    have no coefficients yet. `metrics` are the rows of metrics.jsonl.
    """

    name: str
    table: Table = field(default_factory=dict)
    recipe: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    tasks: tuple[str, ...] = ()
    metrics: tuple[dict[str, Any], ...] = ()
    scores: RunScores | None = None
    classes: tuple[ClassScores, ...] = ()
    finished: bool = True
    images: tuple[ImageRow, ...] = ()
    tests: tuple[dict[str, Any], ...] = ()  # scores on test images

    @property
    def command(self) -> str:
        """The command that made the run, if it is known."""
        return str(self.config.get("command", ""))

    @property
    def comment(self) -> list[str]:
        """The lines of the comment at the top of the recipe."""
        lines = self.recipe.splitlines()
        return [line.removeprefix("# ") for line in lines if line.startswith("#")]


@dataclass(frozen=True)
class Evaluations:
    """What `atlas eval --json` printed: a row for every model on every dataset, in percent."""

    name: str
    rows: tuple[dict[str, Any], ...]


def read_evaluations(path: Path) -> Evaluations:
    """Read a file that `atlas eval --json` has printed. Raises UsageError for anything else."""
    if not path.is_file():
        raise UsageError(f"no such file: {path}")
    found = _read_json(path)
    scale = 1 if found.get("unit") == UNIT else 100  # earlier versions printed shares
    keys = ("model", "data", "split", "images", "top1", "low", "high")
    try:
        rows = [{**row, **{key: row[key] for key in keys}} for row in found["results"]]
        for row in rows:
            accuracies = {k: row.get(k) for k in ("top1", "low", "high", "delta")}
            row |= {k: _number(value, scale) for k, value in accuracies.items()}
    except (KeyError, TypeError, ValueError) as problem:
        raise UsageError(f"{path}: is not what `atlas eval --json` prints") from problem
    return Evaluations(str(path), tuple(rows))


def is_run(path: Path) -> bool:
    """Whether a learning command wrote a folder; the config.json of a model has other keys."""
    try:
        return {"command", "recipe"} <= _read_json(path / _CONFIG).keys()
    except CheckpointError:
        return (path / _METRICS).exists()


def read_run(folder: Path) -> Run:
    """Read the folder of a run. Raises UsageError if it is no run, CheckpointError if damaged."""
    if not folder.is_dir():
        raise UsageError(f"no such run: {folder}")
    if not is_run(folder):
        raise UsageError(f"{folder}: holds no run; it is the folder that -o DIR of fit has named")
    config = _read_json(folder / _CONFIG)
    recipe = _read_text(folder / _RECIPE)
    table = _table_of(read_learned(recipe, str(folder)), folder) if recipe else {}
    result = _read_json(folder / _RESULT)
    scale = 1 if result.get("unit") == UNIT else 100  # earlier versions wrote shares
    tasks = _tasks(config, folder / _CONFIG)
    finished = bool(recipe) or (folder / _MODEL).is_dir()
    try:
        method = str(config["recipe"].get("method", "learned"))
        if config["command"] == "finetune":
            method = TUNED
        scores = _scores(result, method, scale)
        classes = tuple(_classes(result, tasks, method, scale))
    except (AttributeError, KeyError, TypeError, ValueError) as problem:
        raise CheckpointError(f"{folder / _RESULT}: is not the result of a run") from problem
    metrics = tuple(_read_rows(folder / _METRICS))
    return Run(
        *(str(folder), table, recipe, config, tasks, metrics, scores, classes, finished),
        images=tuple(_read_images(folder / _IMAGES)),
        tests=tuple(result.get("test", ())),
    )


def read_coefficients(text: str, where: str) -> Run:
    """Read coefficients from a learned recipe, or from a table by vector and block in JSON.

    Raises UsageError, in which `where` names the text.
    """
    if not text.lstrip().startswith("{"):
        recipe = read_learned(text, where)
        return Run(where, _table_of(recipe, Path(where).parent), text)
    try:
        found = json.loads(text)
    except ValueError as problem:
        raise UsageError(f"{where}: cannot be read as JSON") from problem
    if not found or not all(_is_row(row) for row in found.values()):
        raise UsageError(f"{where}: holds no coefficients: numbers by vector, then by block")
    table = {vector: {b: float(x) for b, x in row.items()} for vector, row in found.items()}
    return Run(where, _checked(table, where))


def is_table(path: Path) -> bool:
    """Whether a weight file holds a table of coefficients and nothing else."""
    try:
        with path.open("rb") as file:
            header = file.read(4096)[8:]
    except OSError:
        return False
    found = re.findall(rb'"(\w+)":\s*\{"dtype"', header)
    return found == [b"coefficients"]


def read_numbers(path: Path, names: Sequence[str] = ()) -> Table:
    """Read a table that is stored as a tensor: its columns have numbers for names."""
    from atlas_cli.io.checkpoint import open_safetensors  # torch is slow: only for large tables

    tensor = open_safetensors(path).get("coefficients")
    if tensor is None or len(tensor.shape) != 2:
        raise CheckpointError(f"{path}: holds no table of coefficients")
    rows = tensor.read().tolist()
    listed = names if len(names) == len(rows) else [f"vector {n + 1}" for n in range(len(rows))]
    found = {
        name: {str(number): value for number, value in enumerate(row)}
        for name, row in zip(listed, rows, strict=True)
    }
    return _checked(found, str(path))


def read_learned(text: str, where: str) -> LearnedRecipe:
    """Read a learned recipe. Raises UsageError with one line for every problem found."""
    from atlas_cli.recipes.learned import LearnedRecipe
    from atlas_cli.recipes.model import read_recipe

    return read_recipe(LearnedRecipe, text, where)


def _table_of(recipe: LearnedRecipe, folder: Path) -> Table:
    """The coefficients of a recipe; a large table is in a file beside it."""
    if isinstance(recipe.coefficients, dict):
        return _checked(recipe.coefficients, "coefficients")
    beside = folder / _LARGE
    path = Path(recipe.coefficients)
    names = [entry.name for entry in recipe.vectors]
    return read_numbers(beside if beside.is_file() else path, names)


def _checked(table: Table, where: str) -> Table:
    if problems := table_problems(table, where):
        raise UsageError(problems[0])
    return table


def _is_row(row: object) -> bool:
    return (
        isinstance(row, dict)
        and bool(row)
        and all(
            isinstance(value, int | float) and not isinstance(value, bool) for value in row.values()
        )
    )


def _tasks(config: Mapping[str, Any], path: Path) -> tuple[str, ...]:
    """The names of the training data."""
    try:
        return tuple(str(entry["name"]) for entry in config["data"])
    except (KeyError, TypeError) as problem:
        raise CheckpointError(f"{path}: is not the configuration of a run") from problem


# The result -----------------------------------------------------------------------------------


def _scores(result: Mapping[str, Any], method: str, scale: int) -> RunScores | None:
    """Accuracies of tasks by method, or what was measured without labels."""
    if "accuracies" in result:  # of fine-tuning
        before, after = (_number(result[key], scale) for key in ("zero_shot", "accuracy"))
        tuned: dict[str, tuple[float | None, ...]] = {"zero-shot": (before,), TUNED: (after,)}
        return None if after is None else RunScores(True, ("top-1",), tuned, "validation")
    on = "training" if result.get("select", "same") in ("last", "same") else "validation"
    if "accuracy" in result:
        rows = {**result["accuracy"], "own models": result.get("individual") or ()}
        kept = {
            name: tuple(_number(cell, scale) for cell in row)
            for name, row in rows.items()
            if any(row)
        }
        return RunScores(True, tuple(result["tasks"]), kept, on)
    if "adapted" in result:
        names = tuple(result["zero_shot"])
        rows = {"zero-shot": result["zero_shot"], "adapted": result["adapted"]}
        scales = {key: scale if key == "agreement" else 1 for key in names}
        kept = {
            name: tuple(_number(row.get(key), scales[key]) for key in names)
            for name, row in rows.items()
        }
        return RunScores(False, names, kept)
    if "learned" in result:
        before, after = (_number(result[key], scale) for key in ("zero_shot", "learned"))
        return RunScores(True, ("top-1",), {"zero-shot": (before,), method: (after,)}, on)
    return None


def _classes(
    result: Mapping[str, Any], tasks: Sequence[str], method: str, scale: int
) -> Iterator[ClassScores]:
    for task in result.get("classes", ()):
        rows = tuple(
            (name, scale * float(row["zero_shot"]), scale * float(row["learned"]))
            for name, row in task["classes"].items()
        )
        yield ClassScores(task["task"], task["on"], True, rows, method)
    if histogram := result.get("histogram"):
        before, after = histogram["zero-shot"], histogram["adapted"]
        counts = tuple((name, float(n), float(after[name])) for name, n in before.items())
        on = f"{sum(before.values())} images, as they are classified"
        yield ClassScores(tasks[0] if tasks else "images", on, False, counts, "adapted")


def _number(value: Any, scale: int = 1) -> float | None:
    return None if value is None else scale * float(value)


# Files ----------------------------------------------------------------------------------------


def _read_text(path: Path) -> str:
    """The content of a text file, or "" if there is none."""
    try:
        return read_regular(path).decode("utf-8") if path.exists() else ""
    except (OSError, UnicodeDecodeError) as problem:
        raise CheckpointError(f"{path}: cannot be read as UTF-8 text") from problem


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(_read_text(path) or "{}")
    except ValueError as problem:
        raise CheckpointError(f"{path}: cannot be read as JSON") from problem
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: expected keys and values")
    return found


def _read_images(path: Path) -> Iterator[ImageRow]:
    for number, line in enumerate(_read_text(path).splitlines(), start=1):
        try:
            yield ImageRow(**json.loads(line))
        except (ValueError, TypeError) as problem:
            raise CheckpointError(f"{path}: line {number} is not a row of images") from problem


def _read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The complete rows: of a run that was killed, the last may be cut off."""
    for number, line in enumerate(_read_text(path).splitlines(keepends=True), start=1):
        if not line.endswith("\n"):
            return
        try:
            row = json.loads(line)
        except ValueError as problem:
            raise CheckpointError(f"{path}: line {number} cannot be read as JSON") from problem
        if not isinstance(row, dict) or not isinstance(row.get("number"), int):
            raise CheckpointError(f"{path}: line {number} is not a row of metrics")
        yield {key: value for key, value in with_units(row).items() if _is_shown(value)}


def _is_shown(value: object) -> bool:
    return isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
