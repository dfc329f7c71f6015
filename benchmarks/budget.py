"""How few bits and how few bytes of task vectors do, on the built-in tasks.

    python benchmarks/budget.py [--work DIR] [--tasks TASK...] [--shots 4] [--seeds 0] [--only bits]

Every task is the target once; the vectors of the other seven are the pool, 60 steps of 16 images
for each fit. `bits` keeps the pool in every storage; `budget` keeps a share of its bytes in fp32,
chosen at random, by the gradient, or greedily. Prints two markdown tables: the mean test accuracy,
the bytes that are kept, and seconds per step. Finished rows are kept in DIR, so that a run that was
stopped goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from contenders import SHORT

from atlas_cli.cli.app import main as atlas
from atlas_cli.datasets.builtin import TASKS
from atlas_cli.datasets.dataset import open_dataset
from atlas_cli.datasets.pixels import Pixels
from atlas_cli.learning.batches import score
from atlas_cli.learning.fit import Fitting
from atlas_cli.learning.loop import CoefficientTrainer
from atlas_cli.learning.run import RunOptions, prepare
from atlas_cli.recipes.fit import RANKINGS, FitRecipe
from atlas_cli.recipes.model import check_recipe

TARGETS = [task for task in TASKS if task != "everything"]
FORMS = {
    **{word: ["--dtype", word] for word in ("fp32", "int8", "int4", "int3", "int2", "rtvq")},
    "rank 16": ["--dtype", "fp16", "--rank", "16"],
}
SHARES = {"1/16": 1 / 16, "1/8": 1 / 8, "1/4": 1 / 4, "1/2": 1 / 2, "all": 1.0}
Row = dict[str, Any]


def pool_of(task: str, form: str, work: Path) -> Path:
    """The vectors of all tasks but one, in one folder, in one storage."""
    folder = work / form.replace(" ", "") / f"without_{task}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        others = [f"builtin:{name}" for name in TARGETS if name != task]
        given = ["extract", "builtin:tiny", *others, "-o", str(folder), "--quiet", *FORMS[form]]
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for the tables
            if atlas(given):
                raise SystemExit(f"{folder}: was not written")
    return folder


def measure(recipe: Mapping[str, Any]) -> Row:
    """Test accuracy in percent, bytes of the vectors in memory, and seconds per step."""
    torch.set_num_threads(1)
    checked = check_recipe(FitRecipe, {**SHORT, **recipe})
    verb = Fitting(checked)
    with (
        tempfile.TemporaryDirectory() as folder,
        prepare(verb, RunOptions(threads=1, device="cpu", folder=Path(folder) / "run")) as ready,
    ):
        trainer = CoefficientTrainer(ready.objective, ready.policy)
        first = trainer.begin()
        began = time.perf_counter()
        *_, last = trainer.learn(first)
        seconds = (time.perf_counter() - began) / trainer.steps
        setup = ready.setup
        setup.model.load(trainer.select(last).coefficients)
        test = Pixels(open_dataset(checked.data, split="test"), setup.tasks[0].view, 2**30)
        found = score(setup.model, test, range(len(test.dataset.samples)), setup.heads[0])
        size = ready.pool.bytes
    return {"accuracy": round(100 * found.accuracy, 4), "bytes": size, "seconds": seconds}


def jobs(options: argparse.Namespace) -> Iterator[tuple[Row, dict[str, Any]]]:
    """What a row is about, and the recipe that it is measured with."""
    for seed in options.seeds:
        for task in options.tasks:
            about = {"task": task, "shots": options.shots, "seed": seed}
            given = {"data": f"builtin:{task}", "model": "builtin:tiny", **about}
            del given["task"]
            for form in FORMS if options.only != "budget" else ():
                vectors = [str(pool_of(task, form, options.work))]
                yield {**about, "form": form}, {**given, "vectors": vectors}
            for share, number in SHARES.items() if options.only != "bits" else ():
                pool = pool_of(task, "fp32", options.work)
                whole = sum(path.stat().st_size for path in pool.iterdir())
                for how in RANKINGS if share != "all" else RANKINGS[:1]:
                    limit = {"budget": f"{int(number * whole)}B", "rank_by": how}
                    recipe = {**given, "vectors": [str(pool)], **limit}
                    yield {**about, "share": share, "rank_by": how}, recipe


def results(options: argparse.Namespace) -> list[Row]:
    """The rows of all jobs."""
    file = options.work / "rows.jsonl"
    lines = file.read_text("utf-8").splitlines() if file.exists() else []
    rows = [json.loads(line) for line in lines]
    for about, recipe in jobs(options):
        if any(about.items() <= row.items() for row in rows):
            continue
        rows.append({**about, **measure(recipe)})
        with file.open("a", encoding="utf-8") as kept:
            kept.write(json.dumps(rows[-1]) + "\n")
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def line(label: str, rows: Sequence[Row], tasks: Sequence[str]) -> str:
    """A row of a table: means over tasks and seeds, and the accuracy of every task."""
    by_task = [statistics.mean(r["accuracy"] for r in rows if r["task"] == task) for task in tasks]
    mean = statistics.mean(row["accuracy"] for row in rows)
    size = statistics.mean(row["bytes"] for row in rows) / 1e3
    step = 1e3 * statistics.median(row["seconds"] for row in rows)
    cells = [label, f"{mean:.1f}", f"{size:.0f}", f"{step:.0f}", *(f"{a:.1f}" for a in by_task)]
    return f"| {' | '.join(cells)} |"


def show(rows: Sequence[Row], options: argparse.Namespace) -> None:
    """Both tables, of what is there for every task."""
    wanted = len(options.tasks) * len(options.seeds)
    kinds = [({"form": form}, form) for form in FORMS]
    kinds += [
        ({"share": share, "rank_by": how}, f"{share}, {how}")
        for share in SHARES
        for how in RANKINGS
    ]
    for key in ("form", "share"):
        print(
            f"\n| {options.shots} shots | mean | kB | ms per step | {' | '.join(options.tasks)} |"
        )
        print("| --- " * (4 + len(options.tasks)) + "|")
        for about, label in kinds:
            fixed = {**about, "shots": options.shots}
            some = [
                row for row in rows if fixed.items() <= row.items() and row["task"] in options.tasks
            ]
            if key in about and len(some) >= wanted:
                print(line(label, some, options.tasks))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("budget_work"))
    parser.add_argument("--tasks", nargs="+", default=TARGETS, choices=TARGETS, metavar="TASK")
    parser.add_argument("--shots", type=int, default=4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", choices=("bits", "budget"))
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    show(results(options), options)


if __name__ == "__main__":
    main()
