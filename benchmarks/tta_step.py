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

from atlas_cli.cli.fit import Fitting
from atlas_cli.cli.learning import LearningCommand, plan_recipe, resolve
from atlas_cli.cli.options import RunOptions
from atlas_cli.cli.tta import Adapting
from atlas_cli.learning.selection import Checkpoint, begin, learn
from atlas_cli.learning.setup import prepared

OBJECTIVES = ("ufm", "entropy", "balanced-entropy", "sar", "simclr")


@contextmanager
def steps_of(command: LearningCommand, flags: dict[str, Any]) -> Iterator[Iterator[Checkpoint]]:
    """The steps of a command, one at a time."""
    recipe = plan_recipe(command, ["builtin:terrain"], flags)
    inputs = resolve(command, recipe, RunOptions(device="cpu", threads=1))
    with prepared(inputs, command.objective_factory(), print) as ready:
        yield learn(ready.objective, ready.plan, begin(ready.objective, ready.plan))


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
    shared |= {"batch_size": options.batch_size, "epochs": 9, "split": "val"}
    seen: dict[str, list[float]] = {"fit": [], **{name: [] for name in OBJECTIVES}}
    with ExitStack() as stack:
        running = {
            name: stack.enter_context(
                steps_of(Adapting(), {**shared, "objective": name, "threshold": "0:0"})
            )
            for name in OBJECTIVES
        }
        flags = {**shared, "augment": "crop", "allow_target": True}
        running["fit"] = stack.enter_context(steps_of(Fitting(), flags))
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
