"""Ways to learn from a few labelled images, each as keys of a recipe, and their test accuracy.

Nothing is selected on the test images. Every way but zero-shot and the uniform scale sees the
same shots, in at most 60 steps of 16 images per fold unless it is called after the paper.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import atlas_cli
from atlas_cli.datasets.dataset import open_dataset
from atlas_cli.datasets.pixels import Pixels, View
from atlas_cli.errors import AtlasError
from atlas_cli.learning.baselines import search_tables
from atlas_cli.learning.batches import score
from atlas_cli.learning.fit import Fitting
from atlas_cli.learning.heads import head_score
from atlas_cli.learning.loop import CoefficientTrainer
from atlas_cli.learning.run import RunOptions, prepare
from atlas_cli.learning.selection import Selection
from atlas_cli.learning.setup import PreparedRun
from atlas_cli.recipes.fit import FitRecipe
from atlas_cli.recipes.model import check_recipe

SHORT = {"batch_size": 16, "epochs": 6, "augment": "slight"}
ALONE: dict[str, Any] = {"vectors": []}
FITS: dict[str, dict[str, Any]] = {
    "zero-shot": {},
    "uniform scale": {"granularity": "vector"},
    "tip": {**ALONE, "adapter": "tip"},
    "tip-f": {**ALONE, "adapter": "tip-f"},
    "lpp": {**ALONE, "adapter": "lpp"},
    "probe": {**ALONE, "adapter": "probe"},
    "prolip": {**ALONE, "adapter": "prolip"},
    "isotropic": {**SHORT, "granularity": "vector"},
    "block": SHORT,
    "block, as the paper": {"preset": "paper"},
    "block, then tip-f": {**SHORT, "adapter": "tip-f", "adapter_stage": "after"},
    "block, then lpp": {**SHORT, "adapter": "lpp", "adapter_stage": "after"},
    "block with tip-f": {**SHORT, "adapter": "tip-f"},
    "block with prolip": {**SHORT, "adapter": "prolip"},
    "partition 5": {**SHORT, "granularity": "partition:5"},
    "partition 20": {**SHORT, "granularity": "partition:20"},
    "partition 80": {**SHORT, "granularity": "partition:80"},
    "svd basis": {"basis": "svd:12", "augment": "slight"},
    "svd basis, then lpp": {"basis": "svd:12", "augment": "slight", "adapter": "lpp"},
    "fast": {"preset": "fast"},
    "best": {"preset": "best"},
}
TUNED: dict[str, dict[str, Any]] = {
    "full fine-tuning": {"lr": 3e-4},
    "LoRA": {"lr": 1e-3, "lora": 2},
}
WAYS = (*FITS, *TUNED)


def measure(way: str, target: Mapping[str, Any]) -> dict[str, float]:
    """Test accuracy in percent, and seconds of learning.

    `target` has the keys data, model, vectors, shots and seed.
    """
    torch.set_num_threads(1)
    began = time.perf_counter()
    found = _tuned(way, target) if way in TUNED else _fitted(way, target)
    return {"accuracy": round(found, 4), "seconds": round(time.perf_counter() - began, 2)}


def _fitted(way: str, target: Mapping[str, Any]) -> float:
    recipe = check_recipe(FitRecipe, {**target, **FITS[way]})
    verb = Fitting(recipe)
    with (
        tempfile.TemporaryDirectory() as folder,  # where a basis keeps its directions
        prepare(verb, RunOptions(threads=1, device="cpu", folder=Path(folder) / "run")) as ready,
    ):
        selection = verb.complete(ready, _selected(way, ready, verb))
        setup = ready.setup
        test = _test_images(recipe, setup.tasks[0].view)
        every = range(len(test.dataset.samples))
        if selection.head:
            found = head_score(setup, selection.coefficients, selection.head, test, every)
        else:
            setup.model.load(selection.coefficients)
            found = score(setup.model, test, every, setup.heads[0])
    return 100 * found.accuracy


_decoded: dict[tuple[str, str], Pixels] = {}  # of the last target: every way is scored on them


def _test_images(recipe: FitRecipe, view: View) -> Pixels:
    key = recipe.data, recipe.model
    if key not in _decoded:
        _decoded.clear()
        _decoded[key] = Pixels(open_dataset(recipe.data, split="test"), view, 2**30)
    return _decoded[key]


def _selected(way: str, ready: PreparedRun, verb: Fitting) -> Selection:
    if way == "zero-shot" or not verb.trains:
        return Selection(ready.setup.table(), None, None)
    if way == "uniform scale":
        return search_tables(ready.objective, ready.policy.folds[0], ready.setup.scales(1.0))
    trainer = CoefficientTrainer(ready.objective, ready.policy)
    *_, last = trainer.learn(trainer.begin())
    return trainer.select(last)


def _tuned(way: str, target: Mapping[str, Any]) -> float:
    given = {key: target[key] for key in ("model", "shots", "seed")}
    with tempfile.TemporaryDirectory() as folder:
        done = atlas_cli.finetune(
            target["data"],
            output=Path(folder) / "run",
            threads=1,
            device="cpu",
            steps=60,
            batch_size=16,
            **given,
            **TUNED[way],
        )
        (task,) = done.tasks
        if task.model is None:
            raise AtlasError(f"{way}: wrote no model that eval opens")
        (scored,) = atlas_cli.evaluate(task.model, target["data"], split="test", workers=0)
    return scored.top1


# Tables, whose rows are kept so that a run that was stopped goes on ------------------------------

Row = dict[str, Any]
Target = Callable[[str, int, int], Mapping[str, Any]]  # task, shots and seed -> keys of a recipe


def measure_all(
    file: Path,
    target: Target,
    tasks: Sequence[str],
    shots: Sequence[int],
    seeds: Sequence[int],
    ways: Sequence[str],
) -> list[Row]:
    """A row for every task, number of shots, seed and way; those in the file are not repeated."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = file.read_text("utf-8").splitlines() if file.exists() else []
    rows = [json.loads(line) for line in lines]
    done = {(row["task"], row["shots"], row["seed"], row["way"]) for row in rows}
    for seed, k, task, way in (
        (seed, k, task, way) for seed in seeds for k in shots for task in tasks for way in ways
    ):
        if (task, k, seed, way) in done:
            continue
        row: Row = {"task": task, "shots": k, "seed": seed, "way": way}
        try:
            row |= measure(way, target(task, k, seed))
        except AtlasError as problem:  # such as Tip with one image: kept as a row that says so
            row["refused"] = str(problem).splitlines()[0]
        with file.open("a", encoding="utf-8") as kept:
            kept.write(json.dumps(row) + "\n")
        print(row, file=sys.stderr, flush=True)
        rows.append(row)
    return rows


def tables(
    rows: Sequence[Row], tasks: Sequence[str], shots: Sequence[int], seeds: Sequence[int]
) -> Iterator[str]:
    """For each number of shots a markdown table: the mean with a 95 % interval, and every task.

    A way counts only where all of its rows are there.
    """
    for k in shots:
        yield f"\n| {k} shots | mean | seconds | {' | '.join(tasks)} |"
        yield "| --- " * (len(tasks) + 3) + "|"
        for way in WAYS:
            some = [
                row
                for row in rows
                if row["way"] == way
                and row["shots"] == k
                and row["seed"] in seeds
                and row["task"] in tasks
                and "accuracy" in row
            ]
            if len(some) == len(tasks) * len(seeds):
                yield f"| {way} | {_mean(some)} | {_seconds(some)} | {_by_task(some, tasks)} |"


def _mean(rows: Sequence[Row]) -> str:
    found = [row["accuracy"] for row in rows]
    spread = statistics.stdev(found) / len(found) ** 0.5 if len(found) > 1 else 0.0
    return f"{statistics.mean(found):.1f} ± {1.96 * spread:.1f}"


def _seconds(rows: Sequence[Row]) -> str:
    return f"{statistics.median(row['seconds'] for row in rows):.0f}"


def _by_task(rows: Sequence[Row], tasks: Sequence[str]) -> str:
    return " | ".join(
        f"{statistics.mean(row['accuracy'] for row in rows if row['task'] == task):.1f}"
        for task in tasks
    )
