"""Signals to the launcher and to its ranks: nothing stays behind, and --resume goes on."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from conftest import TIMEOUT
from learned_runs import write_world
from test_ranks import difference
from warm import COLD

FIT = ["fit", "photos", "--model", "base", "--vectors", "v", "--batch-size", "8", "--epochs", "30"]
FIT += ["--lr", "0.1", "--quiet", "--resume"]
CODES = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: 1}


def begin(world: Path, folder: str, count: int) -> subprocess.Popen[str]:
    more = ["--launch", str(count)] if count > 1 else []
    pipe = subprocess.PIPE
    given = [*COLD, *FIT, "-o", folder, *more]
    return subprocess.Popen(given, cwd=world, stdout=pipe, stderr=pipe, text=True)


def children(parent: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(path.parent.name))
    return sorted(found)


def is_alive(process: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def disturb(process: subprocess.Popen[str], state: Path, chance: random.Random, number: int):
    """Send a signal to the launcher or to a rank at some moment; the exit code that is right."""
    wait = chance.choice(("ranks", "state"))
    before = state.stat().st_mtime_ns if state.exists() else 0
    while process.poll() is None:
        ranks = children(process.pid)
        saved = state.exists() and state.stat().st_mtime_ns != before
        if len(ranks) >= 2 and (wait == "ranks" or saved):
            break
        time.sleep(0.02)
    time.sleep(chance.uniform(0, 1))
    ranks = children(process.pid)
    # Python itself prints a traceback if it is interrupted while it starts.
    early = wait == "ranks" and number == signal.SIGINT
    target = process.pid if early else chance.choice([process.pid, *ranks])
    launcher = target == process.pid
    with contextlib.suppress(ProcessLookupError):
        os.kill(target, number)
    _, err = process.communicate(timeout=TIMEOUT)
    end = time.monotonic() + TIMEOUT
    while any(map(is_alive, ranks)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not any(map(is_alive, ranks)), "an orphan"
    wanted = -signal.SIGKILL if launcher and number == signal.SIGKILL else CODES[number]
    if process.returncode == 0:
        return False  # it was done before
    assert process.returncode == wanted, (number, launcher, process.returncode, err)
    assert "Traceback" not in err, err
    assert len(err.splitlines()) <= 1, err
    print(signal.Signals(number).name, "launcher" if launcher else "rank", process.returncode)
    return True


@pytest.mark.slow
def test_thirty_signals_leave_no_process_and_a_run_that_goes_on(tmp_path: Path):
    world = write_world(tmp_path)
    chance = random.Random(0)
    whole = begin(world, "whole", 2)
    _, err = whole.communicate(timeout=TIMEOUT)
    assert whole.returncode == 0, err
    texts = ("recipe.yaml", "metrics.jsonl")
    wanted = {name: (world / "whole" / name).read_bytes() for name in texts}
    signals = [*CODES, *CODES]
    for chain, counts in enumerate([[2], [2], [2, 3], [2], [3, 2, 1]]):
        folder = f"run{chain}"
        chance.shuffle(signals)
        for step, number in enumerate(signals):
            count = max(2, counts[step % len(counts)])  # --launch 1 has no ranks
            for _ in range(5):  # one that was done before it heard of the signal shows nothing
                process = begin(world, folder, count)
                if disturb(process, world / folder / "state.safetensors", chance, number):
                    break
                shutil.rmtree(world / folder)
        process = begin(world, folder, counts[-1])
        _, err = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 0, err
        if counts == [2]:
            assert {name: (world / folder / name).read_bytes() for name in texts} == wanted
        assert difference(world / "whole", world / folder) < 1e-5
