"""finetune: the folders and vectors it writes, how it stops and goes on, what it refuses."""

from __future__ import annotations

import importlib.util
import json
import signal
import time
from pathlib import Path

import pytest
import torch
from conftest import TIMEOUT, write_images
from finetuned import opened, read_split, write_task, write_world
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from stopping import kill_and_resume
from warm import start

WEIGHTS = "open_clip_model.safetensors"
QUICK = ("--batch-size", "9", "--epochs", "2", "--lr", "1e-3", "--augment", "none", "--quiet")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_world(tmp_path_factory.mktemp("world"))
    write_images(root / "flat", ("cat",)).joinpath("cat").rename(root / "unlabelled")
    return root


def arguments(world: Path, *more: str | Path, data: str = "pets") -> list[str]:
    """A command line that fine-tunes quickly."""
    given = ("finetune", world / data, "--model", world / "base", *QUICK, *more)
    return [str(argument) for argument in given]


def changed(world: Path, model: Path) -> set[str]:
    """The tensors of a model that are not those of the base."""
    base, found = load_file(world / "base" / WEIGHTS), load_file(model / WEIGHTS)
    assert base.keys() == found.keys()
    return {name for name in base if not torch.equal(base[name], found[name])}


# What comes out -------------------------------------------------------------------------------


def test_open_clip_opens_the_folder_and_its_features_are_those_of_base_plus_vector(
    call, world, tmp_path
):
    run, vector = tmp_path / "run", tmp_path / "pets.safetensors"
    result = call(*arguments(world, "-o", run, "--vector", vector))
    assert result.code == 0, result.err
    assert result.out == f"{run / 'model'}\n{vector}\n"
    images, _ = read_split(world / "pets", "val")
    base, found = opened(world / "base"), opened(run / "model")
    with torch.no_grad():
        before, after = base.encode_image(images), found.encode_image(images)
        for name, tau in load_file(vector).items():
            base.get_parameter(name).add_(tau)
        torch.testing.assert_close(base.encode_image(images), after, atol=1e-5, rtol=1e-5)
    assert (after - before).abs().max() > 0.01
    assert all(name.startswith("visual.") for name in changed(world, run / "model"))
    assert call("eval", run / "model", "--data", world / "pets", "--workers", "0").code == 0


def test_the_folder_keeps_a_row_per_step_and_all_that_decided_the_result(call, world, tmp_path):
    run = tmp_path / "run"
    assert call(*arguments(world, "-o", run)).code == 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["number"] for row in rows] == [1, 2, 3, 4]
    assert [("val_top1_percent" in row) for row in rows] == [False, True, False, True]
    assert {"loss", "top1_percent", "rate", "epoch"} <= rows[0].keys()
    config = json.loads((run / "config.json").read_text())
    assert config["recipe"]["seed"] == 0
    assert config["versions"]["torch"] == torch.__version__
    assert list(config["model"]["sha256"]) == [WEIGHTS]
    assert [data["split"] for data in (*config["data"], *config["judges"])] == ["train", "val"]


@pytest.mark.parametrize("more", [(), ("--lora", "2")])
def test_the_vector_is_the_one_that_extract_makes_of_the_folder(call, world, tmp_path, more):
    vector, again = tmp_path / "pets.safetensors", tmp_path / "again.safetensors"
    assert call(*arguments(world, "-o", tmp_path / "run", "--vector", vector, *more)).code == 0
    tuned = tmp_path / "run" / ("adapter" if more else "model")
    made = call("extract", world / "base", tuned, "-o", again, "--name", "pets", "--quiet")
    assert made.code == 0, made.err
    assert again.read_bytes() == vector.read_bytes()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_peft_loads_the_adapter_and_gives_the_features_of_the_model(call, world, tmp_path):
    import peft

    run = tmp_path / "run"
    result = call(*arguments(world, "-o", run, "--lora", "3", "--lr", "0.01"))
    assert result.out == f"{run / 'model'}\n{run / 'adapter'}\n"
    images, _ = read_split(world / "pets", "val")
    adapted = peft.PeftModel.from_pretrained(opened(world / "base"), run / "adapter")
    with torch.no_grad():
        theirs = adapted.base_model.model.encode_image(images)
        ours, base = (opened(f).encode_image(images) for f in (run / "model", world / "base"))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert (ours - base).abs().max() > 0.01
    assert all(name.endswith("weight") for name in changed(world, run / "model"))


@pytest.mark.parametrize(
    ("tune", "part"), [("layernorm", ".ln_"), ("projection", "visual.proj"), ("all", "visual.")]
)
def test_only_what_is_tuned_changes(call, world, tmp_path, tune: str, part: str):
    assert call(*arguments(world, "-o", tmp_path / "run", "--tune", tune)).code == 0
    found = changed(world, tmp_path / "run" / "model")
    every = {name for name in load_file(world / "base" / WEIGHTS) if name.startswith("visual.")}
    assert found == {name for name in every if part in name}


def test_a_linearised_tower_comes_to_other_weights(call, world, tmp_path):
    for name, more in (("plain", []), ("linear", ["--linearised"])):
        assert call(*arguments(world, "-o", tmp_path / name, *more)).code == 0
    assert changed(world, tmp_path / "plain/model") == changed(world, tmp_path / "linear/model")
    files = [(tmp_path / name / "model" / WEIGHTS).read_bytes() for name in ("plain", "linear")]
    assert files[0] != files[1]


def test_many_tasks_have_a_folder_and_a_vector_each(call, world, tmp_path):
    given = arguments(world, world / "birds", "--vectors-dir", tmp_path / "v", "--json")
    result = call(*given, "-o", tmp_path / "runs")
    assert result.code == 0, result.err
    runs = json.loads(result.out)["runs"]
    assert [Path(run["model"]) for run in runs] == [
        tmp_path / "runs" / name / "model" for name in ("pets", "birds")
    ]
    assert [Path(run["vector"]).name for run in runs] == ["pets.safetensors", "birds.safetensors"]
    alone = call(*arguments(world, "-o", tmp_path / "alone", data="birds"))
    assert alone.code == 0
    files = [tmp_path / "alone", tmp_path / "runs" / "birds"]
    assert len({(path / "model" / WEIGHTS).read_bytes() for path in files}) == 1
    for run in runs:
        assert run["accuracy"] == run["accuracies"][-1]
        assert run["zero_shot"] == run["accuracies"][0]
    pool = call("inspect", *(tmp_path / "v").iterdir(), "--json")
    assert len(json.loads(pool.out)["vectors"]) == 2


def test_without_a_folder_the_vector_is_all_that_is_written(call, world, tmp_path):
    files = [tmp_path / name for name in ("one.safetensors", "two.safetensors")]
    for file in files:
        result = call(*arguments(world, "--vector", file))
        assert result.out == f"{file}\n"
    assert sorted(tmp_path.iterdir()) == sorted(files)
    first, second = (load_file(file) for file in files)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_best_epoch_is_kept_if_that_is_asked_for(call, world, tmp_path):
    """A rate that is far too high: what comes after the first epochs is worse."""
    bad = ("--lr", "0.3", "--schedule", "constant", "--epochs", "4", "--json")
    found = {}
    for how in ("last", "best"):
        result = call(*arguments(world, *bad, "--select", how, "-o", tmp_path / how))
        (found[how],) = json.loads(result.out)["runs"]
    epochs = found["last"]["accuracies"][1:]
    assert found["best"]["accuracies"] == found["last"]["accuracies"]
    assert found["best"]["accuracy"] == max(epochs)
    assert found["last"]["accuracy"] == epochs[-1]


def test_images_are_held_out_where_there_is_no_val_split(call, world, tmp_path):
    folder = world / "pets" / "train"
    given = arguments(world, "--vector", tmp_path / "v.safetensors", "--select", "best")
    given[1] = str(folder)
    given.remove("--quiet")
    result = call(*given)
    assert result.code == 0, result.err
    assert "scored on 3 images held out of" in result.err
    assert "train: zero-shot" in result.err
    assert "train: epoch 2" in result.err


def test_a_model_of_transformers_gives_a_folder_of_open_clip(call, world, tmp_path):
    """Without moving anything, its features are those that transformers computes."""
    import transformers

    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    tower |= {"num_attention_heads": 2, "hidden_act": "quick_gelu"}
    vision, text = {**tower, "image_size": 32, "patch_size": 16}, {**tower, "vocab_size": 49408}
    config = transformers.CLIPConfig(vision_config=vision, text_config=text, projection_dim=24)
    torch.manual_seed(0)
    model = transformers.CLIPModel(config).eval()
    model.save_pretrained(tmp_path / "base")
    size = {"crop_size": 32, "size": {"shortest_edge": 32}, "image_mean": [0.5] * 3}
    size |= {"image_std": [0.5] * 3, "do_resize": True, "do_center_crop": True, "resample": 3}
    (tmp_path / "base" / "preprocessor_config.json").write_text(json.dumps(size))
    still = ("--lr", "1e-30", "--weight-decay", "0", "--model", tmp_path / "base")
    result = call(*arguments(world, "-o", tmp_path / "run", *still))
    assert result.code == 0, result.err
    images, _ = read_split(world / "pets", "val")
    with torch.no_grad():
        theirs = model.visual_projection(model.vision_model(images).pooler_output)
        ours = opened(tmp_path / "run" / "model").encode_image(images)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


# Stopping and going on ------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_bytes_with_one_thread_and_with_two(call, world, tmp_path):
    for number, threads in enumerate(("1", "2")):
        folder = tmp_path / str(number)
        assert call(*arguments(world, "-o", folder, "--threads", threads)).code == 0
    for name in ("metrics.jsonl", "config.json", f"model/{WEIGHTS}"):
        assert len({(tmp_path / str(n) / name).read_bytes() for n in range(2)}) == 1, name


KINDS = [(), pytest.param(("--lora", "2", "--select", "best"), marks=pytest.mark.slow)]


@pytest.mark.parametrize("more", KINDS)
def test_a_killed_run_goes_on_to_the_same_bytes(call, world, tmp_path, more):
    given = arguments(world, "--augment", "slight", "--epochs", "30", *more)
    given = kill_and_resume(given, tmp_path / "killed", 1)
    resumed = call(*given, "-o", tmp_path / "killed", "--resume")
    assert resumed.code == 0, resumed.err
    assert call(*given, "-o", tmp_path / "whole").code == 0
    names = ["metrics.jsonl", f"model/{WEIGHTS}", "state.safetensors"]
    names += ["adapter/adapter_model.safetensors"] if more else []
    for name in names:
        killed, whole = (tmp_path / folder / name for folder in ("killed", "whole"))
        assert killed.read_bytes() == whole.read_bytes(), name
    again = call(*given, "-o", tmp_path / "killed", "--resume")
    assert again.out == resumed.out


def test_an_interrupt_stops_after_the_step_and_keeps_where_it_was(world, tmp_path):
    folder = tmp_path / "run"
    given = [word for word in arguments(world, "--epochs", "5000") if word != "--quiet"]
    process = start(*given, "-o", folder)
    while not (folder / "state.safetensors").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, out) == (130, "")
    assert err.endswith("--resume goes on\natlas: interrupted\n")
    assert "Traceback" not in err
    steps = (folder / "metrics.jsonl").read_text().splitlines()
    assert f"stopped after step {len(steps)};" in err
    kept = sorted(path.name for path in folder.iterdir())
    assert kept == ["config.json", "metrics.jsonl", "state.safetensors"]


def test_a_finished_run_is_neither_overwritten_nor_mixed_up(call, world, tmp_path):
    given = (*arguments(world), "-o", tmp_path / "run", "--vector", tmp_path / "v.safetensors")
    first = call(*given)
    again = call(*given)
    assert (again.code, again.out) == (1, "")
    assert "exists already; use --force" in again.err
    held = call(*arguments(world), "-o", tmp_path / "run")
    assert "--resume goes on with it, --force starts anew" in held.err
    assert call(*given, "--resume").out == first.out
    other = call(*given, "--resume", "--lr", "0.2")
    assert other.code == 2
    assert "was begun with recipe.lr 0.001, not 0.2" in other.err
    assert call(*given, "--force", "--lr", "0.002").code == 0


def test_on_a_terminal_a_bar_tells_how_it_goes(on_terminal, world, tmp_path):
    given = [word for word in arguments(world, "-o", tmp_path / "run") if word != "--quiet"]
    shown = on_terminal(*given)
    assert "images/s" in shown
    assert "pets: epoch 2" in shown


# What it refuses ------------------------------------------------------------------------------

MISTAKES = {
    "nothing kept": ((), 2, "nothing would be kept"),
    "resume": (("--resume", "--vector", "v.safetensors"), 2, "--resume goes on with the run in"),
    "tune": (("--tune", "head"), 2, "--tune: expected all, layernorm, projection"),
    "lora and tune": (("--lora", "2", "--tune", "layernorm"), 2, "an adapter goes neither with"),
    "select": (("--select", "val"), 2, "--select: expected last or best"),
    "both": (("--steps", "3"), 2, "epochs and steps both say how long"),
    "diverged": (("--lr", "1e30"), 1, "a lower learning rate may help"),
    "model": (("--model", "builtin:tny"), 2, "did you mean 'tiny'"),
    "twice": (("pets",), 2, "two tasks are called pets"),
    "one file": (("birds", "--vector", "v.safetensors"), 2, "give --vectors-dir DIR"),
    "ending": (("--vector", "v.pt"), 2, "--vector v.pt: expected a name that ends in .safetensors"),
    "no labels": (("unlabelled",), 1, "has no labels"),
    "augment": (("--augment", "mild"), 2, "--augment: expected slight"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_bad_input_is_one_line_and_leaves_nothing(call, world, tmp_path, monkeypatch, name: str):
    more, code, message = MISTAKES[name]
    monkeypatch.chdir(world)
    before = sorted(world.iterdir())
    output = () if name in ("nothing kept", "resume") else ("-o", tmp_path / "run")
    result = call("finetune", "pets", "--model", "base", *QUICK, *more, *output)
    assert (result.code, result.out) == (code, "")
    assert len(result.error_lines) == 1, result.err
    assert message in result.err
    assert not (tmp_path / "run").exists()
    assert sorted(world.iterdir()) == before


def test_a_val_split_of_other_classes_is_refused(call, world, tmp_path):
    folder = write_task(tmp_path / "task")
    (folder / "val" / "fish").rename(folder / "val" / "bird")
    result = call(*arguments(world, "-o", tmp_path / "run", data=str(folder)))
    assert (result.code, result.out) == (1, "")
    assert not (tmp_path / "run").exists()


# A finished run, read back ----------------------------------------------------------------------


def test_a_finished_run_is_not_called_unfinished(call, world, tmp_path):
    """Neither by report nor by inspect, also if it was written before there was a result.json."""
    folder = tmp_path / "run"
    assert call(*arguments(world, "-o", folder)).code == 0
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for _ in ("now", "then"):
        shown = call("inspect", folder)
        assert (shown.code, shown.err) == (0, "")
        head, *epochs = shown.out.splitlines()
        assert head.startswith("epoch,step,loss,")
        assert [line.split(",")[:2] for line in epochs] == [["1", "2"], ["2", "4"]]
        assert float(epochs[-1].split(",")[2]) == pytest.approx(rows[-1]["loss"], rel=1e-5)
        if importlib.util.find_spec("altair"):
            assert call("report", folder, "-o", tmp_path / "r.html", "--force").code == 0
            assert "has no result yet" not in (tmp_path / "r.html").read_text()
        (folder / "result.json").unlink(missing_ok=True)
    (folder / "model").rename(tmp_path / "model")
    assert "has no coefficients yet" in call("inspect", folder).err


def test_all_images_are_trained_on_where_nothing_has_to_be_selected(call, world, tmp_path):
    """Of two shots per class, both: held out is only what --select best needs."""
    folder = world / "pets" / "train"
    given = [*arguments(world, "--shots", "2", "-o"), tmp_path / "last", "--batch-size", "64"]
    given[1] = str(folder)
    given.remove("--quiet")
    last = call(*given)
    assert (last.code, "nothing is held out" in last.err) == (0, True), last.err
    assert "epoch" not in last.err.partition("held out")[2]
    given[-3] = tmp_path / "best"
    best = call(*given, "--select", "best")
    assert "scored on 3 images held out of the training images" in best.err
    losses = [
        json.loads((tmp_path / how / "metrics.jsonl").read_text().splitlines()[0])["loss"]
        for how in ("last", "best")
    ]
    assert losses[0] != losses[1]  # of six images, and of three


def test_a_run_that_held_images_out_where_nothing_is_selected_is_not_mixed_up(
    call, world, tmp_path
):
    """An earlier version did so: another half of the images would be trained on from here."""
    task, run = write_images(tmp_path / "few", count=2), tmp_path / "run"
    command = ("finetune", task, "--model", world / "base", *QUICK, "-o", run)
    assert call(*command).code == 0
    state = run / "state.safetensors"
    with safe_open(state, "pt") as file:
        facts = json.loads(file.metadata()["atlas_run"])
    facts |= {"accuracies": [0.5], "over": False}
    save_file(load_file(state), state, {"atlas_run": json.dumps(facts)})
    result = call(*command, "--resume")
    assert (result.code, len(result.error_lines)) == (1, 1)
    assert "held images out of training here; start anew with --force" in result.err


def test_the_folder_of_a_run_stands_for_its_model(call, world, tmp_path):
    run = tmp_path / "run"
    assert call(*arguments(world, "-o", run)).code == 0
    data = ("--data", world / "pets", "--workers", "0", "--json")
    found = [json.loads(call("eval", name, *data).out) for name in (run, run / "model")]
    assert found[0]["results"][0]["top1"] == found[1]["results"][0]["top1"]
    vectors = [tmp_path / f"{number}.safetensors" for number in range(2)]
    for name, vector in zip((run, run / "model"), vectors, strict=True):
        assert call("extract", world / "base", name, "-o", vector).code == 0
    first, second = map(load_file, vectors)
    assert all(torch.equal(first[name], second[name]) for name in second)
