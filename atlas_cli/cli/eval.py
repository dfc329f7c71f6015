"""atlas eval: score models on datasets, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atlas_cli.cli import console
from atlas_cli.cli.console import read_text
from atlas_cli.cli.options import (
    Architecture,
    AsJson,
    BatchSize,
    DataRoot,
    Device,
    Download,
    Quiet,
    Seed,
    Shots,
    SkipBroken,
    Split,
    Templates,
    TextModel,
    Workers,
)
from atlas_cli.errors import UsageError

if TYPE_CHECKING:
    from atlas_cli.datasets.dataset import Dataset
    from atlas_cli.learning.evaluate import Evaluation
    from atlas_cli.recipes.learning import EvalRecipe


def plan_eval(
    models: list[str], data: list[str] | None, seed: int | None, flags: Mapping[str, Any]
) -> EvalRecipe:
    """What to evaluate: the recipe, if there is one, with the flags laid over it."""
    from atlas_cli.recipes.learning import EvalRecipe
    from atlas_cli.recipes.model import check_recipe, read_recipe

    given = {key: value for key, value in flags.items() if value}
    if data:
        given["data"] = data
    if seed is not None:
        given["seed"] = seed
    if len(models) == 1 and (models[0] == "-" or models[0].endswith((".yaml", ".yml"))):
        return read_recipe(EvalRecipe, *read_text(models[0]), given)
    if not data:
        raise UsageError("no data given; for example --data builtin:digits, or --data photos/")
    return check_recipe(EvalRecipe, {"models": models, **given}, "--")


def note_ignored(datasets: Sequence[Dataset]) -> None:
    """Say which files of folders are not taken for images."""
    for dataset in datasets:
        if dataset.ignored:
            console.note(
                f"{dataset.name}: {len(dataset.ignored)} files are not images by their names, "
                f"such as {dataset.ignored[0]}"
            )


def show(results: Sequence[Evaluation], plan: EvalRecipe, device: str, as_json: bool) -> None:
    """Print the scores: JSON, a table on a terminal, CSV in a pipe."""

    from atlas_cli.reports import scores

    if as_json:
        console.emit(scores.score_facts(results, plan.seed, device), as_json=True)
    elif console.is_terminal():
        console.emit_table(*scores.score_table(results))
    else:
        console.emit_rows(scores.SCORE_COLUMNS, scores.score_rows(results))


def write_predictions(
    path: Path, results: Sequence[Evaluation], datasets: Sequence[Dataset]
) -> None:
    """One JSON object per line and image, to a file or, for -, to stdout."""

    from atlas_cli.io.files import write_text
    from atlas_cli.reports import scores

    classes = {dataset.name: dataset.classes for dataset in datasets}
    text = "".join(scores.prediction_lines(results, classes))
    if str(path) == "-":
        console.write(text)
    else:
        write_text(path, text)


Models = Annotated[
    list[str],
    typer.Argument(metavar="MODEL", help="Models, or one recipe (a .yaml file, - for stdin)."),
]
Data = Annotated[
    list[str] | None, typer.Option("--data", metavar="DATA...", help="Folders, tables, tasks.")
]
PredictionsFile = Annotated[
    Path | None, typer.Option("--predictions", metavar="FILE", help="JSON lines, one per image.")
]


def evaluate(
    models: Models,
    data: Data = None,
    split: Split = None,
    template: Templates = None,
    shots: Shots = None,
    arch: Architecture = None,
    text: TextModel = None,
    predictions: PredictionsFile = None,
    batch_size: BatchSize = None,
    workers: Workers = None,
    skip_broken: SkipBroken = False,
    device: Device = "auto",
    data_root: DataRoot = None,
    download: Download = False,
    seed: Seed = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Score zero-shot models on datasets and compare each with the first.

    \b
    Example:
      atlas eval builtin:tiny signs/model --data builtin:signs --shots 20
    """

    from atlas_cli.datasets.dataset import open_datasets
    from atlas_cli.sources.locate import locate
    from atlas_cli.sources.references import check_architecture, parse_reference

    plan = plan_eval(
        *(models, data, seed),
        {"split": split, "templates": template, "shots": shots, "arch": arch, "text": text},
    )
    references = [parse_reference(name) for name in plan.models]
    text_reference = parse_reference(plan.text) if plan.text else None
    check_architecture(plan.arch)
    datasets = open_datasets(
        plan.data, split=plan.split, templates=plan.templates, shots=plan.shots, seed=plan.seed
    )
    if not quiet:
        note_ignored(datasets)
    sources = [locate(reference) for reference in references]
    text_source = locate(text_reference) if text_reference else None

    from atlas_cli.learning.evaluate import Loading, Watcher  # torch is slow: only with good inputs
    from atlas_cli.learning.evaluate import evaluate as run
    from atlas_cli.models.clip import Opening

    opening = Opening(plan.arch, text_source, device)
    loading = Loading(batch_size, workers, skip_broken)
    total = len(references) * sum(len(dataset.samples) for dataset in datasets)
    with console.progress("evaluating", total, quiet=quiet) as advance:
        watcher = Watcher(console.warn, advance)
        results = list(run(sources, datasets, opening, loading, watcher))
    if predictions:
        write_predictions(predictions, results, datasets)
    if str(predictions) != "-":
        show(results, plan, device, as_json)
