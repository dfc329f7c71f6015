"""Images that cannot be decoded, in commands that learn: an error, or left out; and workers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import Result, write_images
from learned_runs import write_world

QUICK = ("--batch-size", "6", "--epochs", "1")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("world"))


def lines_of(world: Path, data: Path) -> dict[str, list[str | Path]]:
    """A quick command line of every command that learns from images."""
    vectors = ("--vectors", world / "v", "--min-steps", "2")
    given = ("--model", world / "base", *QUICK)
    return {
        "fit": ["fit", data, *given, *vectors],
        "add": ["add", data, *given, *vectors],
        "negate": ["negate", data, *given, *vectors, "--control", world / "photos"],
        "tta": ["tta", data, *given, *vectors],
        "finetune": ["finetune", data, *given, "--vector", world / "own.safetensors", "--force"],
    }


def test_learning_leaves_out_broken_images_if_it_is_told_to(call, world: Path, tmp_path: Path):
    """What is learned is what is learned where the broken images are not there at all."""
    data = write_images(tmp_path / "data", count=4)
    broken = data / "dog" / "0.png"
    for command, line in lines_of(world, data).items():
        broken.write_bytes(b"broken")
        refused = call(*line)
        assert (refused.code, refused.out) == (1, ""), command
        (error,) = [row for row in refused.error_lines if "error" in row]
        assert f"{broken}: cannot be decoded" in error
        assert "(--skip-broken leaves such images out)" in error
        skipped = call(*line, "--skip-broken", "--workers", "0")
        assert "# Learned by" in skipped.out or command == "finetune", skipped.err
        assert skipped.err.count(f"{broken}: cannot be decoded") == 1
        assert "decoded" not in call(*line, "--skip-broken", "-q").err
        first = written(world, skipped)
        broken.unlink()
        assert written(world, call(*line, "--workers", "3")) == first, command


def written(world: Path, result: Result) -> tuple[int, str, bytes]:
    own = world / "own.safetensors"
    return result.code, result.out, own.read_bytes() if own.exists() else b""


def test_test_images_that_are_broken_are_left_out_too(call, world: Path, tmp_path: Path):
    for split in ("train", "test"):
        write_images(tmp_path / "data" / split, count=4, seed=len(split))
    (tmp_path / "data" / "test" / "cat" / "1.png").write_bytes(b"broken")
    line = lines_of(world, tmp_path / "data")["fit"]
    assert call(*line, "-o", tmp_path / "no").code == 1
    assert not (tmp_path / "no").exists()
    assert call(*line, "-o", tmp_path / "run", "--skip-broken").code == 0
    (score,) = json.loads((tmp_path / "run" / "result.json").read_text())["test"]
    assert (score["images"], score["of"]) == (7, 8)


def test_nothing_is_learned_where_every_image_is_broken(call, world: Path, tmp_path: Path):
    data = write_images(tmp_path / "data", count=2)
    for path in data.rglob("*.png"):
        path.write_bytes(b"broken")
    refused = call(*lines_of(world, data)["fit"], "--skip-broken", "-q")
    assert (refused.code, refused.out) == (1, "")
    assert refused.error_lines == [f"atlas: error: {data}: none of its 4 images could be decoded"]
