"""Measurements that are processes of their own, in random order, and the medians of them."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

Row = dict[str, float]


def clocks() -> tuple[float, float]:
    """Seconds of the wall and of all cores."""
    return time.perf_counter(), time.process_time()


def between(marks: Sequence[tuple[float, float]]) -> Row:
    """The medians of the time between marks, without the first."""
    spans = list(pairwise(marks))[1:]
    seconds, cpu = (
        statistics.median(after[clock] - start[clock] for start, after in spans) for clock in (0, 1)
    )
    return {"seconds": seconds, "cpu": cpu}


def measured(
    script: str, about: str, kinds: Sequence[str], measure: Callable[[str, int], Row]
) -> dict[str, Row] | None:
    """The medians for every kind; None in a process that measured one of them and printed it."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--only", nargs="+", default=list(kinds), choices=kinds, metavar="STEP")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.child, options.steps)))
        return None
    seen: dict[str, list[Row]] = {kind: [] for kind in options.only}
    for number in range(options.rounds):
        for kind in random.Random(number).sample(options.only, len(options.only)):
            command = [sys.executable, script, "--child", kind, "--steps", str(options.steps)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            seen[kind].append(json.loads(done.stdout))
            print(number, kind, seen[kind][-1], file=sys.stderr, flush=True)
    return {
        kind: {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        for kind, rows in seen.items()
    }
