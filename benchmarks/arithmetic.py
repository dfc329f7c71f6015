"""What learned coefficients buy when tasks are forgotten and combined, on the built-in tasks.

    python benchmarks/arithmetic.py [--work DIR] [--seeds 0 1 2] [--jobs 2] [--only negate|add]

Everything is tested on the test splits, which choose nothing. Negation: every task is the target
once, with its own vector; the control is the task `everything`, which has to keep 95 % of its
zero-shot accuracy on the val split; learned is from a fifth of the train splits. Addition: all
tasks and all vectors at once, learned from and selected on the val splits.
Prints markdown tables. Fine-tuned weights and finished rows are kept in DIR, so that a run that
was stopped goes on. About an hour of one core in all. `--set lr=0.03 'forget="ascent"'` tries other
setups of what is learned by block.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from few_shot import CONTROL, TARGETS, make_vectors, table, vector_file

from atlas_cli.datasets.dataset import open_dataset
from atlas_cli.datasets.pixels import Pixels
from atlas_cli.learning.add import Adding
from atlas_cli.learning.baselines import merged, search_tables
from atlas_cli.learning.batches import score
from atlas_cli.learning.loop import CoefficientTrainer
from atlas_cli.learning.negate import Negating
from atlas_cli.learning.run import LearningVerb, RunOptions, prepare
from atlas_cli.learning.setup import PreparedRun
from atlas_cli.recipes.learning import AddRecipe, NegateRecipe
from atlas_cli.recipes.merge_parameters import parse_merge

MERGES = {
    "averaging": "linear",
    "task arithmetic, 0.3": "task_arithmetic",
    "ties": "ties",
    "iso_c": "iso_c",
    "tsv": "tsv",
}
LEARNED = {
    "learned isotropic": {"method": "isotropic"},
    "learned block": {},
    "AdaMerging (no labels)": {"objective": "entropy"},
}
ADDING = ("zero-shot", *MERGES, "task arithmetic, searched", *LEARNED, "individual")


@dataclass(frozen=True)
class Job:
    """One experiment: what is done to which tasks, and how."""

    what: str  # negate or add
    task: str
    method: str
    seed: int
    more: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Row:
    """The test accuracy of each task, in percent, and of a negation also on the val splits."""

    job: dict[str, Any]
    test: dict[str, float]
    val: dict[str, float] = field(default_factory=dict)


def run(job: Job, work: Path) -> Row:
    """Learn and test."""
    torch.set_num_threads(1)
    verb: LearningVerb
    keys: dict[str, Any] = {"model": "builtin:tiny", "augment": "none", "seed": job.seed}
    if job.what == "negate":
        names = [job.task, CONTROL]
        keys |= {"data": [f"builtin:{job.task}"], "control": f"builtin:{CONTROL}"}
        keys |= {"vectors": [str(vector_file(work, job.task, "fp32"))]}
        keys |= {"select": "val", "shots": 0.2} if job.method == "learned" else {}
    else:
        names = TARGETS
        keys |= {"data": [f"builtin:{task}" for task in TARGETS]}
        keys |= {"vectors": [str(vector_file(work, task, "fp32")) for task in TARGETS]}
        keys |= LEARNED.get(job.method, {})
    keys |= dict(job.more)
    verb = Negating(NegateRecipe(**keys)) if job.what == "negate" else Adding(AddRecipe(**keys))
    with prepare(verb, RunOptions(device="cpu", threads=1)) as ready:
        load = {"negate": load_negated, "add": load_added}[job.what](job, ready)
        val = test_on(ready, names, "val", load) if job.what == "negate" else {}
        return Row(asdict(job), test_on(ready, names, "test", load), val)


Load = Callable[[int], None]  # makes the tower ready for the task of a number


def load_negated(job: Job, ready: PreparedRun) -> Load:
    coefficients = ready.setup.table()
    if job.method == "search":
        tables = ready.setup.scales(-1.0)
        coefficients = search_tables(ready.objective, ready.policy.folds[0], tables).coefficients
    elif job.method == "learned":
        coefficients = descended(ready)
    return lambda task: void(ready.setup.model.load(coefficients))


def load_added(job: Job, ready: PreparedRun) -> Load:
    setup = ready.setup
    if job.method in MERGES:
        tensors = merged(setup, *parse_merge(MERGES[job.method]))
        return lambda task: setup.model.hold(tensors)
    if job.method == "individual":
        return lambda task: void(setup.model.load(ready.objective.references[task]))
    coefficients = setup.table()
    if job.method == "task arithmetic, searched":
        coefficients = search_tables(
            ready.objective, ready.policy.folds[0], setup.scales(1.0)
        ).coefficients
    elif job.method in LEARNED:
        coefficients = descended(ready)
    return lambda task: void(setup.model.load(coefficients))


def void(found: object) -> None:
    """Nothing."""


def descended(ready: PreparedRun) -> torch.Tensor:
    trainer = CoefficientTrainer(ready.objective, ready.policy)
    checkpoint = trainer.begin()
    for found in trainer.learn(checkpoint):
        checkpoint = found
    return trainer.select(checkpoint).coefficients


def test_on(ready: PreparedRun, names: list[str], split: str, load: Load) -> dict[str, float]:
    setup = ready.setup
    found = {}
    for number, (name, head) in enumerate(zip(names, setup.heads, strict=True)):
        load(number)
        pixels = Pixels(open_dataset(f"builtin:{name}", split=split), setup.tasks[0].view, 2**28)
        images = range(len(pixels.dataset.samples))
        found[name] = round(100 * score(setup.model, pixels, images, head).accuracy, 4)
    return found


# Rows that were finished before are kept --------------------------------------------------------


def results(jobs: list[Job], work: Path, processes: int) -> list[Row]:
    """The rows of all jobs, in their order."""
    path = work / "arithmetic.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    known = {key_of(row["job"]): row for row in map(json.loads, lines)}
    missing = [job for job in jobs if key_of(asdict(job)) not in known]
    with ProcessPoolExecutor(processes) as pool, path.open("a") as file:
        for row in pool.map(run, missing, [work] * len(missing)):
            file.write(json.dumps(asdict(row)) + "\n")
            file.flush()
            print(asdict(row), file=sys.stderr, flush=True)
            known[key_of(row.job)] = asdict(row)
    return [Row(**known[key_of(asdict(job))]) for job in jobs]


def key_of(job: dict[str, Any]) -> str:
    return json.dumps(job, sort_keys=True)


def mean(rows: Iterable[Row], task: str, split: str = "test") -> float:
    return statistics.mean(getattr(row, split)[task] for row in rows)


def show_negation(rows: list[Row]) -> None:
    methods = ("zero-shot", "search", "learned")
    header = ["target", *(f"{m}: {kind}" for m in methods for kind in ("target", "control"))]
    found = {
        (task, method): [r for r in rows if (r.job["task"], r.job["method"]) == (task, method)]
        for task in TARGETS
        for method in methods
    }
    lines = []
    for task in TARGETS:
        some = [found[task, method] for method in methods]
        lines.append([task, *(f"{mean(s, name):.1f}" for s in some for name in (task, CONTROL))])
    numbers = [[float(cell) for cell in line[1:]] for line in lines]
    lines.append(["mean", *(f"{statistics.mean(c):.1f}" for c in zip(*numbers, strict=True))])
    print("\n".join(table(header, lines)), end="\n\n")


def show_addition(rows: list[Row]) -> None:
    own = next(row for row in rows if row.job["method"] == "individual").test
    lines = []
    for method in ADDING:
        some = [row for row in rows if row.job["method"] == method]
        accuracies = [mean(some, task) for task in TARGETS]
        relative = [100 * a / own[task] for a, task in zip(accuracies, TARGETS, strict=True)]
        values = [statistics.mean(accuracies), statistics.mean(relative), *accuracies]
        lines.append([method, *(f"{value:.1f}" for value in values)])
    print("\n".join(table(["method", "mean", "normalised", *TARGETS], lines)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("few_shot_work"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", choices=("negate", "add"))
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="recipe keys")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    make_vectors(options.work)
    more = tuple(
        (key, json.loads(value)) for key, _, value in (s.partition("=") for s in options.set)
    )
    if options.only != "add":
        jobs = [
            Job("negate", task, method, seed, more if method == "learned" else ())
            for task in TARGETS
            for method in ("zero-shot", "search", "learned")
            for seed in (options.seeds if method == "learned" else [0])
        ]
        show_negation(results(jobs, options.work, options.jobs))
    if options.only != "negate":
        jobs = [
            Job("add", "all", method, seed, more if method == "learned block" else ())
            for method in ADDING
            for seed in (options.seeds if method in LEARNED else [0])
        ]
        show_addition(results(jobs, options.work, options.jobs))


if __name__ == "__main__":
    main()
