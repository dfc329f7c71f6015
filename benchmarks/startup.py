"""Start-up time of `atlas --help` beside `python -c "import typer, rich"`, interleaved.

    python benchmarks/startup.py [--runs 20]

Prints one JSON object. The ratio is of medians; the goal is at most 1.6.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

COMMANDS = {
    "floor": [sys.executable, "-c", "import typer, rich"],
    "atlas_help": [sys.executable, "-m", "atlas_cli", "--help"],
    "atlas_mistake": [sys.executable, "-m", "atlas_cli", "eval", "builtin:tyni", "--data", "x"],
}


def seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, capture_output=True)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    runs = parser.parse_args().runs
    for command in COMMANDS.values():  # warm the page cache and the bytecode
        seconds(command)
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(runs):
        for name, command in COMMANDS.items():
            times[name].append(seconds(command))
    medians = {name: statistics.median(found) for name, found in times.items()}
    ratios = {name: round(medians[name] / medians["floor"], 2) for name in COMMANDS}
    print(json.dumps({"runs": runs, "median_seconds": medians, "ratio_to_floor": ratios}, indent=1))


if __name__ == "__main__":
    main()
