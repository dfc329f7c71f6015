"""A built-in task written out is a plain image folder."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import TIMEOUT
from PIL import Image
from warm import start

from atlas_cli.datasets import builtin
from atlas_cli.datasets.dataset import few_shot, open_dataset


@pytest.mark.parametrize("shots", [2, pytest.param(None, marks=pytest.mark.slow)])
def test_the_folder_holds_the_task(call, tmp_path: Path, shots: int | None):
    """Shots are for training, and those that few_shot draws; the other splits stay whole."""
    folder = tmp_path / "signs"
    result = call(
        "draw", "builtin:signs", "-o", folder, "--json", *(["--shots", shots] if shots else [])
    )
    task = builtin.TASKS["signs"]
    sizes = dict(task.sizes)
    if shots:
        sizes["train"] = shots * len(task.classes)
    assert json.loads(result.out) == {
        "folder": str(folder),
        "classes": len(task.classes),
        "images": sizes,
    }
    for split in ("train", "val", "test"):
        dataset = open_dataset(str(folder), split=split)
        assert dataset.classes == tuple(sorted(task.classes, key=lambda n: n.replace(" ", "_")))
        assert dataset.templates == task.templates
        wanted = open_dataset("builtin:signs", split=split)
        if shots and split == "train":
            wanted = few_shot(wanted, shots, seed=0)
        written = sorted(Path(sample.key).stem for sample in dataset.samples)
        assert written == sorted(sample.key for sample in wanted.samples)
        assert len(written) == sizes[split]
    sample = open_dataset(str(folder)).samples[0]
    index = int(Path(sample.key).stem)
    drawn = builtin.draw("signs", "test", index)
    assert np.array_equal(np.asarray(Image.open(folder / sample.key)), drawn)


def test_an_existing_folder_is_left_alone(call, photos: Path):
    before = sorted(photos.rglob("*"))
    result = call("draw", "builtin:digits", "-o", photos)
    assert (result.code, len(result.error_lines)) == (1, 1)
    assert "exists already" in result.err
    assert sorted(photos.rglob("*")) == before


def test_an_interrupted_drawing_leaves_nothing(tmp_path: Path):
    for _ in range(20):  # a drawing that was whole before it heard of the interrupt shows nothing
        process = start("draw", "builtin:digits", "-o", tmp_path / "x")
        while process.poll() is None and not list(tmp_path.iterdir()):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=TIMEOUT)
        if process.returncode:
            break
        shutil.rmtree(tmp_path / "x")
    assert (process.returncode, err) == (130, "atlas: interrupted\n")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_one_line(as_ordinary_user, tmp_path: Path):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    result = as_ordinary_user("draw", "builtin:digits", "-o", locked / "digits", "--shots", "1")
    said = f"atlas: error: {locked}/digits: cannot be written: Permission denied\n"
    assert (result.code, result.out, result.err) == (1, "", said)


def write_data(root: Path) -> Path:
    """Four images of one class, of which three have names that differ in their endings only."""
    (root / "cat").mkdir(parents=True)
    for number, name in enumerate(("a.png", "a.jpg", "a.bmp", "a-2.png")):
        Image.new("RGB", (8, 8), (80 * number,) * 3).save(root / "cat" / name)
    return root


def test_images_whose_names_differ_in_their_endings_are_all_written(call, tmp_path: Path):
    result = call("draw", write_data(tmp_path / "data"), "-o", tmp_path / "out", "--json")
    assert json.loads(result.out)["images"] == {"all": 4}
    written = sorted((tmp_path / "out" / "cat").iterdir())
    assert len({Image.open(path).getpixel((0, 0)) for path in written}) == len(written) == 4


def test_a_broken_image_ends_drawing_or_is_left_out_and_counted(call, tmp_path: Path):
    data = write_data(tmp_path / "data")
    (data / "cat" / "b.png").write_bytes(b"no image")
    result = call("draw", data, "-o", tmp_path / "out")
    assert (result.code, len(result.error_lines)) == (1, 1)
    assert not (tmp_path / "out").exists()
    given = ("--skip-broken", "--workers", "2", "--json")
    result = call("draw", data, "-o", tmp_path / "out", *given)
    assert json.loads(result.out)["images"] == {"all": 4}
    (line,) = result.error_lines
    assert "b.png: cannot be decoded" in line
    assert line.endswith("(left out)")
