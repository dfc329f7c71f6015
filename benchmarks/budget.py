"""How few bits and how few bytes of task vectors do, on the built-in tasks.

    python benchmarks/budget.py [--work DIR] [--tasks TASK...] [--shots 4] [--seeds 0] [--only bits]
    python benchmarks/budget.py --ranking 200 [--work DIR]

Every task is the target once; the vectors of the other seven are the pool, 60 steps of 16 images
for each fit. `bits` keeps the pool in every storage; `budget` keeps a share of its bytes in fp32,
chosen at random, by features, by the gradient, or greedily. Prints two markdown tables: the mean
test accuracy, the bytes that are kept, and seconds per step. Finished rows are kept in a file,
benchmarks/rows/budget.jsonl unless --rows names another, so that a run that was stopped goes on;
each has a digest of what it was measured with, and counts as long as that is so. With --ranking,
as many random vectors of the shapes of ViT-B/32 in int8 are written to DIR (88 MB each) and ranked:
seconds beside those of reading the files, with what the system keeps of files dropped before each
where that is allowed, and what the memory of the process grew by beyond the gradient.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from contenders import ROWS, SHORT, kept_rows, now, short_digest

from atlas_cli.cli.app import main as atlas
from atlas_cli.core.budget import Budget, by_greed
from atlas_cli.core.storage import Quantised, block_norm
from atlas_cli.datasets.builtin import TASKS
from atlas_cli.datasets.dataset import open_dataset
from atlas_cli.datasets.pixels import Pixels
from atlas_cli.io.checkpoint import write_tensors
from atlas_cli.learning.batches import score
from atlas_cli.learning.fit import Fitting
from atlas_cli.learning.loop import CoefficientTrainer
from atlas_cli.learning.ranking import measure as slopes_of
from atlas_cli.learning.ranking import opened
from atlas_cli.learning.run import RunOptions, prepare
from atlas_cli.recipes.fit import RANKINGS, FitRecipe
from atlas_cli.recipes.model import check_recipe
from atlas_cli.vectors.format import BlockInfo, Header, to_metadata
from atlas_cli.vectors.writer import stored_tensors

TARGETS = [task for task in TASKS if task != "everything"]
FORMS = {
    **{word: ["--dtype", word] for word in ("fp32", "int8", "int4", "int3", "int2", "rtvq")},
    "rank 16": ["--dtype", "fp16", "--rank", "16"],
}
SHARES = {"1/16": 1 / 16, "1/8": 1 / 8, "1/4": 1 / 4, "1/2": 1 / 2, "all": 1.0}
REVISION = 1  # raised where the same keys come to something else
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
    mark = short_digest([SHORT, FORMS, REVISION])
    rows = [row for row in kept_rows(options.rows) if row["digest"] == mark]
    for about, recipe in jobs(options):
        if any(about.items() <= row.items() for row in rows):
            continue
        rows.append({**about, **measure(recipe), "digest": mark, **now()})
        with options.rows.open("a", encoding="utf-8") as kept:
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


# Ranking a large pool -----------------------------------------------------------------------------


def tower_shapes() -> dict[str, tuple[int, ...]]:
    """The blocks of the image tower of a ViT-B/32."""
    wide, more = 768, 3072
    found: dict[str, tuple[int, ...]] = {
        "class_embedding": (wide,),
        "positional_embedding": (50, wide),
        "proj": (wide, 512),
        "conv1.weight": (wide, 3, 32, 32),
        **{
            f"{norm}.{end}": (wide,) for norm in ("ln_pre", "ln_post") for end in ("weight", "bias")
        },
    }
    layer: dict[str, tuple[int, ...]] = {
        **{f"{norm}.{end}": (wide,) for norm in ("ln_1", "ln_2") for end in ("weight", "bias")},
        "attn.in_proj_weight": (3 * wide, wide),
        "attn.in_proj_bias": (3 * wide,),
        "attn.out_proj.weight": (wide, wide),
        "attn.out_proj.bias": (wide,),
        "mlp.c_fc.weight": (more, wide),
        "mlp.c_fc.bias": (more,),
        "mlp.c_proj.weight": (wide, more),
        "mlp.c_proj.bias": (wide,),
    }
    for number in range(12):
        found |= {f"transformer.resblocks.{number}.{name}": s for name, s in layer.items()}
    return {f"visual.{name}": shape for name, shape in found.items()}


def random_blocks() -> dict[str, Quantised]:
    """A vector of random 8-bit codes."""
    random = torch.Generator().manual_seed(0)
    found = {}
    for name, shape in tower_shapes().items():
        rows = shape[0] if len(shape) > 1 else 1
        codes = torch.randint(-127, 128, shape, generator=random, dtype=torch.int8)
        found[name] = Quantised(codes, torch.full((rows,), 1e-5))
    return found


def write_variant(path: Path, number: int, blocks: Mapping[str, Quantised]) -> None:
    """The vector with its codes moved on, so that no two files are alike."""
    tensors, infos = {}, []
    for name, first in blocks.items():
        block = replace(first, values=first.values.roll(7919 * number))
        tensors |= stored_tensors(name, block)
        shape = tuple(first.values.shape)
        infos.append(BlockInfo(name, shape, "int8", block_norm(first), 1.0, 0.0))
    told: dict[str, Any] = {"reference": path.stem, "commit": None, "sha256": {}}
    header = Header(
        *(path.stem, told, told, {}, "gelu", "visual", 1.0, "0" * 64), blocks=tuple(infos)
    )
    write_tensors(path, tensors, to_metadata(header))


def read_all(paths: Sequence[Path]) -> None:
    """Read files with plain read(): what no ranking can do without."""
    room = bytearray(1 << 24)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(room):
                pass


def forget_files() -> bool:
    """Drop what the system keeps of files in memory, if it lets us."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


def rank_large(count: int, rounds: int, work: Path) -> None:
    """Seconds of reading and of ranking, in turn, and growth of memory."""
    torch.set_num_threads(1)
    paths = [work / "random" / f"{number:03d}.safetensors" for number in range(count)]
    paths[0].parent.mkdir(parents=True, exist_ok=True)
    blocks = random_blocks()
    for number, path in enumerate(paths):
        if not path.exists():
            write_variant(path, number, blocks)
    gradient = {name: torch.randn(shape) for name, shape in tower_shapes().items()}

    def rank() -> int:
        members = [opened(str(path)) for path in paths]
        pool = slopes_of(members, tuple(gradient), gradient)
        return len(by_greed(pool, Budget(bytes=int(pool.bytes.sum().item() / 8))))

    print("| vectors | files | read, s (CPU) | ranked, s (CPU) | ratio | grown by, MB | kept |")
    print("| --- " * 7 + "|")
    for cold in [True] * rounds + [False]:
        if cold and not forget_files():
            continue
        began = time.perf_counter(), time.process_time()
        read_all(paths)
        read = time.perf_counter() - began[0], time.process_time() - began[1]
        if cold:
            forget_files()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        began = time.perf_counter(), time.process_time()
        kept = rank()
        ranked = time.perf_counter() - began[0], time.process_time() - began[1]
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3
        times = [f"{wall:.1f} ({cpu:.1f})" for wall, cpu in (read, ranked)]
        cells = [str(count), "on disk" if cold else "as left", *times]
        cells += [f"{ranked[0] / read[0]:.2f}", f"{grown:.0f}", str(kept)]
        print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("budget_work"))
    parser.add_argument("--rows", type=Path, default=ROWS / "budget.jsonl", metavar="FILE")
    parser.add_argument("--tasks", nargs="+", default=TARGETS, choices=TARGETS, metavar="TASK")
    parser.add_argument("--shots", type=int, default=4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", choices=("bits", "budget"))
    parser.add_argument("--ranking", type=int, metavar="N", help="rank N large random vectors")
    parser.add_argument("--rounds", type=int, default=1, help="how often they are ranked")
    options = parser.parse_args()
    if options.ranking:
        rank_large(options.ranking, options.rounds, options.work)
        return
    options.work.mkdir(parents=True, exist_ok=True)
    show(results(options), options)


if __name__ == "__main__":
    main()
