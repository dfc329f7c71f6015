"""What learning costs in several processes: counted in real runs, and by a model of the cost.

    python benchmarks/scale.py [--processes 1 2 4] [--vectors 48] [--width 384] [--steps 3]
    python benchmarks/scale.py --model [--flops F --read B --link-speed B --latency S]

Without --model, processes of torch.distributed take steps with random vectors, data parallel and
with vectors shared out, each run from the same start. A row has the bytes that a rank sends per
gradient, the messages and the FLOPs beside what the model of the cost says, the peak of a rank's
memory over its libraries as a share of pool plus model, and how far the coefficients are from one
process's. FLOPs are those that torch counts in the passes, and two for each number of a vector that
the loops in C are given.

With --model, prints bytes, messages, FLOPs, memory and time per gradient for 1 to 1,024 workers and
pools of 10 to 10,000 vectors of a ViT-B/32 in int8. Times follow from constants that are measured
here for a moment (one process's matrix products, reading of vectors, and sums between two
processes), unless they are given.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BATCH = 16
FACTS = 5  # the loss and the counts that go with a gradient
LAYERS = 24  # a block is a small part of a model, as in real ones


# The model of the cost --------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A model of so many numbers in so many blocks, vectors of it, and a batch."""

    parameters: int
    blocks: int
    vectors: int
    batch: int
    forward: float  # FLOPs per image
    stored: float = 4.0  # bytes per number of a vector


@dataclass(frozen=True)
class Cost:
    """Per rank and gradient."""

    sent: float
    block_bytes: float
    messages: int
    flops: float
    pool_read: float
    memory: float


def cost(task: Task, workers: int, *, sharded: bool) -> Cost:
    """Rings send 2 (W - 1) / W of what is summed. Passes count three times a forward pass."""
    ring = 2 * (workers - 1) / workers
    coefficients = task.vectors * task.blocks
    own = task.vectors / workers if sharded else task.vectors
    pool = own * task.parameters
    summed = sharded and workers > 1
    return Cost(
        sent=ring * 8 * (coefficients + FACTS),  # float64
        block_bytes=2 * ring * 4 * task.parameters if summed else 0.0,
        messages=(workers > 1) * (1 + (2 * task.blocks if summed else 0)),
        flops=3 * task.forward * task.batch / workers + 4 * pool,
        pool_read=2 * pool * task.stored,  # to compose, and for the gradient
        memory=pool * task.stored + 4 * task.parameters * 3,  # base, composed, gradients
    )


@dataclass(frozen=True)
class Constants:
    flops: float  # per second
    read: float  # bytes of vectors per second
    link: float  # bytes per second that a rank sends
    latency: float  # seconds per message and hop


def seconds(found: Cost, workers: int, speed: Constants) -> float:
    """One after the other: what is overlapped is gained on top."""
    hops = 2 * (workers - 1)
    sending = (found.sent + found.block_bytes) / speed.link
    computing = found.flops / speed.flops + found.pool_read / speed.read
    return computing + sending + found.messages * hops * speed.latency


def show_model(speed: Constants) -> None:
    print(
        f"{speed.flops / 1e9:,.1f} GFLOP/s, vectors read at {speed.read / 1e9:,.2f} GB/s, "
        f"{speed.link / 1e9:,.2f} GB/s and {speed.latency * 1e6:,.0f} us per message to another\n"
    )
    print(
        "| vectors | workers | shared out | sent, MB | messages | GFLOPs | memory, GB | seconds |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for vectors in (10, 100, 1_000, 10_000):
        task = Task(87_849_216, 152, vectors, 128, 8.8e9, stored=1.0)
        for workers in (1, 8, 64, 1024):
            for sharded in (False, True) if workers > 1 else (False,):
                found = cost(task, workers, sharded=sharded)
                sent = (found.sent + found.block_bytes) / 1e6
                print(
                    f"| {vectors:,} | {workers:,} | {'yes' if sharded else 'no'} | {sent:,.2f} "
                    f"| {found.messages} | {found.flops / 1e9:,.0f} | {found.memory / 1e9:,.2f} "
                    f"| {seconds(found, workers, speed):,.3g} |"
                )


# One rank ---------------------------------------------------------------------------------------


class Batches:
    """Random images with labels; every step has one part."""

    epoch_steps = 1

    def __init__(self, steps: int, width: int) -> None:
        import torch

        random = torch.Generator().manual_seed(1)
        self.steps, self.hits, self.seen = steps, 0, 0
        self.images = torch.randn(BATCH, width, generator=random)
        self.targets = torch.randn(BATCH, width, generator=random)

    def batches(self, step: int) -> list[tuple[Any, Any]]:
        return [(self.images, RowLoss(self.targets))]

    def accuracy(self) -> float:
        return 0.0

    def diverged(self) -> bool:
        return False


class RowLoss:
    """A loss that is a sum over images."""

    def __init__(self, targets: Any) -> None:
        self.targets = targets

    def __call__(self, features: Any) -> Any:
        return (features - self.targets).square().mean(1).sum() / BATCH

    def of_rows(self, rows: list[int]) -> RowLoss:
        return RowLoss(self.targets[rows])


def rank(count: int, width: int, steps: int, *, sharded: bool) -> dict[str, Any]:
    """Take some steps as one of the processes that the environment tells of.

    The first are with a miniature: what libraries load and keep is not counted.
    """
    import torch

    from atlas_cli.learning import ranks

    torch.set_num_threads(1)
    if int(os.environ["WORLD_SIZE"]) > 1:
        ranks.join("cpu")
    learn(count, 8, 1, sharded=sharded)
    ranks.sent.update(dict.fromkeys(ranks.sent, 0))
    before = status("VmRSS")
    result = learn(count, width, steps, sharded=sharded)
    result["memory"] = status("VmHWM") - before
    ranks.leave()
    return result


def learn(count: int, width: int, steps: int, *, sharded: bool) -> dict[str, Any]:
    """Take some steps with random vectors of a random model; what was counted."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from atlas_cli.core.compose import Composition, by_block, stack_blocks
    from atlas_cli.core.optimizers import CoefficientOptimizer, OptimizerConfig
    from atlas_cli.core.storage import Dense
    from atlas_cli.learning import ranks
    from atlas_cli.learning import sharded as sharing
    from atlas_cli.learning.loop import descend
    from atlas_cli.models.composed import ComposedModel

    torch.manual_seed(0)
    tower = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(LAYERS)))
    base = {name: tensor.detach() for name, tensor in tower.named_parameters()}
    shapes = {name: tuple(tensor.shape) for name, tensor in base.items()}
    rows = sharing.own_rows(count) if sharded else range(count)
    stacks = {}
    for name, shape in shapes.items():
        found = {}
        for row in rows:
            random = torch.Generator().manual_seed(1000 * row + len(stacks))
            found[row] = Dense(0.01 * torch.randn(shape, generator=random))
        stacks[name] = stack_blocks(found)
        del found
    kind = sharing.sharded(ComposedModel) if sharded else ComposedModel
    model = kind(tower, Composition(base, stacks, by_block(shapes), count))
    start = torch.zeros(model.composition.shape)
    optimizer = CoefficientOptimizer(start, steps, OptimizerConfig(rate=0.1))
    composing = count_composition()
    began = time.perf_counter()
    with FlopCounterMode(display=False) as passes:
        for _ in descend(model, optimizer, Batches(steps, width)):
            pass
    taken = (time.perf_counter() - began) / steps
    result: dict[str, Any] = {"sent": ranks.sent, "seconds": taken}
    result |= {"values": optimizer.values.flatten().tolist(), "blocks": len(shapes)}
    result["flops"] = (passes.get_total_flops() + sum(composing)) / steps
    result["parameters"] = sum(tensor.numel() for tensor in base.values())
    return result


def count_composition() -> list[int]:
    """From now on, the FLOPs of each sum and each product with vectors."""
    from atlas_cli.native import kernels

    found: list[int] = []

    def counted(work: Any) -> Any:
        def run(vectors: Any, *given: Any) -> Any:
            found.append(sum(2 * vector.numel() for vector in vectors))
            return work(vectors, *given)

        return run

    for name in ("add_vectors", "dot_vectors"):
        setattr(kernels, name, counted(getattr(kernels, name)))
    return found


def status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def start(processes: int, given: list[str]) -> list[dict[str, Any]]:
    """The results of so many ranks."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    shared |= {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--as-rank", *given]
    begun = [
        subprocess.Popen(
            command, env=os.environ | shared | {"RANK": str(n)}, stdout=subprocess.PIPE, text=True
        )
        for n in range(processes)
    ]
    return [json.loads(process.communicate()[0].splitlines()[-1]) for process in begun]


def show_runs(processes: list[int], vectors: int, width: int, steps: int) -> None:
    print(
        "| processes | shared out | bytes | by the model | blocks, MB | by the model | messages "
        "| by the model | GFLOPs | by the model | memory, MB | of pool + model | s per step "
        "| difference |"
    )
    print("| --- " * 14 + "|", flush=True)
    given = ["--vectors", str(vectors), "--width", str(width), "--steps", str(steps)]
    alone: list[float] = []
    for count in processes:
        for sharded in (False, True) if count > 1 else (False,):
            found = start(count, [*given, *(["--shard"] if sharded else [])])
            one = found[0]
            alone = alone or one["values"]
            task = Task(one["parameters"], one["blocks"], vectors, BATCH, 2.0 * one["parameters"])
            wanted = cost(task, count, sharded=sharded)
            sent = {key: value / steps for key, value in one["sent"].items()}
            whole = 4 * one["parameters"] * (vectors + 1)
            memory = max(each["memory"] for each in found)
            apart = max(abs(a - b) for a, b in zip(alone, one["values"], strict=True))
            print(
                f"| {count} | {'yes' if sharded else 'no'} | {sent['bytes']:,.0f} "
                f"| {wanted.sent:,.0f} | {sent['blocks'] / 1e6:,.1f} "
                f"| {wanted.block_bytes / 1e6:,.1f} | {sent['messages']:,.0f} | {wanted.messages} "
                f"| {one['flops'] / 1e9:.3f} | {wanted.flops / 1e9:.3f} "
                f"| {memory / 1e6:,.0f} | {100 * memory / whole:.0f} % | {one['seconds']:.2f} "
                f"| {apart:.1e} |",
                flush=True,
            )


# Constants --------------------------------------------------------------------------------------


def measured() -> Constants:
    """One process's speed, and that of sums between two."""
    import torch

    torch.set_num_threads(1)
    left = torch.randn(1024, 1024)
    flops = 2 * 1024**3 / best(lambda: left @ left)
    vectors, weights = torch.randn(16, 1 << 20), torch.randn(16)
    read = vectors.numel() * 4 / best(lambda: weights @ vectors)
    large, small = (found["seconds"] for found in start(2, ["--link"])[0]["sums"])
    return Constants(flops, read, (1 << 22) / max(large - small, 1e-9), small / 2)


def best(work: Any) -> float:
    found = []
    for _ in range(9):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return min(found)


def link() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from atlas_cli.learning import ranks

    ranks.join("cpu")
    found = []
    for size in (1 << 20, 1):
        tensor = torch.zeros(size)
        found.append({"seconds": best(lambda tensor=tensor: dist.all_reduce(tensor))})
    ranks.leave()
    return {"sums": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--vectors", type=int, default=48)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--model", action="store_true", help="print the model of the cost")
    for name in ("flops", "read", "link-speed", "latency"):
        parser.add_argument(f"--{name}", type=float)
    for name in ("as-rank", "shard", "link"):
        parser.add_argument(f"--{name}", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.as_rank:
        sizes = (given.vectors, given.width, given.steps)
        print(json.dumps(link() if given.link else rank(*sizes, sharded=given.shard)))
    elif given.model:
        named = (given.flops, given.read, given.link_speed, given.latency)
        known = all(one is not None for one in named)
        show_model(Constants(*named) if known else measured())
    else:
        show_runs(given.processes, given.vectors, given.width, given.steps)


if __name__ == "__main__":
    main()
