"""Runs that are killed and go on, and disks that are full."""

from __future__ import annotations

import random
import resource
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from warm import start

LONGEST = 20_000  # epochs


def kill_and_resume(given: list[str], folder: Path, times: int) -> list[str]:
    """Kill a run some time after it has saved something, again and again; the words it was given.

    A run that ends before it is killed, as one may on a fast or a busy machine, is begun again with
    twice as many epochs.
    """
    dice = random.Random(0)
    given, killed = list(given), 0
    epochs = len(given) - given[::-1].index("--epochs")  # the last word of that name is obeyed
    while killed < times:
        state = folder / "state.safetensors"
        before = state.stat().st_mtime_ns if state.exists() else 0
        process = start(*given, "-o", folder, "--resume")
        while process.poll() is None:
            if state.exists() and state.stat().st_mtime_ns != before:
                time.sleep(dice.uniform(0, 0.1))
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.005)
        _, err = process.communicate()
        if process.returncode != -signal.SIGKILL:
            assert process.returncode == 0, err
            shutil.rmtree(folder)
            given[epochs] = str(2 * int(given[epochs]))
            assert int(given[epochs]) < LONGEST, "a run ends before it can be killed"
            killed = 0
        else:
            killed += 1
    return given


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file of this process can grow beyond a size; as on a disk that is full."""
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
