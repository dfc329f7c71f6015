"""atlas eval: score models on datasets, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atlas_cli.commands import output
from atlas_cli.commands.options import (
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
    from atlas_cli.commands.scores import open_data, plan_eval, show, write_predictions
    from atlas_cli.sources import check_architecture, locate, parse_reference

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

    from atlas_cli.evaluate import Loading, Watcher  # torch is slow: only with good inputs
    from atlas_cli.evaluate import evaluate as run
    from atlas_cli.models import Opening

    opening = Opening(plan.arch, text_source, device)
    loading = Loading(batch_size, workers, skip_broken)
    total = len(references) * sum(len(dataset.samples) for dataset in datasets)
    with output.progress("evaluating", total, quiet=quiet) as advance:
        watcher = Watcher(output.warn, advance)
        results = list(run(sources, datasets, opening, loading, watcher))
    if predictions:
        write_predictions(predictions, results, datasets)
    if str(predictions) != "-":
        show(results, plan, device, as_json)
