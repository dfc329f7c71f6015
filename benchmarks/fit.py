"""Time and memory of one learning step, beside plain fine-tuning and the naive formulation.

    python benchmarks/fit.py [--rounds 3] [--steps 4] [--growth] [--plot FILE.png]

A ViT-B/32 image tower with random weights, batch 16, random images. Every measurement is a
process of its own, in random order: (a) a fine-tuning step of the whole tower with AdamW, (b)
the sum of products under autograd, and ours with vectors in float32, bf16, int8 and rank 16.
Memory is the peak of resident memory over the interpreter with torch and open_clip loaded. Prints
markdown tables, and ratios to (a) and (b). With --growth also n = 1 to 64 vectors.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

BATCH = 16
KINDS = ("fine-tuning", "naive", "fp32", "bf16", "int8", "rank 16")
GROWTH = (1, 2, 4, 8, 16, 32, 64)
LARGEST = {"fp32": 32}  # 64 vectors in float32 are 22.5 GB


# One measurement, in a process of its own -------------------------------------------------------


def measure(kind: str, count: int, steps: int, *, costs: bool) -> dict[str, float]:
    import torch

    before, tower, images, labels, head = scene()

    def loss_of(features: Any) -> Any:
        logits = torch.nn.functional.normalize(features, dim=-1) @ head.T
        return torch.nn.functional.cross_entropy(logits, labels)

    makers = {"fine-tuning": finetuning, "naive": naive}
    step, extra = makers.get(kind, ours)(tower, count, kind, images, loss_of)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of making random vectors
    seconds = [timed(step) for _ in range(steps + 1)][1:]
    peak = status("VmHWM") - before
    found = {"seconds": statistics.median(seconds), "megabytes": peak / 1e6}
    return found | (extra() if costs else {})


def scene() -> tuple[int, Any, Any, Any, Any]:
    """The memory before it, an image tower, a batch of images, their labels and a head."""
    import torch

    from atlas_cli.models.open_clip_import import import_open_clip

    open_clip = import_open_clip()
    torch.manual_seed(0)
    before = resident()
    logging.disable(logging.WARNING)
    tower = open_clip.create_model("ViT-B-32", force_quick_gelu=True).visual
    images, labels = torch.randn(BATCH, 3, 224, 224), torch.randint(10, (BATCH,))
    return before, tower, images, labels, torch.randn(10, 512)


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def resident() -> int:
    return status("VmRSS")


def status(key: str) -> int:
    """A field of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


Made = tuple[Callable[[], object], Callable[[], dict[str, float]]]


def finetuning(tower: Any, count: int, kind: str, images: Any, loss_of: Any) -> Made:
    import torch

    optimizer = torch.optim.AdamW(tower.parameters(), lr=1e-5)

    def step() -> None:
        loss = loss_of(tower(images))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step, dict


def naive(tower: Any, count: int, kind: str, images: Any, loss_of: Any) -> Made:
    import torch

    tower.requires_grad_(False)
    base = dict(tower.named_parameters())
    first = {name: 0.01 * torch.randn_like(tensor) for name, tensor in base.items()}
    vectors = [{name: tensor.clone() for name, tensor in first.items()} for _ in range(count)]
    table = torch.zeros(count, len(base), requires_grad=True)
    optimizer = torch.optim.AdamW([table], lr=0.1)

    def step() -> None:
        composed = {
            name: tensor + sum(table[i, j] * vector[name] for i, vector in enumerate(vectors))
            for j, (name, tensor) in enumerate(base.items())
        }
        loss = loss_of(torch.func.functional_call(tower, composed, (images,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step, dict


def ours(tower: Any, count: int, kind: str, images: Any, loss_of: Any) -> Made:
    import torch

    from atlas_cli.core.compose import Composition, by_block, stack_blocks
    from atlas_cli.core.optimizers import CoefficientOptimizer, OptimizerConfig
    from atlas_cli.models.composed import ComposedModel
    from atlas_cli.parallel import ThreadPool

    tower.requires_grad_(False)
    base = {name: tensor.detach() for name, tensor in tower.named_parameters()}
    shapes = {name: tuple(tensor.shape) for name, tensor in base.items()}
    stacks = {
        name: stack_blocks({i: random_block(shape, kind) for i in range(count)})
        for name, shape in shapes.items()
    }
    random_block.cache_clear()
    composition = Composition(base, stacks, by_block(shapes), count)
    thread_pool = ThreadPool(torch.get_num_threads())
    engine = ComposedModel(tower, composition, thread_pool=thread_pool)
    optimizer = CoefficientOptimizer(torch.zeros(composition.shape), 1000, OptimizerConfig())

    def step() -> None:
        engine.load(optimizer.coefficients)
        engine.backward(images, loss_of)
        optimizer.step(engine.gradient())

    return step, lambda: composition_cost(engine, stacks, thread_pool)


@cache
def random_block(shape: tuple[int, ...], kind: str) -> Any:
    """One block for all vectors, which are copies of it: only its size matters here."""
    import torch

    from atlas_cli.core.storage import BlockPart, Dense, Factors, quantise

    if kind == "rank 16" and len(shape) == 2:
        up, down = 0.01 * torch.randn(shape[0], 16), torch.randn(16, shape[1])
        return Factors(shape, (BlockPart(0, up, down),))
    values = 0.01 * torch.randn(shape)
    if kind == "int8":
        return quantise(values)
    return Dense(values.bfloat16() if kind == "bf16" else values)


def composition_cost(engine: Any, stacks: Any, thread_pool: Any) -> dict[str, float]:
    """Composing, and its gradient, against reading what they read once: the vectors and the
    base, or the vectors and the gradient.
    """
    import torch

    from atlas_cli.core.compose import coefficient_gradient

    tensors = [
        value
        for several in stacks.values()
        for stack in several
        for value in vars(stack).values()
        if isinstance(value, torch.Tensor) and value.numel() % 8 == 0
    ]
    base = [tensor for tensor in engine.composition.base.values() if tensor.numel() % 2 == 0]
    words = [tensor.reshape(-1).view(torch.int64) for tensor in (*tensors, *base)]
    table = torch.full(engine.composition.shape, 0.1)
    gradients = {n: torch.randn_like(t) for n, t in engine.composition.base.items()}
    work = {
        "read": lambda: [word.sum() for word in words],
        "forward": lambda: engine.load(table),
        "backward": lambda: coefficient_gradient(engine.composition, gradients, thread_pool.map),
    }
    found: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(6):
        for name, function in work.items():
            found[name].append(timed(function))
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 1e6
    return {name: statistics.median(values[1:]) for name, values in found.items()} | {
        "vectors": size
    }


# All of them ------------------------------------------------------------------------------------


def run(kind: str, count: int, steps: int, costs: bool) -> dict[str, float]:
    """A measurement by a fresh interpreter."""
    command = [sys.executable, __file__, "--child", kind, str(count), "--steps", str(steps)]
    command += [] if costs else ["--no-costs"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


Found = dict[tuple[str, int], dict[str, float]]


def collect(cases: list[tuple[str, int]], rounds: int, steps: int, *, costs: bool = True) -> Found:
    """The median of every measurement over some rounds, each in another order."""
    seen: dict[tuple[str, int], list[dict[str, float]]] = {case: [] for case in cases}
    for number in range(rounds):
        for case in random.Random(number).sample(cases, len(cases)):
            seen[case].append(run(*case, steps, costs))
            print(number, *case, seen[case][-1], file=sys.stderr, flush=True)
    return {
        case: {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        for case, rows in seen.items()
    }


def table(header: list[str], rows: list[list[str]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield f"| {' | '.join(['---'] * len(header))} |"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def show(found: Found, counts: tuple[int, ...]) -> None:
    plain = found["fine-tuning", 0]
    header = ["vectors", "step", "s", "of (a)", "of (b)", "MB", "vectors MB", "rest of (a)"]
    header += ["of (b) MB", "compose / read", "gradient / read"]
    rows = [
        ["", "(a) fine-tuning", f"{plain['seconds']:.2f}", "1.00", "", f"{plain['megabytes']:.0f}"]
    ]
    for count in counts:
        for kind in KINDS[1:]:
            rows.append(cells(found, kind, count))
    print("\n".join(table(header, [row + [""] * (len(header) - len(row)) for row in rows])))


def cells(found: Found, kind: str, count: int) -> list[str]:
    row, plain, sums = found[kind, count], found["fine-tuning", 0], found["naive", count]
    cost = [
        str(count),
        "(b) naive" if kind == "naive" else kind,
        f"{row['seconds']:.2f}",
        f"{row['seconds'] / plain['seconds']:.2f}",
        f"{row['seconds'] / sums['seconds']:.2f}",
        f"{row['megabytes']:.0f}",
    ]
    if kind == "naive":
        return cost
    rest = (row["megabytes"] - row["vectors"]) / plain["megabytes"]
    return [
        *cost,
        f"{row['vectors']:.0f}",
        f"{rest:.2f}",
        f"{row['megabytes'] / sums['megabytes']:.0%}",
        f"{row['forward'] / row['read']:.2f}",
        f"{row['backward'] / row['read']:.2f}",
    ]


def show_growth(found: Found, plot: Path | None) -> None:
    kinds = ("fp32", "int8", "rank 16")
    header = ["vectors", *(f"{kind} s" for kind in kinds), *(f"{kind} MB" for kind in kinds)]
    rows = []
    for count in GROWTH:
        row = [found.get((kind, count)) for kind in kinds]
        rows.append(
            [str(count)]
            + [f"{r['seconds']:.2f}" if r else "-" for r in row]
            + [f"{r['megabytes']:.0f}" if r else "-" for r in row]
        )
    print("\n".join(table(header, rows)))
    if plot:
        draw(found, kinds, plot)


def draw(found: Found, kinds: tuple[str, ...], path: Path) -> None:
    import altair as alt

    points = [
        {"vectors": count, "kind": kind, **found[kind, count]}
        for kind in kinds
        for count in GROWTH
        if (kind, count) in found
    ]
    axis = alt.Axis(values=list(GROWTH), format="d", grid=False)
    lines = alt.Chart(alt.Data(values=points), width=300, height=220).mark_line(point=True)
    across = alt.X("vectors:Q", scale=alt.Scale(type="log"), axis=axis)
    panels = [
        lines.encode(
            across,
            alt.Y(f"{key}:Q", title=f"step, {unit}"),
            alt.Color("kind:N", sort=list(kinds), title=None),
        )
        for key, unit in (("seconds", "s"), ("megabytes", "MB"))
    ]
    alt.hconcat(*panels).save(path, scale_factor=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--counts", type=int, nargs="+", default=[8, 21])
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--no-costs", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        kind, count = options.child
        print(json.dumps(measure(kind, int(count), options.steps, costs=not options.no_costs)))
        return
    if options.growth:
        kinds = ("fp32", "int8", "rank 16")
        cases = [(k, n) for k in kinds for n in GROWTH if n <= LARGEST.get(k, 64)]
        show_growth(collect(cases, 1, options.steps, costs=False), options.plot)
        return
    cases = [("fine-tuning", 0), *((k, n) for n in options.counts for k in KINDS[1:])]
    show(collect(cases, options.rounds, options.steps), tuple(options.counts))


if __name__ == "__main__":
    main()
