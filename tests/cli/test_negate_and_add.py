"""negate and add: what they have of their own, and that other commands repeat their numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from makers import write_moved_tiny
from safetensors.torch import load_file
from test_learning import QUICK, arguments, world, write_shots  # noqa: F401

ROOM = ("--quiet", "--memory", "8GB")


def learned(call, given: list[str]) -> dict:
    result = call(*given, "--json")
    assert result.code == 0, result.err
    return json.loads(result.out)


@pytest.mark.parametrize("command", ["negate", "add"])
def test_eval_repeats_the_numbers_from_the_merged_model(
    call,
    world,  # noqa: F811
    tmp_path: Path,
    command: str,
):
    given = arguments(world, "--lr", "0.5", "-o", tmp_path / "run", command=command)
    found = learned(call, given)
    merged = tmp_path / "merged"
    assert call("merge", tmp_path / "run" / "recipe.yaml", "-o", merged, *ROOM).code == 0
    shown = call("eval", merged, "--data", *found["tasks"], "--json", "--workers", "0")
    scores = {row["data"]: row["top1"] for row in json.loads(shown.out)["results"]}
    for task, accuracy in zip(found["tasks"], found["accuracy"]["learned"], strict=True):
        assert scores[task] == pytest.approx(accuracy, abs=1e-9)


@pytest.mark.parametrize("method", ["learned", "search"])
def test_a_control_that_cannot_be_kept_leaves_zero_and_says_so(call, tmp_path: Path, method: str):
    """The built-in model recognises all images of the control: 101 % of that cannot be."""
    write_moved_tiny(tmp_path / "moved.safetensors")
    given = ("negate", "builtin:digits", "--control", "builtin:everything", "--keep", "1.01")
    more = ("--model", "builtin:tiny", "--vector", tmp_path / "moved.safetensors", "--shots", "1")
    result = call(*given, *more, *QUICK, "--method", method, "-o", tmp_path / "run")
    assert result.code == 1
    assert "nothing lowered the accuracy on the target while the control kept 101 %" in result.err
    assert len(result.error_lines) == 1
    table = yaml.safe_load(result.out)["coefficients"]
    assert {value for row in table.values() for value in row.values()} == {0.0}
    assert result.out == (tmp_path / "run" / "recipe.yaml").read_text()


@pytest.mark.parametrize(("command", "sign"), [("negate", -1), ("add", 1)])
def test_a_search_tries_one_scale_for_everything(call, world, command: str, sign: int):  # noqa: F811
    result = call(*arguments(world, "--method", "search", command=command))
    table = yaml.safe_load(result.out)["coefficients"]
    (scale,) = {value for row in table.values() for value in row.values()}
    assert scale * sign >= 0
    assert (scale * 20) == pytest.approx(round(scale * 20), abs=1e-6)


@pytest.mark.parametrize("command", ["negate", "add"])
def test_by_val_the_train_split_teaches_and_the_val_split_judges(
    call,
    world,  # noqa: F811
    tmp_path: Path,
    command: str,
):
    for name, turn in (("cars", 0), ("control", 1)):
        write_shots(tmp_path / name / "train", 3, seed=4, turn=turn)
        write_shots(tmp_path / name / "val", 2, seed=5, turn=turn)
    data = [tmp_path / "cars", *(["--control"] if command == "negate" else [])]
    given = (command, *data, tmp_path / "control", "--model", world / "base", "--vectors")
    more = (world / "v", *QUICK, "--lr", "0.5", "--select", "val", "--json")
    found = json.loads(call(*given, *more).out)
    assert [entry["split"] for entry in found["config"]["data"]] == ["train", "train"]
    assert [entry["split"] for entry in found["config"]["judges"]] == ["val", "val"]
    assert {
        round(round(6 * value / 100) / 6 * 100, 6) for value in found["accuracy"]["learned"]
    } == {*found["accuracy"]["learned"]}


@pytest.mark.parametrize("command", ["negate", "add"])
def test_the_table_says_which_images_were_scored_and_has_no_empty_row(
    call,
    world,  # noqa: F811
    tmp_path: Path,
    command: str,
):
    write_shots(tmp_path / "boats" / "train", 3, seed=4)
    write_shots(tmp_path / "boats" / "val", 2, seed=5)
    control = ["--control", tmp_path / "boats"] if command == "negate" else []
    models = ("--model", world / "base", "--vectors", world / "v")
    quick = [word for word in QUICK if word != "--quiet"]
    for select, word in (("same", "training"), ("val", "validation")):
        given = (command, tmp_path / "boats", *control, *models, *quick, "--select", select)
        said = call(*given, "--lr", "0.5").err
        assert f"  {word} top-1 in percent  " in said
        assert ("training top-1 says little" in said) == (select == "same")
        assert "individual" not in said  # no vector is of this task


def test_isotropic_learns_a_number_for_each_vector(call, world):  # noqa: F811
    result = call(*arguments(world, "--method", "isotropic", command="add"))
    table = yaml.safe_load(result.out)["coefficients"]
    assert {name: len(row) for name, row in table.items()} == {"birds": 1, "cars": 1}


def test_several_targets_are_forgotten_at_once(call, world):  # noqa: F811
    given = arguments(world, command="negate")
    given.insert(1, str(world / "tasks" / "birds"))
    found = learned(call, given)
    assert [Path(name).name for name in found["tasks"]] == ["birds", "cars", "control"]
    before, after = (sum(found["accuracy"][key][:2]) for key in ("zero-shot", "learned"))
    assert after < before


def test_one_task_alone_can_be_added(call, world):  # noqa: F811
    given = arguments(world, command="add")
    given.remove(str(world / "tasks" / "birds"))
    found = learned(call, given)
    assert len(found["tasks"]) == 1
    assert found["accuracy"]["learned"][0] >= found["accuracy"]["zero-shot"][0]


def test_the_table_shows_every_method_and_the_models_that_set_the_ceiling(call, world):  # noqa: F811
    merges = ("ties", "iso_c:lambda=0.5", "tsv", "dare_ties", "lines", "consensus")
    more = ("--compare", *merges, "--disentanglement", "--lr", "0.5")
    given = arguments(world, *more, command="add")
    given += ["--individual", *(f"{task}=90" for task in given[1:3])]
    found = learned(call, given)
    assert list(found["accuracy"]) == ["zero-shot", "search", "learned", *merges]
    relative = found["normalised"]["learned"]
    wanted = [
        100 * a / b for a, b in zip(found["accuracy"]["learned"], found["individual"], strict=True)
    ]
    assert relative == pytest.approx(sum(wanted) / 2)
    pairs = found["disentanglement"]
    assert all(0 <= value <= 100 for row in pairs.values() for value in row.values())
    shown = call(*[word for word in given if word != "--quiet"])
    lines = shown.err.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  ")][1:] == [
        *("zero-shot", "search", "learned", *merges, "individual")
    ]


def test_a_merge_that_needs_more_vectors_is_refused_before_anything_is_learned(call):
    given = ("add", "builtin:digits", "builtin:signs", "--model", "builtin:tiny", "--shots", "1")
    one = (*given, "--vectors", "builtin:letters", "--compare")
    refused = call(*one, "model_stock")
    assert refused.code == 2
    assert refused.err == (
        "atlas: error: --compare model_stock: expected 2 or more vectors, found 1\n"
    )
    assert call(*one, "multislerp", *QUICK).code == 0


def test_a_merge_in_the_table_is_the_merge_of_the_command(call, world, tmp_path: Path):  # noqa: F811
    """task_arithmetic of base + vectors, by the table and by atlas merge on the tuned models."""
    given = arguments(world, "--compare", "task_arithmetic:weight=0.7", command="add")
    found = learned(call, given)
    models = [
        {"model": str(world / name), "parameters": {"weight": 0.7}} for name in ("birds", "cars")
    ]
    keys = {"merge_method": "task_arithmetic", "base_model": str(world / "base"), "models": models}
    (tmp_path / "m.yaml").write_text(yaml.safe_dump(keys))
    assert call("merge", tmp_path / "m.yaml", "-o", tmp_path / "merged", *ROOM).code == 0
    shown = call("eval", tmp_path / "merged", "--data", *found["tasks"], "--json", "--workers", "0")
    scores = {row["data"]: row["top1"] for row in json.loads(shown.out)["results"]}
    wanted = found["accuracy"]["task_arithmetic:weight=0.7"]
    assert [scores[task] for task in found["tasks"]] == pytest.approx(wanted, abs=1e-9)


def test_given_accuracies_of_fine_tuned_models_are_the_ceiling(call, world):  # noqa: F811
    data = [str(world / "tasks" / name) for name in ("birds", "cars")]
    more = ("--individual", f"{data[0]}=80", f"{data[1]}=50")
    found = learned(call, arguments(world, *more, command="add"))
    assert found["individual"] == [80.0, 50.0]


def test_adamerging_after_ties_works_on_trimmed_vectors_that_merge_takes(
    call,
    world,  # noqa: F811
    tmp_path: Path,
):
    run = tmp_path / "run"
    more = ("--objective", "entropy", "--ties", "0.2")
    refused = call(*arguments(world, *more, command="add"))
    assert refused.code == 2
    assert "use -o DIR" in refused.err
    result = call(*arguments(world, *more, "-o", run, command="add"))
    assert result.code == 0, result.err
    files = [Path(entry["file"]) for entry in yaml.safe_load(result.out)["vectors"]]
    assert files == [run / "trimmed" / f"{name}.safetensors" for name in ("birds", "cars")]
    kept = sum(int(t.count_nonzero()) for t in load_file(files[0]).values())
    every = sum(t.numel() for t in load_file(world / "v" / "birds.safetensors").values())
    assert 0.05 * every < kept < 0.2 * every
    assert call("merge", run / "recipe.yaml", "-o", tmp_path / "merged", *ROOM).code == 0
    again = call(*arguments(world, *more, "-o", run, "--resume", command="add"))
    assert again.out == result.out


def test_a_failure_removes_the_trimmed_vectors_too(call, world, tmp_path: Path):  # noqa: F811
    more = ("--ties", "0.2", "--lr", "1e30", "-o", tmp_path / "run")
    result = call(*arguments(world, *more, command="add"))
    assert result.code == 1
    assert not (tmp_path / "run").exists()


def test_a_recipe_says_what_flags_say(call, world, tmp_path: Path):  # noqa: F811
    keys = {"data": [str(world / "tasks" / "cars")], "control": str(world / "control")}
    keys |= {"model": str(world / "base"), "vectors": [str(world / "v")], "keep": 0.1, "lr": 0.5}
    path = tmp_path / "negate.yaml"
    path.write_text(yaml.safe_dump(keys))
    assert call("negate", path, *QUICK).out == call(*arguments(world, command="negate")).out
