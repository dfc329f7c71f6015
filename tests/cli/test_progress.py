"""What a command says while it works: lines in a file, a bar on a terminal, nothing if quiet."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from conftest import TIMEOUT, write_images
from learned_runs import write_world

from atlas_cli.cli import console


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_world(tmp_path_factory.mktemp("world"))
    for split in ("train", "test"):
        write_images(root / "split" / split, ("cat", "dog"), 4, seed=len(split))
    return root


def given(world: Path, *more: str | Path) -> list[str | Path]:
    quick = ("--batch-size", "8", "--epochs", "2", "--min-steps", "2", "--lr", "0.3")
    models = ("--model", world / "base", "--vectors", world / "v")
    return ["fit", world / "split", *models, *quick, *more]


def test_a_file_gets_a_line_whenever_nothing_was_said_for_a_while(capsys, monkeypatch):
    monkeypatch.setattr(console, "PAUSE", 0.05)
    with console.Display(quiet=False) as display:
        display.phase("epoch 1/3", 30)
        display.advance(7, "loss 0.500")
        end = time.monotonic() + TIMEOUT
        said = ""
        while said.count("\n") < 2 and time.monotonic() < end:
            time.sleep(0.02)
            said += capsys.readouterr().err
    assert said.count("atlas: epoch 1/3, 7/30, loss 0.500 (") >= 2
    with console.Display(quiet=True) as display:
        display.phase("epoch 1/3", 30)
        time.sleep(0.3)
    assert capsys.readouterr().err == ""


def test_the_pause_is_less_than_half_a_minute():
    assert console.PAUSE < 29


def test_quiet_says_nothing_and_verbose_says_why(call, world):
    quiet, usual, verbose = (call(*given(world, *more)) for more in (("-q",), (), ("-v",)))
    assert (quiet.code, quiet.err) == (0, "")
    assert quiet.out == usual.out == verbose.out
    assert "trainable parameters: " in usual.err
    assert "device: cpu" not in usual.err
    assert "device: cpu; threads: " in verbose.err
    assert "training top-1: zero-shot" in usual.err
    held_out = call(*given(world, "--select", "holdout"))
    assert "validation top-1 on images held out: " in held_out.err


def test_training_accuracy_is_never_alone(call, world, tmp_path: Path):
    """With a folder and a test split, test images are scored; the eval command agrees."""
    alone = call(*given(world))
    assert "training top-1: zero-shot" in alone.err
    assert "training top-1 says little" in alone.err
    folder = tmp_path / "run"
    beside = call(*given(world, "-o", folder))
    (score,) = json.loads((folder / "result.json").read_text())["test"]
    changed = f"{score['zero_shot']:.2f} -> {score['learned']:.2f}"
    assert f"test top-1 {changed} on all 8 test images" in beside.err
    assert "says little" not in beside.err
    assert call("merge", folder, "-o", tmp_path / "m", "--memory", "4GB").code == 0
    told = call("eval", world / "base", tmp_path / "m", "--data", world / "split", "--json", "-q")
    found = [row["top1"] for row in json.loads(told.out)["results"]]
    assert found == [score["zero_shot"], score["learned"]]
    rows = [json.loads(line) for line in (folder / "images.jsonl").read_text().splitlines()]
    assert [row["split"] for row in rows] == ["train"] * 8 + ["test"] * 8
    right = [row["label"] == row["learned"] for row in rows[8:]]
    assert sum(right) * 12.5 == score["learned"]


def test_accuracy_on_test_images_has_no_digits_of_binary_fractions(call, tmp_path: Path):
    line = ("builtin:digits", "--model", "builtin:tiny", "--vectors", "builtin:digits")
    quick = ("--shots", "1", "--epochs", "1", "--min-steps", "1", "--batch-size", "8")
    assert call("fit", *line, "--allow-target", *quick, "-o", tmp_path / "run").code == 0
    (score,) = json.loads((tmp_path / "run" / "result.json").read_text())["test"]
    rows = [json.loads(row) for row in (tmp_path / "run" / "images.jsonl").read_text().splitlines()]
    right = sum(row["split"] == "test" and row["label"] == row["zero_shot"] for row in rows)
    assert score["zero_shot"] == right / 5  # percent of 500 images


def test_a_terminal_shows_a_summary_and_the_next_command(on_terminal, world, tmp_path: Path):
    for columns in (40, 100):
        folder = tmp_path / str(columns)
        shown = on_terminal(*given(world, "-o", folder), columns=columns, COLUMNS="", NO_COLOR="1")
        *_, summary = shown.replace("\r", "").rpartition("The run is in")
        summary = " ".join(summary.replace("\\\n", " ").split())
        assert f"atlas merge {folder} -o" in summary or f"atlas report {folder} -o" in summary
        assert "merge_method" not in shown
        phases = ("finding the model", "opening the model", "hashing the images", "decoding images")
        for phase in (*phases, "epoch 1/2", "epoch 2/2", "scoring test images"):
            assert phase in shown
        score = json.loads((folder / "result.json").read_text())["test"][0]
        assert f"{score['learned']:.2f}" in shown.rpartition("The run is in")[0]
