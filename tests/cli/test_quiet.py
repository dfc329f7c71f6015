"""-q: nothing on stderr but errors, in every command that has it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from conftest import Result, write_images
from learned_runs import learn, write_world
from merge_runs import ROOMY

from atlas_cli.cli.app import list_commands

QUICK = ("--batch-size", "8", "--epochs", "1")
CLASSIFIER = ("--classifier", "--format", "torch", "--data")
SILENT = {"draw", "zoo"}  # these have nothing to say here without -q, unless they take long
ELSEWHERE = {"demo"}  # takes a minute: see test_demo.py


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_world(tmp_path_factory.mktemp("world"))
    (write_images(root / "data", count=3) / "cat" / "note.xyz").write_text("no image")
    learn(root, "fit", root / "run")
    return root


def lines_of(world: Path, made: Path) -> dict[str, list[str | Path]]:
    """A line of every command, which warns or notes something unless it is to be quiet."""
    (made / "cache").mkdir(parents=True)
    (made / "cache" / "heads").write_text("a file where the folder should be")
    os.environ["ATLAS_CACHE"] = str(made / "cache")
    base, data, vectors = world / "base", world / "data", ("--vectors", world / "v")
    learning = ("--model", base, *QUICK)
    return {
        "eval": ["eval", base, "--data", data],
        "draw": ["draw", data, "-o", made / "drawn"],
        "finetune": ["finetune", data, *learning, "-o", made / "tuned"],
        "extract": ["extract", base, world / "tuned0", "-o", made / "v.safetensors"],
        "fit": ["fit", *learning, *vectors, data],
        "negate": ["negate", data, *learning, *vectors, "--control", world / "photos"],
        "add": ["add", data, *learning, *vectors],
        "tta": ["tta", data, *learning, *vectors],
        "inspect": ["inspect", "--base", base, world / "tuned0", world / "tuned1"],
        "merge": ["merge", world / "run", "-o", made / "merged", *ROOMY, "--async-write"],
        "export": ["export", base, *CLASSIFIER, data, "-o", made / "classifier"],
        "push": ["push", world / "run", "owner/name", "--dry-run"],
        "zoo": ["zoo"],
    }


def test_quiet_commands_write_errors_alone(call, world: Path, tmp_path: Path):
    """Zero-shot heads cannot be cached, which every command that makes one warns of."""
    app = list_commands()
    having = {
        str(one.name)
        for one in app.registered_commands
        if one.callback and "quiet" in one.callback.__annotations__
    }
    said: dict[str, Result] = {}
    for name, line in lines_of(world, tmp_path / "loud").items():
        said[name] = call(*line)
        worked = said[name].code == 0 or name == "negate"  # noise has little to forget
        assert worked, said[name].err
    assert set(said) | ELSEWHERE == having
    assert {name for name, one in said.items() if not one.err} <= SILENT
    for name, line in lines_of(world, tmp_path / "quiet").items():
        found = call(*line, "-q")
        errors = [row for row in said[name].error_lines if row.startswith("atlas: error: ")]
        assert found.code == said[name].code, (name, found.err, said[name].err)
        assert found.error_lines == errors, name
