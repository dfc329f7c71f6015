"""atlas eval: score models on datasets, side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atlas_cli import __version__
from atlas_cli.cli import console
from atlas_cli.cli.console import progress, read_text
from atlas_cli.cli.options import (
    Architecture,
    AsJson,
    BatchSize,
    DataRoot,
    Device,
    Download,
    Launch,
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
    from atlas_cli.learning.evaluate import Evaluation, ModelScore
    from atlas_cli.recipes.evaluation import EvalRecipe
    from atlas_cli.reports.tables import Captioned


def plan_eval(
    models: list[str], data: list[str] | None, seed: int | None, flags: Mapping[str, Any]
) -> EvalRecipe:
    """What to evaluate: the recipe, if there is one, with the flags laid over it."""
    from atlas_cli.recipes.evaluation import EvalRecipe
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

    if as_json:
        console.emit(_facts(results, plan.seed, device), as_json=True)
    elif console.is_terminal():
        console.emit_table(*_table(results))
    else:
        console.emit_rows(_COLUMNS, _rows(results))


def write_predictions(
    path: Path, results: Sequence[Evaluation], datasets: Sequence[Dataset]
) -> None:
    """One JSON object per line and image, to a file or, for -, to stdout."""

    from atlas_cli.io.files import write_text

    classes = {dataset.name: dataset.classes for dataset in datasets}
    text = "".join(_prediction_lines(results, classes))
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
    launch: Launch = None,
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
    from atlas_cli.sources.locate import check_architecture, locate, parse_reference

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
    from atlas_cli.parallel import choose_device

    opening = Opening(plan.arch, text_source, device)
    loading = Loading(batch_size, workers, skip_broken)
    total = len(references) * sum(len(dataset.samples) for dataset in datasets)
    with progress("evaluating", total, quiet=quiet) as advance:
        watcher = Watcher(console.warner(quiet=quiet), advance)
        results = list(run(sources, datasets, opening, loading, watcher))
    if predictions:
        write_predictions(predictions, results, datasets)
    if str(predictions) != "-":
        show(results, plan, str(choose_device(device)), as_json)


# Scores --------------------------------------------------------------------------------------

_COLUMNS = (
    *("model", "data", "split", "images", "skipped", "top1", "low", "high", "top5"),
    *("mean_class", "delta", "p_value"),
)


def _facts(results: Sequence[Evaluation], seed: int, device: str) -> dict[str, Any]:
    """Every score, and where every model comes from; for --json."""
    from atlas_cli.recipes.model import UNIT  # it imports pydantic, which help does not need

    models = {result.score.model: result.provenance for result in results}
    return {
        "atlas": __version__,
        "seed": seed,
        "device": device,
        "unit": UNIT,
        "models": list(models.values()),
        "results": [dataclasses.asdict(result.score) for result in results],
    }


def _rows(results: Sequence[Evaluation]) -> list[list[str]]:
    """A row for each model on each dataset; accuracies in percent."""
    return [_row(result.score) for result in results]


def _row(score: ModelScore) -> list[str]:
    return [
        *(score.model, score.data, score.split, str(score.images), str(score.skipped)),
        *(_percent(score.top1), _percent(score.low), _percent(score.high), _percent(score.top5)),
        *(_percent(score.mean_class), _percent(score.delta, sign=True)),
        "" if score.p_value is None else f"{score.p_value:.3g}",
    ]


def _table(results: Sequence[Evaluation]) -> Captioned:
    """The same rows, shorter, for a terminal."""
    scores = [result.score for result in results]
    # With as many images of every class, both accuracies are one.
    differs = any(_percent(one.mean_class) != _percent(one.top1) for one in scores)
    return [_cells(score, by_class=differs) for score in scores], _caption(scores)


def _cells(score: ModelScore, *, by_class: bool) -> dict[str, str]:
    return {
        "model": score.model,
        "data": score.data.removeprefix("builtin:"),
        "images": str(score.images),
        "skipped": str(score.skipped or ""),
        "top-1": _percent(score.top1),
        "95 %": f"{score.low:.1f}-{score.high:.1f}",
        "top-5": _percent(score.top5),
        "by class": _percent(score.mean_class) if by_class else "",
        "vs first": _percent(score.delta, sign=True),
        "p": "" if score.p_value is None else f"{score.p_value:.2g}",
    }


def _caption(scores: Sequence[ModelScore]) -> str:
    """The unit, the splits, and the mean top-1 of each model if there are several datasets."""
    import statistics

    models = dict.fromkeys(score.model for score in scores)
    means = {
        model: statistics.mean(score.top1 for score in scores if score.model == model)
        for model in models
    }
    caption = f"in percent; split: {', '.join(dict.fromkeys(score.split for score in scores))}"
    if len(scores) > len(models):
        listed = ", ".join(f"{model} {mean:.2f}" for model, mean in means.items())
        caption += f"; mean top-1: {listed}"
    return caption


def _percent(value: float | None, *, sign: bool = False) -> str:
    """Percent with two decimals; nothing for None."""
    return "" if value is None else f"{value:+.2f}" if sign else f"{value:.2f}"


def _prediction_lines(
    results: Sequence[Evaluation], classes: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    """One JSON object per line and image. `classes` are the names of each dataset's classes."""
    import json

    for result in results:
        names = classes[result.score.data]
        for prediction in result.predictions:
            row = {
                "model": result.score.model,
                "data": result.score.data,
                "image": prediction.key,
                "label": names[prediction.label],
                "prediction": names[prediction.ranked[0]],
                "correct": prediction.correct,
                "probability": round(prediction.probability, 4),
                "top5": [names[index] for index in prediction.ranked],
            }
            yield json.dumps(row, ensure_ascii=False) + "\n"
