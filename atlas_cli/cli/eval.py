"""atlas eval: score models on datasets, side by side."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atlas_cli import __version__
from atlas_cli.cli import console
from atlas_cli.cli.console import read_text
from atlas_cli.cli.options import (
    Architecture,
    AsJson,
    BatchSize,
    Device,
    Quiet,
    Seed,
    Shots,
    SkipBroken,
    Split,
    Templates,
    TextModel,
    Workers,
)
from atlas_cli.datasets.dataset import (
    Dataset,
    check_templates,
    expand_references,
    few_shot,
    open_dataset,
)
from atlas_cli.errors import UsageError
from atlas_cli.io.files import write_text
from atlas_cli.recipes.reading import EvalRecipe, read_recipe

if TYPE_CHECKING:
    from atlas_cli.learning.evaluate import Evaluation, ModelScore


COLUMNS = (
    *("model", "data", "split", "images", "skipped", "top1", "low", "high", "top5"),
    *("mean_class", "delta", "p_value"),
)


def plan_eval(
    models: list[str], data: list[str] | None, seed: int | None, flags: Mapping[str, Any]
) -> EvalRecipe:
    """What to evaluate: the recipe, if there is one, with the flags laid over it."""
    given = {key: value for key, value in flags.items() if value}
    if seed is not None:
        given["seed"] = seed
    if len(models) == 1 and (models[0] == "-" or models[0].endswith((".yaml", ".yml"))):
        recipe = read_recipe(EvalRecipe, *read_text(models[0]))
        return dataclasses.replace(recipe, data=data or recipe.data, **given)
    if not data:
        raise UsageError("no data given; for example --data builtin:digits, or --data photos/")
    return EvalRecipe(models, data, **given)


def open_data(plan: EvalRecipe, quiet: bool) -> list[Dataset]:
    """List the images of every dataset, and say what was not taken for an image."""
    templates = check_templates(plan.templates, "templates")
    datasets = []
    for name in expand_references(plan.data):
        dataset = open_dataset(name, split=plan.split, templates=templates)
        if dataset.ignored and not quiet:
            console.note(
                f"{name}: {len(dataset.ignored)} files are not images by their names, "
                f"such as {dataset.ignored[0]}"
            )
        datasets.append(few_shot(dataset, plan.shots, plan.seed) if plan.shots else dataset)
    return datasets


def show(results: Sequence[Evaluation], plan: EvalRecipe, device: str, as_json: bool) -> None:
    """Print the scores: JSON, a table on a terminal, CSV in a pipe."""
    scores = [result.score for result in results]
    if as_json:
        models = {result.score.model: result.provenance for result in results}
        console.emit(
            {
                "atlas": __version__,
                "seed": plan.seed,
                "device": device,
                "models": list(models.values()),
                "results": [dataclasses.asdict(score) for score in scores],
            },
            as_json=True,
        )
    elif console.is_terminal():
        console.emit_table([_cells(score) for score in scores], _caption(scores))
    else:
        console.emit_rows(COLUMNS, [_row(score) for score in scores])


def _row(score: ModelScore) -> list[str]:
    percent = console.percent
    return [
        *(score.model, score.data, score.split, str(score.images), str(score.skipped)),
        *(percent(score.top1), percent(score.low), percent(score.high), percent(score.top5)),
        *(percent(score.mean_class), percent(score.delta, sign=True)),
        "" if score.p_value is None else f"{score.p_value:.3g}",
    ]


def _cells(score: ModelScore) -> dict[str, str]:
    """The same row for a terminal, where room is short."""
    percent = console.percent
    return {
        "model": score.model,
        "data": score.data.removeprefix("builtin:"),
        "images": str(score.images),
        "skipped": str(score.skipped or ""),
        "top-1": percent(score.top1),
        "95 %": f"{100 * score.low:.1f}-{100 * score.high:.1f}",
        "top-5": percent(score.top5),
        "by class": percent(score.mean_class),
        "vs first": percent(score.delta, sign=True),
        "p": "" if score.p_value is None else f"{score.p_value:.2g}",
    }


def _caption(scores: Sequence[ModelScore]) -> str:
    """The splits, and the mean top-1 of each model if there are datasets to average over."""
    models = dict.fromkeys(score.model for score in scores)
    means = {
        model: statistics.mean(score.top1 for score in scores if score.model == model)
        for model in models
    }
    caption = f"split: {', '.join(dict.fromkeys(score.split for score in scores))}"
    if len(scores) > len(models):
        listed = ", ".join(f"{model} {100 * mean:.2f}" for model, mean in means.items())
        caption += f"; mean top-1: {listed}"
    return caption


def write_predictions(
    path: Path, results: Sequence[Evaluation], datasets: Sequence[Dataset]
) -> None:
    """One JSON object per line and image, to a file or, for -, to stdout."""
    classes = {dataset.name: dataset.classes for dataset in datasets}
    lines = []
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
            lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    if str(path) == "-":
        console.write("".join(lines))
    else:
        write_text(path, "".join(lines))


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
    seed: Seed = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Score zero-shot models on datasets and compare each with the first.

    Example: atlas eval builtin:tiny merged/ --data builtin:digits photos/
    """
    from atlas_cli.sources.locate import locate
    from atlas_cli.sources.references import check_architecture, parse_reference

    plan = plan_eval(
        *(models, data, seed),
        {"split": split, "templates": template, "shots": shots, "arch": arch, "text": text},
    )
    references = [parse_reference(name) for name in plan.models]
    text_reference = parse_reference(plan.text) if plan.text else None
    check_architecture(plan.arch)
    datasets = open_data(plan, quiet)
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
