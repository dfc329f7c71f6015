"""--log: TensorBoard and Weights & Biases are told what metrics.jsonl holds, and what came out."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import write_images
from learned_runs import write_world

from atlas_cli.errors import install_hint

QUICK = ("--batch-size", "8", "--epochs", "2", "--min-steps", "2", "--lr", "0.3", "--quiet")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_world(tmp_path_factory.mktemp("world"))
    for split in ("train", "test"):
        write_images(root / "split" / split, ("cat", "dog"), 4, seed=len(split))
    return root


def given(world: Path, *more: str | Path) -> list[str | Path]:
    models = ("--model", world / "base", "--vectors", world / "v")
    return ["fit", world / "split", *models, *QUICK, *more]


def metrics_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def told(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The numbers that TensorBoard reads, by name: step and value."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert len(list(folder.iterdir())) == 1
    found = EventAccumulator(str(folder))
    found.Reload()
    names = found.Tags()["scalars"]
    return {name: [(one.step, one.value) for one in found.Scalars(name)] for name in names}


def wanted(folder: Path) -> Iterator[tuple[str, list[tuple[int, float]]]]:
    rows = metrics_of(folder)
    for key in ("loss", "rate", "epoch", "top1_percent"):
        yield f"train/{key}", [(step, row[key]) for step, row in enumerate(rows, start=1)]
    result = json.loads((folder / "result.json").read_text())
    (score,) = result["test"]
    for key in ("zero_shot", "learned"):
        yield f"result/{key}", [(len(rows), result[key])]
        yield f"test/{score['task']}/{key}", [(len(rows), score[key])]


def test_tensorboard_reads_every_row_and_the_result(call, world: Path, tmp_path: Path):
    plain, folder = tmp_path / "plain", tmp_path / "run"
    assert call(*given(world, "-o", plain)).code == 0
    assert not (plain / "tensorboard").exists()
    assert call(*given(world, "-o", folder, "--log", "tensorboard")).code == 0
    assert (folder / "metrics.jsonl").read_text() == (plain / "metrics.jsonl").read_text()
    found, expected = told(folder / "tensorboard"), dict(wanted(folder))
    assert found.keys() == expected.keys()
    for name, points in expected.items():
        assert [step for step, _ in found[name]] == [step for step, _ in points]
        assert [v for _, v in found[name]] == pytest.approx([v for _, v in points], rel=1e-6)
    # A run that goes on tells all of it again; one that starts anew has no log unless it is asked.
    assert call(*given(world, "-o", folder, "--resume", "--log", "tensorboard")).code == 0
    assert told(folder / "tensorboard") == found
    assert call(*given(world, "-o", folder, "--force")).code == 0
    assert not (folder / "tensorboard").exists()


def test_steps_of_folds_have_names_of_their_own(call, world: Path, tmp_path: Path):
    folder = tmp_path / "run"
    more = ("--select", "kfold", "-o", folder, "--log", "tensorboard")
    assert call(*given(world, *more)).code == 0
    found, rows = told(folder / "tensorboard"), metrics_of(folder)
    stages = {row["stage"] for row in rows}
    assert "fold 1" in stages
    names = {stage: "train" if stage == "all" else stage.replace(" ", "_") for stage in stages}
    for stage, name in names.items():
        losses = [row["loss"] for row in rows if row["stage"] == stage]
        assert [value for _, value in found[f"{name}/loss"]] == pytest.approx(losses)


def test_what_cannot_be_logged_is_one_line_before_anything_is_made(
    call, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "run"
    for name in ("tensorboard", "wandb"):
        with monkeypatch.context() as missing:
            missing.setitem(sys.modules, name, None)  # as Python notes what is not there
            refused = call(*given(world, "-o", folder, "--log", name))
        line = f"atlas: error: --log {name} needs {name}; run: {install_hint(name)}\n"
        assert (refused.code, refused.out, refused.err) == (2, "", line)
    for more, said in (
        (("-o", folder, "--log", "tensorbord"), "did you mean 'tensorboard'?"),
        (("--log", "tensorboard"), "name it: -o DIR"),
    ):
        refused = call(*given(world, *more))
        assert (refused.code, refused.out, len(refused.error_lines)) == (2, "", 1)
        assert said in refused.err
    assert not folder.exists()


@pytest.mark.slow
def test_wandb_keeps_every_row_offline(
    run, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Read by its own reader; a run that goes on is the same run there, with every row once."""
    folder = tmp_path / "run"
    home = {"HOME": str(tmp_path)}  # nobody is logged in
    refused = run(*given(world, "-o", folder, "--log", "wandb"), WANDB_MODE="on", **home)
    assert (refused.code, len(refused.error_lines), folder.exists()) == (1, 1, False)
    assert "WANDB_MODE=offline logs without a network" in refused.err
    monkeypatch.delenv("WANDB_MODE", raising=False)
    ids = set()
    for more in ((), ("--resume",)):
        done = run(*given(world, "-o", folder, "--log", "wandb", *more), **home)
        assert (done.code, done.err) == (0, "")
        (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
        ids.add(file.stem)
        history = {}
        for step, values in wandb_history(file):
            history.setdefault(step, {}).update(values)
        rows = metrics_of(folder)
        assert list(history) == list(range(1, len(rows) + 1))
        for row, values in zip(rows, history.values(), strict=True):
            assert values["train/loss"] == row["loss"]
            assert values["train/top1_percent"] == row["top1_percent"]
        assert (
            values["result/learned"] == json.loads((folder / "result.json").read_text())["learned"]
        )
    assert len(ids) == 1


def wandb_history(file: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """The steps that a file of wandb holds: records in blocks, as LevelDB writes its logs."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, piece = file.read_bytes(), 7, b""  # behind a header
    while place + 7 <= len(data):
        size, kind = struct.unpack_from("<HB", data, place + 4)  # behind a checksum
        left = 32768 - place % 32768
        if left < 7 or not kind:  # nothing more fits into this block
            place += left
            continue
        piece += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            record, piece = Record.FromString(piece), b""
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                values = {one.key or "/".join(one.nested_key): one.value_json for one in items}
                yield record.history.step.num, {k: json.loads(v) for k, v in values.items()}
