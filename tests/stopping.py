"""Runs that are killed and go on."""

from __future__ import annotations

import random
import shutil
import signal
import time
from pathlib import Path

from warm import start


def kill_and_resume(given: list[str], folder: Path, times: int) -> int:
    """Kill a run some time after it has saved something, again and again; how often it was.

    A run that ends before it is killed, as one may on a busy machine, is begun again.
    """
    dice = random.Random(0)
    killed = 0
    for _ in range(times + 20):
        if killed == times:
            break
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
            killed = 0
        else:
            killed += 1
    return killed
