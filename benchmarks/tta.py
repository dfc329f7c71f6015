"""What adapting to unlabelled images buys on the built-in tasks, clean and made worse.

    python benchmarks/tta.py [--work DIR] [--images 200] [--seeds 0 1 2] [--brief] [--show]

Every task is the target once, with the built-in vectors of all others. A method sees the first
images of the test split without labels, adapts to them, and is scored on the same images, as the
paper does; what it keeps is decided by its own guard, never by a label. Prints markdown tables.
Rows that are finished are kept in DIR, so that a run that was stopped goes on. A row takes some 3 s
of one core; --brief takes the objectives other than ufm with one seed for each condition made worse
(strength 1 with the first seed, 2 with the second, 3 with the third).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import few_shot
import torch
from shifts import CONDITIONS, labels_of, write_task

from atlas_cli.learning.loop import CoefficientTrainer
from atlas_cli.learning.run import RunOptions, prepare
from atlas_cli.learning.tta import Adapting, decision
from atlas_cli.recipes.tta import TtaRecipe

TARGETS = few_shot.TARGETS
METHODS = {
    "layernorm": {"tune": "layernorm"},
    "ufm": {},
    "entropy": {"objective": "entropy"},
    "balanced-entropy": {"objective": "balanced-entropy"},
    "sar": {"objective": "sar"},
    "simclr": {"objective": "simclr"},
}
MAIN = ("layernorm", "ufm")
SPLIT = "test"


@dataclass(frozen=True)
class Job:
    """One adaptation: a target, what was done to its images, a method and a seed."""

    task: str
    condition: str
    method: str
    seed: int
    images: int


@dataclass(frozen=True)
class Row:
    """Accuracies in percent: before, after the guard, and of the last epoch; and what was said."""

    task: str
    condition: str
    method: str
    seed: int
    images: int
    zero_shot: float
    adapted: float
    last: float
    decision: str


def score(job: Job, work: Path) -> Row:
    """Adapt, and look at the labels only then."""
    folder = work / "images" / f"{job.task}-{job.condition.replace(' ', '')}-{job.images}"
    write_task(folder, job.task, SPLIT, job.condition, job.images)
    flags = {"model": "builtin:tiny", "seed": job.seed, **METHODS[job.method]}
    if job.method != "layernorm":
        others = [task for task in TARGETS if task != job.task]
        flags["vectors"] = [f"builtin:{task}" for task in others]
    recipe = TtaRecipe(data=str(folder), **flags)
    labels = torch.tensor(labels_of(job.task, SPLIT, job.images))
    with prepare(Adapting(recipe), RunOptions(device="cpu", threads=1)) as ready:
        objective = ready.objective
        order = [int(Path(sample.key).stem) for sample in ready.inputs.datasets[0].samples]

        def accuracy(coefficients: torch.Tensor) -> float:
            hits = objective.predictions(coefficients).argmax(dim=1) == labels[order]
            return round(100 * hits.float().mean().item(), 4)

        trainer = CoefficientTrainer(objective, ready.policy)
        *_, before_last, last = trainer.learn(trainer.begin())
        selection = trainer.select(last)
        assert before_last.state is not None
        return Row(
            **asdict(job),
            zero_shot=accuracy(objective.start),
            adapted=accuracy(selection.coefficients),
            last=accuracy(before_last.state["coefficients"]),
            decision=decision(selection, guarded=objective.guarded),
        )


def jobs_of(seeds: list[int], images: int, brief: bool) -> list[Job]:
    """The most telling first."""
    jobs = [
        Job(task, condition, method, seed, images)
        for condition in CONDITIONS
        for seed in seeds
        for task in TARGETS
        for method in METHODS
        if not brief or is_brief(condition, method, seeds.index(seed) + 1)
    ]

    def rank(job: Job) -> int:
        if job.condition == "clean" and (job.method in MAIN or job.seed == seeds[0]):
            return 0
        return 1 if one_seed(job.condition, seeds.index(job.seed) + 1) else 2

    return sorted(jobs, key=rank)


def is_brief(condition: str, method: str, number: int) -> bool:
    """Whether a condition is worked out with the seed of a number in a brief run."""
    return method in MAIN or one_seed(condition, number)


def one_seed(condition: str, number: int) -> bool:
    """Whether a seed is the one of a condition's strength; clean images have all of them."""
    return condition == "clean" or condition.endswith(f" {number}")


def results(jobs: Iterable[Job], work: Path, known_only: bool) -> list[Row]:
    """The rows of all jobs; those that were finished before are not worked out again."""
    path = work / "tta.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    known = {tuple(json.loads(line).values())[:5]: Row(**json.loads(line)) for line in lines}
    rows = []
    with path.open("a") as file:
        for job in jobs:
            row = known.get(tuple(asdict(job).values()))
            if row is None and known_only:
                continue
            if row is None:
                row = score(job, work)
                file.write(json.dumps(asdict(row)) + "\n")
                file.flush()
                print(row, file=sys.stderr, flush=True)
            rows.append(row)
    return rows


# Tables ---------------------------------------------------------------------------------------


def mean(rows: Iterable[Row], column: str) -> str:
    found = [getattr(row, column) for row in rows]
    return f"{statistics.mean(found):.1f}" if found else ""


def chosen(rows: Iterable[Row], **wanted: object) -> list[Row]:
    return [r for r in rows if all(getattr(r, key) == value for key, value in wanted.items())]


def show(rows: list[Row], title: str) -> None:
    """One table: a row for each task, a column for each method, and the mean."""
    header = [title, "zero-shot", *METHODS]
    lines = []
    for task in [*TARGETS, "mean"]:
        some = rows if task == "mean" else chosen(rows, task=task)
        cells = [mean(chosen(some, method=method), "adapted") for method in METHODS]
        lines.append([task, mean(chosen(some, method="ufm"), "zero_shot"), *cells])
    print("\n".join(few_shot.table(header, lines)), end="\n\n")


def show_conditions(rows: list[Row]) -> None:
    """The mean over tasks for each condition."""
    header = ["mean of tasks", "zero-shot", *METHODS, "ufm without guard"]
    lines = []
    for condition in CONDITIONS:
        some = chosen(rows, condition=condition)
        cells = [mean(chosen(some, method=method), "adapted") for method in METHODS]
        ufm = chosen(some, method="ufm")
        lines.append([condition, mean(ufm, "zero_shot"), *cells, mean(ufm, "last")])
    print("\n".join(few_shot.table(header, lines)), end="\n\n")


def show_losses(rows: list[Row]) -> None:
    """Where ufm ends more than a point below zero-shot, means over seeds."""
    lines = []
    for condition in CONDITIONS:
        for task in TARGETS:
            some = chosen(rows, method="ufm", task=task, condition=condition)
            if some:
                change = statistics.mean(row.adapted - row.zero_shot for row in some)
                if change < -1:
                    said = "; ".join(sorted({row.decision for row in some}))
                    lines.append([condition, task, f"{change:+.1f}", said])
    header = ["ufm loses over a point", "task", "change", "what was said"]
    print("\n".join(few_shot.table(header, lines)), end="\n\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("tta_work"))
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--brief", action="store_true", help="fewer seeds, see above")
    parser.add_argument("--show", action="store_true", help="only rows that are finished")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.work.mkdir(parents=True, exist_ok=True)
    jobs = jobs_of(options.seeds, options.images, options.brief)
    rows = results(jobs, options.work, options.show)
    show(chosen(rows, condition="clean"), "clean images")
    show([row for row in rows if row.condition != "clean"], "images made worse")
    show_conditions(rows)
    show_losses(rows)


if __name__ == "__main__":
    main()
