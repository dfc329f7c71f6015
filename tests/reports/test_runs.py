"""A run is read back as it was written, and a damaged one is named."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from atlas_cli.errors import AtlasError, CheckpointError, UsageError
from atlas_cli.reports.runs import (
    _read_text,
    is_run,
    is_table,
    read_coefficients,
    read_numbers,
    read_run,
)

TABLE = {"cars": {"visual.proj": 0.5, "visual.conv1.weight": -1.0}}
CONFIG = {"command": "fit", "recipe": {"seed": 0}, "data": [{"name": "photos"}]}
ROW = {"stage": "all", "number": 1, "epoch": 1, "loss": 0.25, "rate": 0.1, "top1_percent": 50.0}
RECIPE = (
    "# Learned by atlas.\nmerge_method: atlas\nbase_model: m\n"
    "vectors: [{name: cars, file: f, sha256: a}]\ncoefficients: {cars: {visual.proj: 0.5}}\n"
)


def write_run(folder: Path, **files: str) -> Path:
    """A folder as runs are written, with other texts for some of its files."""
    texts = {
        "config.json": json.dumps(CONFIG),
        "metrics.jsonl": json.dumps(ROW) + "\n",
        "recipe.yaml": RECIPE,
        "result.json": json.dumps({"unit": "percent", "zero_shot": 50.0, "learned": 100.0}),
    }
    folder.mkdir()
    for name, text in {**texts, **files}.items():
        (folder / name).write_text(text)
    return folder


def test_a_run_is_all_of_its_files(tmp_path: Path):
    run = read_run(write_run(tmp_path / "run"))
    assert run.table == {"cars": {"visual.proj": 0.5}}
    assert run.metrics == (ROW,)
    assert run.config == CONFIG
    assert run.comment == ["Learned by atlas."]
    assert run.scores is not None
    assert run.scores.rows == {"zero-shot": (50.0,), "learned": (100.0,)}


@pytest.mark.parametrize(
    ("result", "on"),
    [
        ({"zero_shot": 50, "learned": 60, "select": "last"}, "training"),
        ({"zero_shot": 50, "learned": 60, "select": "holdout"}, "validation"),
        ({"accuracy": {"learned": [60]}, "tasks": ["cars"], "select": "same"}, "training"),
        ({"accuracy": {"learned": [60]}, "tasks": ["cars"], "select": "val"}, "validation"),
        ({"zero_shot": 50, "accuracy": 60, "accuracies": [60]}, "validation"),
    ],
)
def test_an_accuracy_is_that_of_images_that_are_named(tmp_path: Path, result: dict, on: str):
    text = json.dumps({"unit": "percent", **result})
    run = read_run(write_run(tmp_path / "run", **{"result.json": text}))
    assert run.scores is not None
    assert run.scores.on == on


def test_a_run_of_an_earlier_version_is_read_in_percent(tmp_path: Path):
    """It has shares between 0 and 1, in files that name no unit."""
    classes = {"cat": {"images": 4, "zero_shot": 0.25, "learned": 1.0}}
    result = {"zero_shot": 0.5, "learned": 1.0}
    result["classes"] = [{"task": "photos", "on": "4 images", "classes": classes}]
    old = {"number": 1, "epoch": 1, "loss": 0.5, "accuracy": 0.29, "val_accuracy": 0.75}
    lines = [old, {"number": 2, "epoch": 1, "loss": 0.5, "agreement": 0.5}, {**ROW, "number": 3}]
    texts = {"metrics.jsonl": "".join(f"{json.dumps(row)}\n" for row in lines)}
    run = read_run(write_run(tmp_path / "run", **texts, **{"result.json": json.dumps(result)}))
    assert run.scores is not None
    assert run.scores.rows == {"zero-shot": (50.0,), "learned": (100.0,)}
    assert run.classes[0].rows == (("cat", 25.0, 100.0),)
    measured = [{k: v for k, v in row.items() if "percent" in k} for row in run.metrics]
    first = {"top1_percent": 29.0, "val_top1_percent": 75.0}
    assert measured == [first, {"agreement_percent": 50.0}, {"top1_percent": 50.0}]
    assert not {"accuracy", "val_accuracy", "agreement"} & {k for row in run.metrics for k in row}


def test_a_run_that_was_killed_has_what_was_written_whole(tmp_path: Path):
    folder = write_run(tmp_path / "run", **{"metrics.jsonl": json.dumps(ROW) + '\n{"stage": "a'})
    (folder / "recipe.yaml").unlink()
    (folder / "result.json").unlink()
    run = read_run(folder)
    assert (run.metrics, run.table, run.scores) == ((ROW,), {}, None)


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("config.json", "{", "config.json: cannot be read as JSON"),
        ("config.json", "[]", "config.json: expected keys and values"),
        ("config.json", '{"command": "fit", "recipe": {}}', "is not the configuration of a run"),
        ("metrics.jsonl", "nonsense\n", "line 1 cannot be read as JSON"),
        ("metrics.jsonl", '{"loss": 1}\n', "line 1 is not a row of metrics"),
        ("result.json", '{"accuracy": 3, "tasks": []}', "is not the result of a run"),
        ("result.json", '{"classes": [1]}', "is not the result of a run"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, text: str, problem: str):
    folder = write_run(tmp_path / "run", **{name: text})
    with pytest.raises(CheckpointError, match=problem):
        read_run(folder)


def test_what_is_no_run_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match="no such run"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="holds no run"):
        read_run(tmp_path)


def test_the_folder_of_a_model_is_no_run(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "clip"}')
    assert not is_run(tmp_path)


def test_coefficients_are_a_recipe_or_a_table(tmp_path: Path):
    assert read_coefficients(RECIPE, "recipe.yaml").table == {"cars": {"visual.proj": 0.5}}
    assert read_coefficients(json.dumps(TABLE), "coefficients.json").table == TABLE


@pytest.mark.parametrize("text", ["{}", '{"a": 1}', '{"a": {"b": "c"}}', '{"a": {}}', "{nonsense"])
def test_what_holds_no_coefficients_is_named(text: str):
    with pytest.raises(UsageError, match=r"^x\.json: (holds no|cannot be read)"):
        read_coefficients(text, "x.json")


def test_coefficients_that_are_not_finite_are_refused():
    with pytest.raises(UsageError, match=r"a\.b: inf is not a finite number"):
        read_coefficients('{"a": {"b": Infinity}}', "x.json")


def test_a_large_table_is_read_from_beside_its_recipe(tmp_path: Path):
    recipe = RECIPE.replace("{cars: {visual.proj: 0.5}}", "/gone/coefficients.safetensors")
    folder = write_run(tmp_path / "run", **{"recipe.yaml": recipe})
    path = folder / "coefficients.safetensors"
    save_file({"coefficients": torch.tensor([[0.5, 0.25]])}, path)
    assert is_table(path)
    assert read_run(folder).table == {"cars": {"0": 0.5, "1": 0.25}}
    assert read_numbers(path) == {"vector 1": {"0": 0.5, "1": 0.25}}


def test_other_tensors_are_no_table(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    save_file({"coefficients": torch.ones(2, 2), "other": torch.ones(1)}, path)
    assert not is_table(path)
    save_file({"coefficients": torch.ones(2)}, path)
    with pytest.raises(AtlasError, match="holds no table of coefficients"):
        read_numbers(path)


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(CheckpointError, match="cannot be read"):
        _read_text(tmp_path / "metrics.jsonl")
