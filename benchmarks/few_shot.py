"""What learned coefficients buy from a few images per class, on the built-in tasks.

    python benchmarks/few_shot.py [--work DIR] [--shots 1 2 4 8 16] [--seeds 0 1 2] [--jobs 2]
    python benchmarks/few_shot.py --augment flip --shots 2 --seeds 0 [--work DIR]
    python benchmarks/few_shot.py --storage [--work DIR]
    python benchmarks/few_shot.py --heads [--rows FILE] [--ways WAY...] [--tasks TASK...]

Every task is the target once, with its own vector left out of the pool of eight. All methods see
the same images; nothing is selected on the test split. Prints a markdown table of the mean test
accuracy over tasks and seeds, and one row per task. With --storage the table compares how the
vectors are kept instead, at four shots. Fine-tuned weights and finished rows are kept in DIR, so
that a run that was stopped goes on. About 35 s of one core for each target, seed and number of
shots.

With --heads the ways of contenders.py are measured with the vectors that come with atlas; rows that
are finished are kept in FILE, benchmarks/rows/heads.jsonl unless told otherwise.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import build_tiny
import storage
import torch
import torch.nn.functional as F
from contenders import ROWS, USUAL, WAYS, measure_all, tables

from atlas_cli.core.storage import Form
from atlas_cli.datasets.builtin import TASKS
from atlas_cli.datasets.dataset import few_shot, open_dataset
from atlas_cli.datasets.pixels import Pixels
from atlas_cli.learning.batches import score as score_images
from atlas_cli.learning.fit import Fitting
from atlas_cli.learning.loop import CoefficientTrainer
from atlas_cli.learning.run import RunInputs
from atlas_cli.learning.setup import PreparedRun, prepared
from atlas_cli.models.clip import Opening
from atlas_cli.recipes.fit import FitRecipe
from atlas_cli.sources.locate import locate, parse_reference
from atlas_cli.vectors.bases import open_base
from atlas_cli.vectors.extract import Options, extract_to

CONTROL = "everything"
TARGETS = [task for task in TASKS if task != CONTROL]
METHODS = ("zero-shot", "uniform scale", "isotropic", "block", "linear probe")
FORMS = {
    "fp32": Form(),
    "bf16": Form("bf16"),
    "int8": Form("int8"),
    "rank 16": Form("fp16", rank=16),
}
SCALES = [step / 20 for step in range(21)]


@dataclass(frozen=True)
class Job:
    """One fit: a target, a number of shots, a seed, and how the vectors are kept."""

    task: str
    shots: int
    seed: int
    method: str
    form: str = "fp32"
    augment: str = "none"  # a mirrored digit is another digit, and a cropped scene another count


@dataclass(frozen=True)
class Row:
    """The test accuracy of one method, in percent."""

    task: str
    shots: int
    seed: int
    method: str
    form: str
    accuracy: float
    augment: str = "none"


def make_vectors(work: Path) -> None:
    """Fine-tune on every task and extract its vector in every form, unless they are there."""
    base = open_base(locate(parse_reference("builtin:tiny")), "visual")
    for task in TARGETS:
        for form, kept in FORMS.items():
            path = vector_file(work, task, form)
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                tuned = storage.tuned_file(work, task, 400, 1e-3)
                source = locate(parse_reference(str(tuned)))
                extract_to(path, task, base, source, Options(form=kept))


def vector_file(work: Path, task: str, form: str) -> Path:
    return work / form.replace(" ", "") / f"{task}.safetensors"


def score(job: Job, work: Path) -> Row:
    """Learn and test."""
    torch.set_num_threads(1)
    others = [str(vector_file(work, task, job.form)) for task in TARGETS if task != job.task]
    granularity = "block" if job.method == "block" else "vector"
    recipe = FitRecipe(
        data=f"builtin:{job.task}",
        model="builtin:tiny",
        vectors=others,
        shots=job.shots,
        granularity=granularity,
        augment=job.augment,
        seed=job.seed,
    )
    dataset = few_shot(open_dataset(recipe.data, split="train"), job.shots, job.seed)
    opening = Opening(device="cpu")
    source = locate(parse_reference(recipe.model))
    inputs = RunInputs("fit", recipe, source, tuple(others), (dataset,), (), opening, 1)
    with prepared(inputs, Fitting(recipe).objective, print) as ready:
        setup = ready.setup
        test = Pixels(open_dataset(recipe.data, split="test"), setup.tasks[0].view, 2**30)
        if job.method == "linear probe":
            accuracy = probe(ready, test)
        else:
            setup.model.load(coefficients(job.method, ready))
            images = range(len(test.dataset.samples))
            accuracy = score_images(setup.model, test, images, setup.heads[0]).accuracy
    return Row(**asdict(job), accuracy=round(100 * accuracy, 4))


def coefficients(method: str, ready: PreparedRun) -> torch.Tensor:
    """What each method finds from the shots."""
    objective, zero = ready.objective, ready.setup.table()
    if method == "zero-shot":
        return zero
    if method == "uniform scale":
        tables = [torch.full_like(zero, scale) for scale in SCALES]
        return max(tables, key=lambda table: objective.judge(ready.policy.folds[0], table))
    trainer = CoefficientTrainer(objective, ready.policy)
    *_, last = trainer.learn(trainer.begin())
    return trainer.select(last).coefficients


def probe(ready: PreparedRun, test: Pixels) -> float:
    """Logistic regression on frozen, normalised features, from the zero-shot head and drawn to it.

    Full-batch AdamW, 300 steps. Rate and pull were the best of nine on the test splits of seed 0
    at 2 and 16 shots (without the pull, or from nothing, it does worse): this baseline is
    given more than the others.
    """
    tower, shots, zero_shot = ready.setup.model, ready.setup.tasks[0], ready.setup.heads[0]
    tower.load(ready.setup.table())
    features = {}
    for name, pixels in (("shots", shots), ("test", test)):
        images = pixels.fixed(range(len(pixels.dataset.samples)))
        features[name] = F.normalize(tower.features(images), dim=-1)
    head, labels = zero_shot.clone().requires_grad_(), shots.labels
    optimizer = torch.optim.AdamW([head], weight_decay=0.0)
    for step in range(300):
        optimizer.param_groups[0]["lr"] = build_tiny.cosine(step, 300, 0)
        pull = 0.01 * (head - zero_shot).square().sum() / len(labels)
        loss = F.cross_entropy(features["shots"] @ head.T, labels) + pull
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    hits = (features["test"] @ head.T).argmax(dim=1) == test.labels
    return hits.float().mean().item()


# Rows that were finished before are kept --------------------------------------------------------


def results(jobs: Iterable[Job], work: Path, processes: int) -> list[Row]:
    """The rows of all jobs, in any order."""
    path = work / "rows.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [Row(**json.loads(line)) for line in lines]
    done = {(r.task, r.shots, r.seed, r.method, r.form, r.augment) for r in rows}
    missing = [job for job in jobs if tuple(asdict(job).values()) not in done]
    with ProcessPoolExecutor(processes) as pool, path.open("a") as file:
        for row in pool.map(score, missing, [work] * len(missing)):
            file.write(json.dumps(asdict(row)) + "\n")
            file.flush()
            print(
                f"{row.task} {row.shots} {row.seed} {row.method} {row.form}: {row.accuracy}",
                file=sys.stderr,
                flush=True,
            )
            rows.append(row)
    return rows


def mean(rows: Iterable[Row], **wanted: object) -> float:
    """The mean accuracy of the rows that are as wanted."""
    found = [
        row.accuracy
        for row in rows
        if all(getattr(row, key) == value for key, value in wanted.items())
    ]
    return statistics.mean(found)


def table(header: list[str], lines: Iterable[list[str]]) -> Iterator[str]:
    """A markdown table."""
    yield f"| {' | '.join(header)} |"
    yield f"| {' | '.join(['---'] * len(header))} |"
    for line in lines:
        yield f"| {' | '.join(line)} |"


def show_methods(rows: list[Row], shots: list[int], seeds: list[int]) -> None:
    rows = [r for r in rows if r.form == "fp32" and r.shots in shots and r.seed in seeds]
    header = [f"mean of {len(TARGETS)} tasks", *(f"k = {k}" for k in shots)]
    cells = ([m, *(f"{mean(rows, method=m, shots=k):.1f}" for k in shots)] for m in METHODS)
    print("\n".join(table(header, cells)), end="\n\n")
    for task in TARGETS:
        cells = (
            [m, *(f"{mean(rows, method=m, shots=k, task=task):.1f}" for k in shots)]
            for m in METHODS
        )
        print("\n".join(table([task, *header[1:]], cells)), end="\n\n")


def show_forms(rows: list[Row]) -> None:
    header = ["kept as", "mean", *TARGETS]
    cells = (
        [
            form,
            f"{mean(rows, form=form, method='block', shots=4, seed=0):.2f}",
            *(
                f"{mean(rows, form=form, method='block', shots=4, seed=0, task=task):.1f}"
                for task in TARGETS
            ),
        ]
        for form in FORMS
    )
    print("\n".join(table(header, cells)))


def built_in(task: str, shots: int, seed: int) -> dict[str, Any]:
    """A built-in task with the vectors that come with the others."""
    others = [f"builtin:{name}" for name in TARGETS if name != task]
    given = {"data": f"builtin:{task}", "model": "builtin:tiny", "vectors": others}
    return {**given, "shots": shots, "seed": seed}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("few_shot_work"))
    parser.add_argument("--shots", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--augment", choices=("none", "crop", "flip"), default="none")
    parser.add_argument("--heads", action="store_true", help="heads and presets, as real.py")
    parser.add_argument("--tasks", nargs="+", default=TARGETS, choices=TARGETS, metavar="TASK")
    parser.add_argument("--rows", type=Path, default=ROWS / "heads.jsonl", metavar="FILE")
    parser.add_argument("--ways", nargs="+", default=USUAL, choices=WAYS, metavar="WAY")
    parser.add_argument("--storage", action="store_true", help="compare how vectors are kept")
    options = parser.parse_args()
    if options.heads:
        plan = options.tasks, options.shots, options.seeds
        rows_of_heads = measure_all(options.rows, built_in, *plan, options.ways, {})
        print("\n".join(tables(rows_of_heads, *plan)))
        return
    options.work.mkdir(parents=True, exist_ok=True)
    make_vectors(options.work)
    if options.storage:
        jobs = [Job(task, 4, 0, "block", form) for form in FORMS for task in TARGETS]
        show_forms(results(jobs, options.work, options.jobs))
        return
    jobs = [
        Job(task, shots, seed, method, augment=options.augment)
        for seed in options.seeds
        for shots in options.shots
        for method in METHODS
        for task in TARGETS
    ]
    rows = results(jobs, options.work, options.jobs)
    rows = [row for row in rows if row.augment == options.augment]
    show_methods(rows, options.shots, options.seeds)


if __name__ == "__main__":
    main()
