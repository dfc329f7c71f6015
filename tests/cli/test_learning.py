"""fit, negate and add: what they print and write, refuse, and how they stop and go on."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from conftest import TIMEOUT, Result, write_images, write_open_clip
from learned_runs import WEIGHTS, write_tuned, write_world
from PIL import Image
from safetensors.torch import load_file, save_file
from stopping import kill_and_resume
from warm import start

from atlas_cli.learning.fit import fit
from atlas_cli.learning.run import RunOptions
from atlas_cli.recipes.fit import FitRecipe
from atlas_cli.recipes.model import check_recipe

QUICK = ("--batch-size", "6", "--min-steps", "2", "--epochs", "2", "--quiet")
CLASSES = ("cat", "dog", "fish")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, two task vectors of it, and a few images of three classes."""
    from atlas_cli.cli.app import main

    root = tmp_path_factory.mktemp("world")
    base = write_open_clip(root / "base")
    for number, name in enumerate(("birds", "cars")):
        write_tuned(base, root / name, number)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    folders = [str(root / name) for name in ("birds", "cars")]
    (root / "v").mkdir()
    assert main(["extract", str(base), *folders, "-o", str(root / "v"), "--quiet"]) == 0
    write_shots(root / "shots", 4)
    write_shots(root / "tasks" / "birds", 3, seed=1)
    write_shots(root / "tasks" / "cars", 5, seed=2)
    write_shots(root / "control", 2, seed=3, turn=1)  # what is a cat here is a dog there
    return root


def write_shots(folder: Path, count: int, seed: int = 0, turn: int = 0) -> Path:
    """Images of three classes: noise, brighter in another channel for each class."""
    random = np.random.default_rng(seed)
    for channel, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = random.integers(0, 160, (40, 48, 3), dtype=np.uint8)
            pixels[..., (channel + turn) % 3] += 90
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return folder


COMMANDS = {
    "fit": ["shots"],
    "negate": ["tasks/cars", "--control", "control", "--keep", "0.1", "--lr", "0.5"],
    "add": ["tasks/birds", "tasks/cars"],
}
EVERY = pytest.mark.parametrize("command", COMMANDS)


def arguments(world: Path, *more: str | Path, command: str = "fit") -> list[str]:
    """A command line that learns something quickly."""
    data = [str(world / w) if (world / w).exists() else w for w in COMMANDS[command]]
    given = [command, *data, "--model", world / "base", "--vectors", world / "v"]
    return [str(argument) for argument in (*given, *QUICK, *more)]


# What comes out -------------------------------------------------------------------------------


@EVERY
def test_stdout_is_the_learned_recipe_and_the_folder_keeps_all_of_it(
    call, world, tmp_path, command: str
):
    run = tmp_path / "run"
    result = call(*arguments(world, "-o", run, command=command))
    assert result.code == 0, result.err
    recipe = yaml.safe_load(result.out)
    assert result.out == (run / "recipe.yaml").read_text()
    assert recipe["merge_method"] == "atlas"
    assert recipe["base_model"] == str(world / "base")
    assert [entry["name"] for entry in recipe["vectors"]] == ["birds", "cars"]
    assert recipe["coefficients"] == json.loads((run / "coefficients.json").read_text())
    names = set(load_file(world / "v" / "birds.safetensors"))
    assert set(recipe["coefficients"]["birds"]) == names
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["number"] for row in rows] == list(range(1, len(rows) + 1))
    assert len(rows) == {"fit": 4, "negate": 10, "add": 10}[command]
    assert {"loss", "top1_percent", "rate", "epoch", "stage"} <= rows[0].keys()
    config = json.loads((run / "config.json").read_text())
    assert config["recipe"]["seed"] == 0
    assert config["vectors"][0]["sha256"] == recipe["vectors"][0]["sha256"]
    assert config["versions"]["torch"] == torch.__version__


def merged_folder(recipe: dict, target: Path) -> Path:
    """base + sum of coefficient * tau, with nothing of atlas in between."""
    write_open_clip(target)
    weights = load_file(Path(recipe["base_model"]) / WEIGHTS)
    for entry in recipe["vectors"]:
        for name, tau in load_file(entry["file"]).items():
            weights[name] = weights[name] + recipe["coefficients"][entry["name"]][name] * tau
    save_file(weights, target / WEIGHTS, {"format": "pt"})
    return target


def test_the_recipe_merged_by_a_plain_sum_predicts_what_the_composed_model_does(
    call, world, tmp_path
):
    from atlas_cli.learning.batches import predict
    from atlas_cli.learning.fit import Fitting
    from atlas_cli.learning.run import RunOptions, prepare
    from atlas_cli.recipes.fit import FitRecipe

    result = call(*arguments(world, "--lr", "0.5"))
    recipe = yaml.safe_load(result.out)
    test = write_shots(tmp_path / "test", 40, seed=7)
    merged = merged_folder(recipe, tmp_path / "merged")
    shown = call("eval", merged, "--data", test, "--predictions", "-", "--workers", "0")
    ours = [json.loads(line) for line in shown.out.splitlines()]

    learned = FitRecipe(data=str(test), model=str(world / "base"), vectors=[str(world / "v")])
    table = torch.tensor([list(row.values()) for row in recipe["coefficients"].values()])
    with prepare(Fitting(learned), RunOptions(device="cpu")) as ready:
        setup = ready.setup
        assert list(recipe["coefficients"]["birds"]) == list(ready.layout.labels)
        setup.model.load(table)
        logits = predict(setup.model, setup.tasks[0], range(120), setup.heads[0])
    names = ready.inputs.datasets[0].classes
    assert [row["prediction"] for row in ours] == [names[i] for i in logits.argmax(1).tolist()]
    assert table.abs().max() > 0.5


@EVERY
def test_the_same_seed_gives_the_same_bytes_with_one_thread_and_with_two(
    call, run, world, tmp_path, command: str
):
    """In this process and in one of its own."""
    outputs = []
    for threads, runner in (("1", call), ("2", run)):
        more = ("-o", tmp_path / threads, "--threads", threads)
        outputs.append(runner(*arguments(world, *more, command=command)).out)
    assert outputs[0] == outputs[1]
    for name in ("metrics.jsonl", "config.json", "coefficients.json"):
        assert len({(tmp_path / threads / name).read_bytes() for threads in "12"}) == 1
    assert call(*arguments(world, "--seed", "1", command=command)).out not in ("", outputs[0])


@pytest.mark.parametrize(
    ("granularity", "columns"),
    [
        (["--granularity", "vector"], 1),
        (["--granularity", "qkv"], 32 + 2 * 2 * 2),
        (["--granularity", "partition:3"], 3 * 32),
        (["--group", r"resblocks\.(\d+)", "--group", "."], 3),
    ],
)
def test_coefficients_are_as_fine_as_asked(call, world, granularity: list[str], columns: int):
    recipe = yaml.safe_load(call(*arguments(world, *granularity)).out)
    assert {len(row) for row in recipe["coefficients"].values()} == {columns}


def test_a_table_too_large_for_text_goes_into_a_file(call, world, tmp_path):
    many = ("--granularity", "partition:700")
    refused = call(*arguments(world, *many))
    assert (refused.code, refused.out) == (2, "")
    assert "give a folder with -o DIR" in refused.err
    result = call(*arguments(world, *many, "-o", tmp_path / "run"))
    recipe = yaml.safe_load(result.out)
    assert load_file(recipe["coefficients"])["coefficients"].shape == (2, 32 * 700)


@pytest.mark.parametrize("more", [["--linearised"], ["--penalty", "l1:0.5"], ["--accumulate", "2"]])
def test_other_ways_to_learn_give_other_coefficients(call, world, more: list[str]):
    plain, other = call(*arguments(world)), call(*arguments(world, *more))
    assert other.code == 0, other.err
    tables = [yaml.safe_load(result.out)["coefficients"] for result in (plain, other)]
    if more[0] == "--accumulate":
        assert tables[1]["birds"] == pytest.approx(tables[0]["birds"], abs=1e-4)
    else:
        assert tables[1]["birds"] != pytest.approx(tables[0]["birds"], abs=1e-3)


def test_a_recipe_says_the_same_as_flags_and_flags_override_it(call, world, tmp_path):
    path = tmp_path / "fit.yaml"
    keys = {"data": str(world / "shots"), "model": str(world / "base"), "epochs": 9}
    keys |= {"vectors": [str(world / "v")], "batch_size": 6, "min_steps": 2}
    path.write_text(yaml.safe_dump(keys))
    from_recipe = call("fit", path, "--epochs", "2", "--quiet")
    assert from_recipe.out == call(*arguments(world)).out


@pytest.mark.parametrize(
    ("memory", "said"),
    [("2GiB", "as stored"), ("700kB", "as bf16"), ("400kB", "as int8"), ("1kB", "read from")],
)
def test_vectors_are_kept_within_the_budget(call, world, memory: str, said: str):
    given = [word for word in arguments(world, "--memory", memory) if word != "--quiet"]
    result = call(*given, "--verbose")
    assert said in result.err
    exact = yaml.safe_load(call(*arguments(world)).out)["coefficients"]["birds"]
    found = yaml.safe_load(result.out)["coefficients"]["birds"]
    assert found == pytest.approx(exact, abs=0.1)
    if said in ("as stored", "read from"):
        assert found == pytest.approx(exact, abs=1e-5)


# Choosing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("select", ["last", "holdout", "kfold", "val"])
def test_if_nothing_beats_zero_shot_all_coefficients_are_zero(call, world, select: str):
    """With a learning rate of nearly nothing there is nothing to beat it with."""
    how = f"val:{world / 'shots'}" if select == "val" else select
    given = [w for w in arguments(world, "--select", how, "--lr", "1e-30") if w != "--quiet"]
    result = call(*given)
    assert result.code == 0
    assert "nothing beat zero-shot" in result.err
    table = yaml.safe_load(result.out)["coefficients"]
    assert {value for row in table.values() for value in row.values()} == {0.0}


@pytest.mark.parametrize("select", ["last", "holdout", "kfold", "val"])
def test_every_way_to_select_learns_something(call, world, select: str):
    how = f"val:{world / 'shots'}" if select == "val" else select
    result = call(*arguments(world, "--select", how, "--epochs", "6", "--json"))
    found = json.loads(result.out)
    assert found["learned"] >= found["zero_shot"]
    assert found["improved"] == any(
        value for row in found["coefficients"].values() for value in row.values()
    )


# Stopping and going on ------------------------------------------------------------------------

LONG = ("--batch-size", "12", "--min-steps", "5")


def check_resumed(
    run: Callable[..., Result], world: Path, tmp_path: Path, times: int, command: str
) -> None:
    given = arguments(world, *LONG, "--epochs", str(12 * times), command=command)
    given = kill_and_resume(given, tmp_path / "killed", times)
    resumed = run(*given, "-o", tmp_path / "killed", "--resume")
    whole = run(*given, "-o", tmp_path / "whole")
    assert resumed.code == 0, resumed.err
    assert resumed.out == whole.out
    folders = [tmp_path / "killed", tmp_path / "whole"]
    for name in ("coefficients.json", "metrics.jsonl", "recipe.yaml"):
        first, second = ((folder / name).read_bytes() for folder in folders)
        assert first == second, name
    first, second = (load_file(folder / "state.safetensors") for folder in folders)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    "command", ["fit", *(pytest.param(one, marks=pytest.mark.slow) for one in ("negate", "add"))]
)
def test_a_killed_run_goes_on_to_the_same_coefficients(run, world, tmp_path, command: str):
    check_resumed(run, world, tmp_path, 1, command)


@pytest.mark.campaign
def test_a_run_killed_twenty_times_comes_to_the_same_coefficients(run, world, tmp_path):
    check_resumed(run, world, tmp_path, 20, "fit")


@EVERY
def test_an_interrupt_stops_after_the_step_and_keeps_the_best_so_far(
    run, world, tmp_path, command: str
):
    folder = tmp_path / "run"
    process = start(*arguments(world, *LONG, "--epochs", "2000", "-o", folder, command=command))
    while not (folder / "state.safetensors").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 130
    assert err.endswith("atlas: interrupted\n")
    assert "Traceback" not in err
    assert yaml.safe_load(out)["merge_method"] == "atlas"
    assert out == (folder / "recipe.yaml").read_text()
    steps = len((folder / "metrics.jsonl").read_text().splitlines())
    assert 0 < steps < 2000 * 5


@EVERY
def test_a_finished_run_is_neither_overwritten_nor_mixed_up(call, world, tmp_path, command: str):
    folder = tmp_path / "run"
    first = call(*arguments(world, "-o", folder, command=command))
    again = call(*arguments(world, "-o", folder, command=command))
    assert (again.code, again.out) == (1, "")
    assert "--resume goes on with it, --force starts anew" in again.err
    assert call(*arguments(world, "-o", folder, "--resume", command=command)).out == first.out
    other = call(*arguments(world, "-o", folder, "--resume", "--lr", "0.2", command=command))
    assert other.code == 2
    rate = 0.5 if command == "negate" else 0.1
    assert f"was begun with recipe.lr {rate}, not 0.2" in other.err
    forced = call(*arguments(world, "-o", folder, "--force", "--lr", "0.2", command=command))
    assert forced.code == 0
    assert forced.out != first.out


# What it refuses ------------------------------------------------------------------------------


def test_a_vector_learned_on_the_target_is_refused_unless_allowed(call, world, tmp_path):
    target = write_shots(tmp_path / "Cars", 4)
    group = [str(target), *arguments(world)[2:]]
    left_out = call("fit", *(word for word in group if word != "--quiet"))
    assert left_out.code == 0
    assert "cars: left out, since it was learned on the target itself" in left_out.err
    folder, alone = str(world / "v"), str(world / "v" / "cars.safetensors")
    given = [alone if word == folder else word for word in group]
    refused = call("fit", *given)
    assert (refused.code, refused.out) == (1, "")
    assert "vector cars seems to be learned on" in refused.err
    assert "--allow-target" in refused.err
    assert call("fit", *given, "--allow-target").code == 0


def with_nan(world: Path, tmp_path: Path) -> list[str]:
    """A copy of a vector in which one number is not a number."""
    from safetensors import safe_open

    path = world / "v" / "cars.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    tensors["visual.proj"][0, 0] = float("nan")
    save_file(tensors, tmp_path / "nan.safetensors", metadata)
    return ["--vectors", str(tmp_path / "nan.safetensors")]


def of_another_base(world: Path, tmp_path: Path) -> list[str]:
    return ["--model", str(write_open_clip(tmp_path / "other", seed=5))]


def one_class(world: Path, tmp_path: Path) -> list[str]:
    return [str(write_images(tmp_path / "one", ("cat",), 3))]


def unlabelled(world: Path, tmp_path: Path) -> list[str]:
    return [str(write_images(tmp_path / "flat", ("cat",), 3) / "cat")]


def broken_image(world: Path, tmp_path: Path) -> list[str]:
    folder = write_images(tmp_path / "broken", CLASSES, 2)
    (folder / "cat" / "0.png").write_bytes(b"no image")
    return [str(folder)]


def fixed(*words: str) -> Callable[[Path, Path], list[str]]:
    return lambda world, tmp_path: list(words)


MISTAKES = {
    "nan": (with_nan, 1, "block visual.proj holds values that are not finite"),
    "other base": (of_another_base, 1, "was taken from another base"),
    "one class": (one_class, 1, "has one class only"),
    "no labels": (unlabelled, 1, "has no labels"),
    "broken image": (broken_image, 1, "cat/0.png: cannot be decoded"),
    "too few": (fixed("--shots", "9"), 1, "images, fewer than 9"),
    "shots": (fixed("--shots", "few"), 2, "--shots: expected a number of images"),
    "no vectors": (fixed("--vectors", "nowhere.safetensors"), 2, "no such task vector: nowhere"),
    "overflow": (fixed("--lr", "1e38"), 2, "--lr: expected at most 1e+30, found 1e+38"),
    "diverged": (fixed("--lr", "1e30"), 1, "the loss diverged at every rate from 1e+30"),
    "select": (fixed("--select", "best"), 2, "--select: expected last, holdout, kfold or val:"),
    "granularity": (fixed("--granularity", "layer"), 2, "--granularity: expected block, vector"),
    "group": (fixed("--group", "("), 2, "--groups: not a regular expression"),
    "memory": (fixed("--memory", "much"), 2, "--memory: expected a size"),
    "penalty": (fixed("--penalty", "l3:1"), 2, "--penalty: expected l1:WEIGHT"),
    "epochs": (fixed("--epochs", "0"), 2, "--epochs: expected more than 0"),
    "holdout": (fixed("--select", "holdout", "--shots", "1"), 1, "needs two images of every"),
    "resume": (fixed("--resume"), 2, "--resume goes on with the run in -o DIR"),
    "val": (fixed("--select", "val:nowhere"), 2, "no such data: nowhere"),
    "model": (fixed("--model", "builtin:tny"), 2, "did you mean 'tiny'"),
}


OF_ALL = ("nan", "other base", "one class", "no labels", "broken image", "too few", "diverged")
CASES = [("fit", name) for name in MISTAKES]
CASES += [(command, name) for command in ("negate", "add") for name in OF_ALL]
OWN = {
    "no control": (("negate", "shots"), 2, "no control given; for example --control"),
    "keep": (("negate", "shots", "--control", "control", "--keep", "0"), 2, "--keep: expected"),
    "forget": (("negate", "shots", "--control", "x", "--forget", "it"), 2, "--forget: expected"),
    "select": (("add", "shots", "--select", "val:x"), 2, "--select: expected same, val"),
    "twice": (("add", "shots", "shots"), 2, "a task is given twice"),
    "clamp": (("add", "shots", "--clamp", "1"), 2, "--clamp: expected LOW:HIGH"),
    "merge": (("add", "shots", "--compare", "tis"), 2, "did you mean 'ties'?"),
    "knob": (("add", "shots", "--compare", "ties:densty=1"), 2, "did you mean 'density'?"),
    "number": (("add", "shots", "--compare", "ties:density=x"), 2, "is not KEY=NUMBER"),
    "individual": (("add", "shots", "--individual", "cars=90"), 2, "there is no task cars"),
    "percent": (("add", "shots", "--individual", "shots"), 2, "expected DATA=ACCURACY"),
    "pairs": (("add", "shots", "--disentanglement"), 2, "no vector has the name of shots"),
    "objective": (("add", "shots", "--objective", "loss"), 2, "expected labels or entropy"),
}


@pytest.mark.parametrize("name", OWN)
def test_bad_input_of_one_command_is_one_line_and_leaves_nothing(
    call, world, tmp_path, monkeypatch, name: str
):
    given, code, message = OWN[name]
    monkeypatch.chdir(world)
    more = ("--model", "base", "--vectors", "v", *QUICK, "-o", tmp_path / "run")
    result = call(*given, *more)
    assert (result.code, result.out) == (code, "")
    assert len(result.error_lines) == 1, result.err
    assert message in result.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("command", "name"), CASES)
def test_bad_input_is_one_line_and_leaves_nothing(call, world, tmp_path, command: str, name: str):
    make, code, message = MISTAKES[name]
    given = arguments(world, command=command)
    changed = make(world, tmp_path)
    if changed and not changed[0].startswith("-"):
        given[1] = changed.pop(0)
    if changed and changed[0] == "--vectors":
        place = given.index("--vectors")
        given[place : place + 2] = []
    output = [] if name == "resume" else ["-o", str(tmp_path / "run")]
    result = call(*given, *changed, *output)
    assert (result.code, result.out) == (code, "")
    assert len(result.error_lines) == 1, result.err
    assert message in result.err
    assert not (tmp_path / "run").exists()


def test_every_wrong_value_is_told_at_once(call, world):
    result = call(*arguments(world, "--epochs", "0", "--select", "x", "--shots", "0"))
    assert result.code == 2
    assert len(result.error_lines) == 3


@EVERY
def test_a_folder_that_holds_something_else_is_left_alone(call, world, tmp_path, command: str):
    (tmp_path / "note.txt").write_text("mine")
    result = call(*arguments(world, "-o", tmp_path, command=command))
    assert (result.code, result.out) == (1, "")
    assert "is not empty, and holds no run" in result.err
    assert [path.name for path in tmp_path.iterdir()] == ["note.txt"]


@EVERY
def test_on_a_terminal_a_bar_tells_how_it_goes(on_terminal, world, command: str):
    given = [word for word in arguments(world, command=command) if word != "--quiet"]
    shown = on_terminal(*given)
    assert "images/s" in shown
    assert "loss" in shown


def test_a_run_that_diverges_backs_off_says_so_and_can_be_stopped_in_between(call, tmp_path):
    world = write_world(tmp_path)
    given = ["fit", world / "photos", "--model", world / "base", "--vectors", world / "v"]
    given += ["--batch-size", "8", "--epochs", "4", "--min-steps", "6", "--augment", "none"]
    given += ["--lr", "300"]
    found = call(*given, "-o", tmp_path / "run")
    assert found.code == 0
    said = [line for line in found.err.splitlines() if "warning: step" in line]
    assert len(said) == 2
    assert "the loss rose to nan; goes on as at the start at half the rate" in said[0]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    back = [row for row in rows if "back_to" in row]
    assert [(row["loss"], row["back_to"]) for row in back] == [(None, 0), (None, 0)]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert call("report", tmp_path / "run", "-o", tmp_path / "page.html").code == 0

    def interrupted(after: int) -> Callable[[], bool]:
        steps = iter(range(after))
        return lambda: next(steps, None) is None

    keys = {"batch_size": 8, "epochs": 4, "min_steps": 6, "augment": "none", "lr": 300.0}
    keys |= {"model": str(world / "base"), "vectors": [str(world / "v")]}
    recipe = check_recipe(FitRecipe, {"data": str(world / "photos"), **keys})
    folder = tmp_path / "stopped"
    for after in (back[0]["number"] - 1, 1, 1, 99):
        options = RunOptions(folder=folder, resume=folder.exists(), device="cpu")
        fit(recipe, options, stop=interrupted(after))
    names = ("coefficients.json", "metrics.jsonl")
    whole, parts = ([(run / n).read_text() for n in names] for run in (tmp_path / "run", folder))
    assert parts == whole


def test_names_that_are_no_utf8_are_names_all_the_same(call, tmp_path: Path):
    photos = write_images(tmp_path / "photos", ("cat", "d\udcffg"))
    (photos / "cat/0.png").rename(photos / "cat/\udcfe.png")
    run, page = tmp_path / "r\udcff", tmp_path / "p.html"
    given = ["--model", "builtin:tiny", "--vectors", "builtin:signs", "--epochs", "1"]
    found = call("fit", photos, *given, "--min-steps", "1", "--select", "last", "-o", run)
    assert (found.code, "Traceback" in found.err) == (0, False), found.err
    assert call("eval", "builtin:tiny", "--data", photos, "--json").code == 0
    assert call("merge", run, "-o", tmp_path / "merged", "--memory", "8GB").code == 0
    assert call("report", run, "-o", page).code == 0
    page.read_bytes().decode("utf-8")
