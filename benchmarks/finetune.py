"""Time and memory of a step of `atlas finetune`, beside a loop written by hand in PyTorch.

    python benchmarks/finetune.py [--rounds 3] [--steps 4]

A ViT-B/32 image tower with random weights, batch 16, random images, all weights trained. Every
measurement is a process of its own, in random order; memory is the peak of resident memory over
the interpreter with torch and open_clip loaded. Prints a markdown table with ratios to the loop
by hand; the goal is at most 1.1 in both. The other rows are ways to take less memory.
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
from pathlib import Path
from typing import Any

from fit import resident, status, table

BATCH = 16
OURS = {
    "ours": {},
    "ours, activations computed twice": {"checkpoint": True},
    "ours, in 4 parts": {"parts": 4},
    "ours, LayerNorms only": {"tune": "layernorm"},
}
KINDS = ("by hand", *OURS)


# One measurement, in a process of its own -------------------------------------------------------


def measure(kind: str, steps: int) -> dict[str, float]:
    import torch

    from atlas_cli.vision import import_open_clip

    open_clip = import_open_clip()
    torch.manual_seed(0)
    before = resident()
    logging.disable(logging.WARNING)
    tower = open_clip.create_model("ViT-B-32", force_quick_gelu=True).visual
    images, labels = torch.randn(BATCH, 3, 224, 224), torch.randint(10, (BATCH,))
    head = torch.randn(10, 512)
    if kind == "by hand":
        moments = by_hand(tower, images, labels, head)
    else:
        moments = ours(tower, images, labels, head, steps + 1, **OURS[kind])
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of making the model
    seconds = [timed(lambda: next(moments)) for _ in range(steps + 1)][1:]
    peak = status("VmHWM") - before
    return {"seconds": statistics.median(seconds), "megabytes": peak / 1e6}


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def by_hand(tower: Any, images: Any, labels: Any, head: Any) -> Iterator[None]:
    import torch
    import torch.nn.functional as F

    optimizer = torch.optim.AdamW(tower.parameters(), lr=1e-5, weight_decay=0.1)
    while True:
        logits = F.normalize(tower(images), dim=-1) @ head.T
        loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(tower.parameters(), 1.0)
        optimizer.step()
        loss.item()
        yield


def ours(
    tower: Any,
    images: Any,
    labels: Any,
    head: Any,
    steps: int,
    *,
    tune: str = "all",
    checkpoint: bool = False,
    parts: int = 1,
) -> Iterator[object]:
    from atlas_cli.core.descent import Descent, WeightDescender
    from atlas_cli.core.objectives import cross_entropy, logits_of
    from atlas_cli.learn import Steady, descend
    from atlas_cli.tunable import TunedTower, checkpoint_activations, names_of

    class Batch(Steady):
        """The same images again and again."""

        epoch_steps = steps

        def __init__(self) -> None:
            self.steps = steps

        def batches(self, step: int) -> Iterator[tuple[Any, Any]]:
            for some, own in zip(images.chunk(parts), labels.chunk(parts), strict=True):

                def loss_of(features: Any, own: Any = own) -> Any:
                    return cross_entropy(logits_of(features, head), own) / parts

                yield some, loss_of

        def accuracy(self) -> float:
            return 0.0

    tower.requires_grad_(False)
    if checkpoint:
        checkpoint_activations(tower)
    engine = TunedTower(tower, names_of(tower, tune))
    walker = WeightDescender(engine.values, steps, Descent(rate=1e-5))
    return descend(engine, walker, Batch())


# All of them ------------------------------------------------------------------------------------


def run(kind: str, steps: int) -> dict[str, float]:
    """A measurement by a fresh interpreter."""
    command = [sys.executable, __file__, "--child", kind, "--steps", str(steps)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def collect(rounds: int, steps: int) -> dict[str, dict[str, float]]:
    """The median of every measurement over some rounds, each in another order."""
    seen: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for number in range(rounds):
        for kind in random.Random(number).sample(KINDS, len(KINDS)):
            seen[kind].append(run(kind, steps))
            print(number, kind, seen[kind][-1], file=sys.stderr, flush=True)
    return {
        kind: {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        for kind, rows in seen.items()
    }


def show(found: dict[str, dict[str, float]]) -> None:
    plain = found["by hand"]
    rows = [
        [
            kind,
            f"{row['seconds']:.2f}",
            f"{row['seconds'] / plain['seconds']:.2f}",
            f"{row['megabytes']:.0f}",
            f"{row['megabytes'] / plain['megabytes']:.2f}",
        ]
        for kind, row in found.items()
    ]
    print("\n".join(table(["step", "s", "ratio", "MB", "ratio"], rows)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.child, options.steps)))
    else:
        show(collect(options.rounds, options.steps))


if __name__ == "__main__":
    main()
