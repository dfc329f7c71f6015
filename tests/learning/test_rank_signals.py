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
from test_ranks import check_same
from warm import COLD

FIT = ["fit", "photos", "--model", "base", "--vectors", "v", "--batch-size", "8", "--epochs", "30"]
FIT += ["--lr", "0.1", "--augment", "none", "--quiet", "--resume"]
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


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A world, in which `whole` is a run that no signal reached."""
    world = write_world(tmp_path_factory.mktemp("undisturbed"))
    process = begin(world, "whole", 2)
    _, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, err
    return world


# Two signals, or thirty to five runs. The numbers of ranks take turns; the last ends the run.
CASES = [pytest.param(5, [2], [signal.SIGTERM, signal.SIGKILL], marks=pytest.mark.slow)]
CASES += [
    pytest.param(seed, ranks, [*CODES, *CODES], marks=pytest.mark.campaign)
    for seed, ranks in enumerate([[2], [2], [2, 3], [2], [3, 2, 1]])
]


@pytest.mark.parametrize(("seed", "ranks", "signals"), CASES)
def test_after_signals_no_process_is_left_and_the_run_goes_on(
    undisturbed: Path, seed: int, ranks: list[int], signals: list[signal.Signals]
):
    world, folder = undisturbed, f"run{seed}"  # recipes name the folders of a world
    chance = random.Random(seed)
    signals = chance.sample(signals, len(signals))
    for step, number in enumerate(signals):
        count = max(2, ranks[step % len(ranks)])  # --launch 1 has no ranks
        for _ in range(5):  # one that was done before it heard of the signal shows nothing
            process = begin(world, folder, count)
            if disturb(process, world / folder / "state.safetensors", chance, number):
                break
            shutil.rmtree(world / folder)
        else:
            pytest.fail(f"the run was always done before {number!r} reached it")
    process = begin(world, folder, ranks[-1])
    _, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, err
    if ranks == [2]:
        for name in ("recipe.yaml", "metrics.jsonl"):
            assert (world / folder / name).read_bytes() == (world / "whole" / name).read_bytes()
    check_same(world / "whole", world / folder)
