"""Ways to learn from a few labelled images, each as keys of a recipe, and their test accuracy.

Nothing is selected on the test images. Every way but zero-shot and the uniform scale sees the
same shots, in at most 60 steps of 16 images per fold unless it is called after the paper. Ways
that differ only in a head that is fitted afterwards share one training.

Finished rows are lines of a file under `benchmarks/rows/`, which is under version control: a run
adds what is missing, on whatever machine, and prints the tables that are complete. A row says when
and at which commit it was measured. It has a digest of what its way does: if that changes, it no
longer counts and is measured anew.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from atlas_cli.learning.heads import check_adapter, head_score, trained_head
from atlas_cli.learning.loop import CoefficientTrainer
from atlas_cli.learning.run import RunOptions, prepare
from atlas_cli.learning.selection import Selection
from atlas_cli.learning.setup import PreparedRun
from atlas_cli.recipes.fit import FitRecipe
from atlas_cli.recipes.model import check_recipe

ROWS = Path(__file__).parent / "rows"
Keys = Mapping[str, Any]  # of a recipe
Row = dict[str, Any]
Target = Callable[[str, int, int], Keys]  # task, shots, seed -> data, model, vectors, shots, seed


# The ways --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """What is trained, and the head that is fitted to its features afterwards, if any."""

    trained: Keys
    head: str | None = None


SHORT: Keys = {"batch_size": 16, "epochs": 6, "augment": "slight"}
ALONE: Keys = {"vectors": [], "adapter": "probe"}  # a recipe without vectors needs a head
SVD: Keys = {"basis": "svd:12", "augment": "slight"}
FITS: dict[str, Way] = {
    "zero-shot": Way(ALONE),
    "tip": Way(ALONE, "tip"),
    "tip-f": Way(ALONE, "tip-f"),
    "lpp": Way(ALONE, "lpp"),
    "probe": Way(ALONE, "probe"),
    "prolip": Way(ALONE, "prolip"),
    "uniform scale": Way({"granularity": "vector", "method": "search"}),
    "isotropic": Way({**SHORT, "granularity": "vector"}),
    "block": Way(SHORT),
    "block, then tip-f": Way(SHORT, "tip-f"),
    "block, then lpp": Way(SHORT, "lpp"),
    "block, as the paper": Way({"preset": "paper"}),
    "block with tip-f": Way({**SHORT, "adapter": "tip-f"}),
    "block with prolip": Way({**SHORT, "adapter": "prolip"}),
    "partition 5": Way({**SHORT, "granularity": "partition:5"}),
    "partition 20": Way({**SHORT, "granularity": "partition:20"}),
    "partition 80": Way({**SHORT, "granularity": "partition:80"}),
    "svd basis": Way(SVD),
    "svd basis, then lpp": Way(SVD, "lpp"),
    "fast": Way({"preset": "fast"}),
    "best": Way({"preset": "best"}),
}
TUNED: dict[str, Keys] = {
    "full fine-tuning": {"lr": 3e-4},
    "LoRA": {"lr": 1e-3, "lora": 2},
}
WAYS = (*FITS, *TUNED)
SLOW = ("block, as the paper",)  # as slow as five others; measured where it is asked for
USUAL = tuple(way for way in WAYS if way not in SLOW)
# Raised where a way comes to something else although its keys are the same, by its adapter.
REVISIONS = {"auto": 2}


def digest(way: str, about: Keys) -> str:
    """What tells the rows of a way from those of what had its name before."""
    if way in TUNED:
        found = dict(TUNED[way])
    else:
        found = _recipe([way], {"data": "d", "model": "m", "vectors": ["v"]}).model_dump()
        found |= {"head": FITS[way].head, "revision": REVISIONS.get(found["adapter"], 0)}
    return short_digest([found, about])


def short_digest(value: object) -> str:
    """Eight digits that tell one JSON value from another."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]


def _recipe(ways: Sequence[str], given: Keys) -> FitRecipe:
    """The recipe of what ways share; if a head comes after it, of a model that takes any head."""
    (trained, *_), heads = [FITS[way].trained for way in ways], [FITS[way].head for way in ways]
    after = {"adapter": "lpp", "adapter_stage": "after"} if any(heads) else {}
    return check_recipe(FitRecipe, {**given, **after, **trained})


# Measuring -------------------------------------------------------------------------------------


def measure(ways: Sequence[str], target: Keys) -> Iterator[tuple[str, Row]]:
    """Test accuracy in percent and seconds of CPU time, of ways that train the same.

    What they share counts for each of them.
    """
    torch.set_num_threads(1)
    began = time.process_time()
    if ways[0] in TUNED:
        found = _tuned(ways[0], target)
        yield ways[0], {"accuracy": round(found, 4), "seconds": _since(began)}
        return
    verb = Fitting(_recipe(ways, target))
    with (
        tempfile.TemporaryDirectory() as folder,  # where a basis keeps its directions
        prepare(verb, RunOptions(threads=1, device="cpu", folder=Path(folder) / "run")) as ready,
    ):
        selection = _selected(ready, verb)
        test = _test_images(verb.recipe, ready.setup.tasks[0].view)
        shared = _since(began)
        for way in ways:
            began = time.process_time()
            try:
                row: Row = {"accuracy": round(_scored(way, verb, ready, selection, test), 4)}
            except AtlasError as problem:  # such as Tip with one image: a row that says so
                row = {"refused": str(problem).splitlines()[0]}
            if selection.choice:
                row["choice"] = selection.choice
            yield way, {**row, "seconds": round(shared + _since(began), 2)}


def _since(began: float) -> float:
    return round(time.process_time() - began, 2)


def _selected(ready: PreparedRun, verb: Fitting) -> Selection:
    """What is trained or searched, still without a head that comes after."""
    if not verb.trains:
        return Selection(ready.setup.table(), None, None)
    if verb.recipe.method == "search":
        return search_tables(ready.objective, ready.policy.folds[0], verb.scales(ready))
    trainer = CoefficientTrainer(ready.objective, ready.policy)
    *_, last = trainer.learn(trainer.begin())
    selection = trainer.select(last)
    return verb.complete(ready, selection) if verb.recipe.adapter_stage == "joint" else selection


def _scored(
    way: str, verb: Fitting, ready: PreparedRun, selection: Selection, test: Pixels
) -> float:
    setup, every = ready.setup, range(len(test.dataset.samples))
    table, head = selection.coefficients, selection.head
    if name := FITS[way].head:
        check_adapter(setup, name)
        head = trained_head(setup, table, name)
    if head:
        return 100 * head_score(setup, table, head, test, every).accuracy
    setup.model.load(table)
    return 100 * score(setup.model, test, every, setup.heads[0]).accuracy


_decoded: dict[tuple[str, str], Pixels] = {}  # of the last target: every way is scored on them


def _test_images(recipe: FitRecipe, view: View) -> Pixels:
    key = recipe.data, recipe.model
    if key not in _decoded:
        _decoded.clear()
        _decoded[key] = Pixels(open_dataset(recipe.data, split="test"), view, 2**30)
    return _decoded[key]


def _tuned(way: str, target: Keys) -> float:
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


# Rows that are kept ----------------------------------------------------------------------------


def measure_all(
    file: Path,
    target: Target,
    tasks: Sequence[str],
    shots: Sequence[int],
    seeds: Sequence[int],
    ways: Sequence[str],
    about: Keys,
) -> list[Row]:
    """The rows of all tasks, numbers of shots, seeds and ways; those in the file are not repeated.

    `about` is whatever else decides them.
    """
    digests = {way: digest(way, about) for way in WAYS}
    rows = [row for row in kept_rows(file) if row["digest"] == digests.get(row["way"])]
    for seed, k, task in ((seed, k, task) for seed in seeds for k in shots for task in tasks):
        place = {"task": task, "shots": k, "seed": seed}
        done = {row["way"] for row in rows if place.items() <= row.items()}
        for some in _groups([way for way in ways if way not in done]):
            for way, found in measure(some, target(task, k, seed)):
                row = {**place, "way": way, **found, "digest": digests[way], **now()}
                with file.open("a", encoding="utf-8") as kept:
                    kept.write(json.dumps(row) + "\n")
                print(row, file=sys.stderr, flush=True)
                rows.append(row)
    return rows


def kept_rows(file: Path) -> list[Row]:
    """The rows of a file, also those that no longer count. Its folder is made."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = file.read_text("utf-8").splitlines() if file.exists() else []
    return [json.loads(line) for line in lines]


def _groups(ways: Sequence[str]) -> Iterator[list[str]]:
    """The ways in their order, those together that train the same."""
    found: dict[str, list[str]] = {}
    for way in ways:
        trained = way if way in TUNED else json.dumps(FITS[way].trained, sort_keys=True)
        found.setdefault(trained, []).append(way)
    yield from found.values()


@functools.cache
def _commit() -> str:
    """The commit that is checked out, with a mark if the package is not what it was there."""
    here = Path(__file__).parent

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["git", *words], cwd=here, capture_output=True, text=True, check=False
        )

    found = git("rev-parse", "--short", "HEAD").stdout.strip()
    changed = git("diff", "--quiet", "HEAD", "--", "../atlas_cli", "*.py").returncode
    return (found or atlas_cli.__version__) + ("-dirty" if found and changed else "")


def now() -> Row:
    """When and at which commit a row is measured."""
    return {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "commit": _commit()}


# Tables ----------------------------------------------------------------------------------------


def tables(
    rows: Sequence[Row], tasks: Sequence[str], shots: Sequence[int], seeds: Sequence[int]
) -> Iterator[str]:
    """For each number of shots a markdown table: the mean with a 95 % interval, and every task.

    A way counts only where all of its rows are there. Seconds are of CPU time.
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
