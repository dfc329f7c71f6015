"""Print a table of faults: `python -m tests.faults --count 1000 --seed 0`.

Every fault has a seed of its own, to repeat it: `--only KIND --first SEED --count 1`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from . import commands, run
from .kinds import KINDS, SECONDS


def schedule(count: int, seed: int, only: str | None) -> list[tuple[str, int]]:
    """Kinds by their weights, in a random order, each with a seed of its own."""
    dice = random.Random(seed)
    if only:
        return [(only, seed * 1_000_003 + number) for number in range(count)]
    total = sum(weight for _, weight in KINDS.values())
    chosen = [
        kind for kind, (_, weight) in KINDS.items() for _ in range(-(-count * weight // total))
    ]
    dice.shuffle(chosen)
    return [(kind, seed * 1_000_003 + number) for number, kind in enumerate(chosen[:count])]


def table(outcomes: list[run.Outcome]) -> str:
    rows = defaultdict(list)
    for outcome in outcomes:
        rows[outcome.kind].append(outcome)
    lines = [
        "| kind of fault | faults | survived | lost | left over | wrong |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for kind, found in [*((kind, rows[kind]) for kind in KINDS if rows[kind]), ("all", outcomes)]:
        figures = (
            len(found),
            sum(o.survived for o in found),
            *(sum(bool(getattr(o, f)) for o in found) for f in ("lost", "left", "wrong")),
        )
        lines.append(f"| {kind} | {' | '.join(map(str, figures))} |")
    per_command = defaultdict(int)
    for outcome in outcomes:
        per_command[outcome.command] += 1
    listed = ", ".join(f"{name} {count}" for name, count in sorted(per_command.items()))
    return "\n".join([*lines, "", f"Commands: {listed}."])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=KINDS)
    parser.add_argument("--first", type=int, help="seed of the first fault, with --only")
    parser.add_argument("--skip", type=int, default=0, help="faults that an earlier run has tried")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--place", type=Path, help="keeps inputs and usual results for the next")
    parser.add_argument("--log", type=Path, help="a JSON line for every fault")
    parser.add_argument("--table", type=Path, help="print the table of a log, and run nothing")
    given = parser.parse_args()
    if given.table:
        facts = [json.loads(line) for line in given.table.read_text().splitlines()]
        print(table([run.Outcome(**one) for one in facts]))
        return 0
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_VERBOSITY": "error",
    }
    os.environ.pop("HF_TOKEN", None)
    import warm

    with tempfile.TemporaryDirectory(prefix="atlas-faults-") as name:
        place = (given.place or Path(name)).resolve()
        subprocess.run([*warm.atlas(), "--version"], check=True, capture_output=True)  # it is there
        _measure_server(warm)
        known = _prepared(place)
        inputs = place / "inputs"
        SECONDS.update({name: one.seconds for name, one in known.items()})
        work = schedule(given.count, given.seed, given.only)
        if given.first is not None:
            work = [(given.only, given.first + number) for number in range(given.count)]
        outcomes: list[run.Outcome] = []
        log = given.log.open("a") if given.log else None
        start = time.monotonic()

        def do(job: tuple[int, tuple[str, int]]) -> None:
            number, (kind, seed) = job
            own = place / f"fault{given.seed}-{number}"
            try:
                outcome = run.one_fault(kind, seed, known, inputs, own)
            except Exception as problem:  # a fault of the harness must not hide the others
                outcome = run.Outcome(kind, "harness", repr(problem), seed, wrong=["harness"])
            outcomes.append(outcome)
            facts = {**asdict(outcome), "err": outcome.err[-2000:]}
            if log:
                log.write(json.dumps(facts) + "\n")
                log.flush()
            if not outcome.survived:
                print(json.dumps(facts), file=sys.stderr, flush=True)
            shutil.rmtree(own, ignore_errors=True)

        with ThreadPoolExecutor(given.jobs) as pool:
            list(pool.map(do, list(enumerate(work))[given.skip :]))
        print(table(outcomes))
        print(f"\nSeed {given.seed}, {time.monotonic() - start:.0f} s, {given.jobs} at a time.")
    return 0 if all(outcome.survived for outcome in outcomes) else 1


def _measure_server(warm: object) -> None:
    """The address space of a warm process: what a limit of memory begins from."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if (
                b"warm.py" in path.read_bytes()
                and int((path.parent / "stat").read_text().rpartition(")")[2].split()[1])
                == os.getpid()
            ):
                pages = int((path.parent / "statm").read_text().split()[0])
                os.environ["FAULTS_SERVER_BYTES"] = str(pages * os.sysconf("SC_PAGE_SIZE"))
        except OSError:
            continue
    os.environ["FAULTS_MARK"] = str(os.getpid())


def _prepared(place: Path) -> dict[str, run.Clean]:
    """Inputs, a filled cache, and what every command gives when nothing happens."""
    inputs, usual = place / "inputs", place / "usual.json"
    if not usual.exists():
        inputs.mkdir(parents=True)
        commands.write_inputs(inputs)
        known = {one.name: run.clean(one, inputs, place / "clean") for one in commands.COMMANDS}
        _fill_cache(inputs, place)
        usual.write_text(json.dumps({name: asdict(one) for name, one in known.items()}))
    found = json.loads(usual.read_text())
    return {name: run.Clean(**one) for name, one in found.items()}


def _fill_cache(inputs: Path, place: Path) -> None:
    """A cache as earlier runs of all commands leave it."""
    folder = run.fresh(inputs, place / "filling")
    for command in commands.COMMANDS:
        for left in ("out", "out.safetensors", "out.html"):
            target = folder / left
            shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
        run.begin(command.arguments, folder).communicate()
    (folder / "cache").rename(place / "filled")


if __name__ == "__main__":
    sys.exit(main())
