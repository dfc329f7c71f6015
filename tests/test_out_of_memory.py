"""A device that runs out of memory: the same coefficients, or one line and exit code 1."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import TIMEOUT
from faults import messages
from learned_runs import write_world

QUICK = ["--batch-size", "8", "--epochs", "1", "--min-steps", "2", "--lr", "0.1"]
LEARN = ["--model", "base", "--vectors", "v", *QUICK]
ADAPT = ["tta", "photos", *LEARN, "--select", "last"]

# Runs of one command on the pretend device. Each item says which allocation fails, or how many
# bytes there are in parts of what the undisturbed run took at most.
PROGRAM = """
import contextlib, io, json, os, sys
import pretend_device as device
device.install()
from atlas_cli.cli.app import main
given, faults, parts = json.loads(sys.argv[1])

def run(name):
    err = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        code = main([*given, "--device", "pretend", "-o", name])
    return [code, err.getvalue()]

found = [run("whole")]
device.fail_at(-1); device.peak()
found.append(run("counted"))
count, most = device.fail_at(-1), device.peak()
for number in range(faults):
    device.fail_at(1 + count * number // faults)
    found.append(run(f"fault{number}"))
device.fail_at(-1)
for part in parts:
    device.limit(int(part * most))
    found.append(run(f"part{part}"))
    device.limit(0)
print(json.dumps([count, most, found]), flush=True)
os._exit(0)  # without taking apart the threads of a device that failed
"""


def runs(world: Path, given: list[str], faults: int, parts: list[float]) -> tuple[int, list]:
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", messages.RECORD + PROGRAM, json.dumps([given, faults, parts])],
        cwd=world,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=4 * TIMEOUT,
    )
    assert done.returncode == 0, done.stderr
    count, _, found = json.loads(done.stdout)
    assert [code for code, _ in found[:2]] == [0, 0], found[:2]
    return count, found[2:]


def table(folder: Path) -> dict[str, dict[str, float]]:
    return yaml.safe_load((folder / "recipe.yaml").read_text())["coefficients"]


def difference(ours: Path, theirs: Path) -> float:
    mine, others = table(ours), table(theirs)
    return max(abs(mine[v][b] - value) for v, row in others.items() for b, value in row.items())


def check(world: Path, name: str, code: int, err: str) -> bool:
    """Whether a run went on with fewer images at a time; else it ended as it should."""
    less = [line for line in err.splitlines() if "images at a time" in line]
    assert "Traceback" not in err
    if code == 0:
        assert difference(world / name, world / "whole") < 1e-5, name
        return bool(less)
    assert code == 1, err
    assert "memory" in err.splitlines()[-1]
    assert len([line for line in err.splitlines() if "error:" in line]) == 1
    assert not (world / name / "recipe.yaml").exists()
    return False


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--device-memory", "0"]])
def test_whichever_allocation_fails_the_result_is_the_same_or_there_is_one_line(
    tmp_path: Path, more: list[str]
):
    world, parts = write_world(tmp_path), [0.95, 0.85, 0.7]
    count, found = runs(world, [*ADAPT, *more], 40, parts)
    assert any(value for row in table(world / "whole").values() for value in row.values())
    names = [f"fault{n}" for n in range(40)] + [f"part{part}" for part in parts]
    went_on = [check(world, name, *one) for name, one in zip(names, found, strict=True)]
    ended = sum(code == 0 for code, _ in found)
    print(f"{count} allocations; of {len(found)} runs {ended} ended well, {sum(went_on)} with less")
    assert sum(went_on) > 5
