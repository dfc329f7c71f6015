"""A built-in task written out is a plain image folder."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import numpy as np
from conftest import TIMEOUT
from PIL import Image
from warm import start

from atlas_cli.datasets import builtin
from atlas_cli.datasets.dataset import few_shot, open_dataset


def test_the_folder_holds_the_task(call, tmp_path: Path):
    folder = tmp_path / "signs"
    result = call("draw", "builtin:signs", "-o", folder, "--json")
    task = builtin.TASKS["signs"]
    assert json.loads(result.out) == {
        "folder": str(folder),
        "classes": len(task.classes),
        "images": dict(task.sizes),
    }
    for split in ("train", "val", "test"):
        dataset = open_dataset(str(folder), split=split)
        assert dataset.classes == tuple(sorted(task.classes, key=lambda n: n.replace(" ", "_")))
        assert dataset.templates == task.templates
        assert len(dataset.samples) == task.sizes[split]
    sample = open_dataset(str(folder)).samples[0]
    index = int(Path(sample.key).stem)
    drawn = builtin.draw("signs", "test", index)
    assert np.array_equal(np.asarray(Image.open(folder / sample.key)), drawn)


def test_shots_are_those_that_few_shot_draws(call, tmp_path: Path):
    assert call("draw", "builtin:digits", "-o", tmp_path / "d", "--shots", "2", "-q").code == 0
    written = {Path(s.key).stem for s in open_dataset(f"{tmp_path}/d", split="train").samples}
    drawn = few_shot(open_dataset("builtin:digits", split="train"), 2, seed=0)
    assert written == {sample.key for sample in drawn.samples}


def test_an_existing_folder_is_left_alone(call, photos: Path):
    before = sorted(photos.rglob("*"))
    result = call("draw", "builtin:digits", "-o", photos)
    assert (result.code, len(result.error_lines)) == (1, 1)
    assert "exists already" in result.err
    assert sorted(photos.rglob("*")) == before


def test_an_interrupted_drawing_leaves_nothing(tmp_path: Path):
    process = start("draw", "builtin:digits", "-o", tmp_path / "x")
    deadline = time.monotonic() + TIMEOUT
    while not list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, err) == (130, "atlas: interrupted\n")
    assert list(tmp_path.iterdir()) == []
