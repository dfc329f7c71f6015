"""Time of a step of `tta` beside a step of `fit` with the same batch.

    python benchmarks/tta_step.py VECTORS [--rounds 9] [--batch-size 64]

The built-in model, the vectors in a folder, images of one task. Steps of either command take turns
within one process, so that both see the same machine. `ufm` takes every prediction for sure, which
is the most it can have to do: all images twice, once without gradients. Prints a markdown table.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from atlas_cli.learning.fit import Fitting
from atlas_cli.learning.loop import Checkpoint, CoefficientTrainer
from atlas_cli.learning.run import LearningVerb, RunOptions, prepare
from atlas_cli.learning.tta import Adapting
from atlas_cli.recipes.fit import FitRecipe
from atlas_cli.recipes.tta import TtaRecipe

OBJECTIVES = ("ufm", "entropy", "balanced-entropy", "sar", "simclr")


@contextmanager
def steps_of(verb: LearningVerb) -> Iterator[Iterator[Checkpoint]]:
    """The steps of a verb, one at a time."""
    with prepare(verb, RunOptions(device="cpu", threads=1)) as ready:
        trainer = CoefficientTrainer(ready.objective, ready.policy)
        yield trainer.learn(trainer.begin())


def adapting(keys: dict[str, Any]) -> Adapting:
    """Every prediction counts as sure."""
    return Adapting(TtaRecipe(**{**keys, "threshold": "0:0"}))


def clocked(steps: Iterator[Checkpoint]) -> float:
    """Seconds of CPU that one step takes."""
    start = time.process_time()
    next(steps)
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("vectors")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batch-size", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    shared: dict[str, Any] = {"model": "builtin:tiny", "vectors": [options.vectors]}
    shared |= {"data": "builtin:terrain"}
    shared |= {"batch_size": options.batch_size, "epochs": 9, "split": "val"}
    seen: dict[str, list[float]] = {"fit": [], **{name: [] for name in OBJECTIVES}}
    with ExitStack() as stack:
        running = {
            name: stack.enter_context(steps_of(adapting({**shared, "objective": name})))
            for name in OBJECTIVES
        }
        flags = {**shared, "augment": "crop", "allow_target": True}
        running["fit"] = stack.enter_context(steps_of(Fitting(FitRecipe(**flags))))
        for steps in running.values():
            next(steps)
        for _ in range(options.rounds):
            for name in seen:
                seen[name].append(clocked(running[name]))
    middle = {name: statistics.median(found) for name, found in seen.items()}
    print("| step of | ms of CPU | beside fit |\n| --- | --- | --- |")
    for name, value in middle.items():
        print(f"| {name} | {1000 * value:.0f} | {value / middle['fit']:.2f} |")


if __name__ == "__main__":
    main()
