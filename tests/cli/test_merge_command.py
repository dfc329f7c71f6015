"""atlas merge: the plan, the flags, the Hub, and what is said on which stream."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from conftest import Result
from hub import Hub
from merge_runs import digests, linear, llama, write_model, write_recipe
from uploads import UploadHub

from atlas_cli.parallel import choose_device

ROOMY = ("--memory", "8GB")


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for number in (1, 2):
        write_model(tmp_path / f"m{number}", llama(number))
    weight = [{"filter": "mlp", "value": [0, 1]}, {"value": 0.5}]
    found = linear(0.5, 0.5)
    found["models"][1]["parameters"]["weight"] = weight
    return write_recipe(tmp_path / "r.yaml", found)


@pytest.fixture
def merge(call, recipe: Path) -> Callable[..., Result]:
    return lambda *flags: call("merge", recipe, *flags, *ROOMY)


# The plan -------------------------------------------------------------------------------------


def test_a_dry_run_tells_what_would_happen_and_writes_nothing(merge, tmp_path: Path):
    before = sorted(tmp_path.rglob("*"))
    result = merge("--dry-run")
    assert (result.code, result.err) == (0, "")
    lines = dict(line.split(maxsplit=1) for line in result.out.splitlines())
    assert lines["method"] == "linear"
    assert lines["tensors"] == "12 (12 merged, 0 copied)"
    assert lines["beside"] == "config.json, tokenizer.json"
    assert sorted(tmp_path.rglob("*")) == before


def test_the_plan_as_json_is_what_is_written(merge, tmp_path: Path):
    plan = json.loads(merge("--dry-run", "--json").out)
    assert merge("-o", "out").code == 0
    data = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert [entry["bytes"] for entry in plan["files"]] == [len(data)]
    assert plan["bytes_written"] == len(data)
    start = len(data) - sum(entry["bytes"] for entry in plan["outputs"])
    header = json.loads(data[8:start])
    for entry in plan["outputs"]:
        offsets = [entry["offset"], entry["offset"] + entry["bytes"]]
        assert header[entry["tensor"]]["data_offsets"] == offsets
        assert header[entry["tensor"]]["shape"] == entry["shape"]


def test_explain_shows_what_parameters_become(merge):
    plan = json.loads(merge("--dry-run", "--json", "--explain", r"layers\.1\..*mlp|lm_head").out)
    found = {one["tensor"]: one["models"]["./m2"] for one in plan["explained"]}
    assert found == {
        "model.layers.1.mlp.up_proj.weight": {"weight": 0.5},
        "lm_head.weight": {"weight": 0.5},
    }
    lines = merge("--dry-run", "--explain", "layers.2.mlp").out.splitlines()
    name, _, values = lines[-1].partition(": ")
    assert name == "model.layers.2.mlp.up_proj.weight"
    assert json.loads(values)["models"] == {"./m1": {"weight": 0.5}, "./m2": {"weight": 1.0}}


# Flags ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "no folder given; name it with -o DIR"),
        (("-o", "out", "--explain", "x"), "--explain shows the plan; give --dry-run with it"),
        (("--dry-run", "--explain", "("), "--explain: not a regular expression"),
        (("-o", "out", "--max-shard-size", "big"), "--max-shard-size big: expected a size"),
        (("-o", "m1"), "m1: is the folder of ./m1"),
        (("-o", "out", "--push", "name"), "--push name: expected OWNER/NAME"),
        (("-o", "out", "--evaluation", "x.json"), "--evaluation x.json: no such file"),
        (("-o", "out", "--device", "gpu"), "--device gpu: expected auto, cpu, cuda"),
    ],
)
def test_flags_that_make_no_sense_are_refused(call, recipe: Path, flags, message: str):
    result = call("merge", recipe, "--force", *flags)
    assert (result.code, result.out) == (2, "")
    assert message in result.err


def test_a_device_that_is_not_there_is_one_line(merge, tmp_path: Path):
    for kind in {"cuda", "mps"} - {choose_device("auto").type}:
        result = merge("-o", "out", "--device", kind)
        assert (result.code, result.out, len(result.error_lines)) == (2, "", 1)
        assert f"--device {kind}: this torch sees no {kind} device" in result.err
        assert not (tmp_path / "out").exists()


def test_auto_is_whatever_device_there_is(merge, tmp_path: Path):
    assert merge("-o", "one").code == merge("-o", "two", "--device", "auto").code == 0
    names = [path.name for path in (tmp_path / "one").iterdir()]
    assert sorted(names) == sorted(path.name for path in (tmp_path / "two").iterdir())
    if choose_device("auto").type == "cpu":
        assert digests(tmp_path / "one") == digests(tmp_path / "two")


def test_an_existing_folder_is_replaced_by_force_alone(merge, tmp_path: Path):
    assert merge("-o", "out").code == 0
    (tmp_path / "out" / "more.txt").touch()
    again = merge("-o", "out")
    assert (again.code, again.err) == (
        1,
        "atlas: error: out: exists already; use --force to replace it\n",
    )
    assert merge("-o", "out", "--force").code == 0
    assert not (tmp_path / "out" / "more.txt").exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_folder_of_something_else_is_never_replaced(merge, tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").touch()
    result = merge("-o", "out", "--force")
    assert (result.code, (tmp_path / "out" / "thesis.tex").exists()) == (1, True)


def test_the_result_as_json(merge, tmp_path: Path):
    found = json.loads(merge("-o", "out", "--json").out)
    assert (found["model"], found["method"], found["tensors"]) == ("out", "linear", 12)
    assert found["bytes"] == (tmp_path / "out" / "model.safetensors").stat().st_size


def test_a_recipe_comes_from_stdin_and_the_path_goes_to_stdout(run, recipe: Path, tmp_path: Path):
    result = run("merge", "-", "-o", "out", stdin=recipe.read_text())
    assert (result.code, result.out, result.err) == (0, "out\n", "")
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_run_is_merged_by_its_folder(merge, call, recipe: Path, tmp_path: Path):
    run = tmp_path / "run"
    run.mkdir()
    for name, said in (("metrics.jsonl", "--resume goes on"), ("model", "see atlas extract")):
        refused = call("merge", "run", "-o", "out")
        assert (refused.code, "run: is a folder without a recipe.yaml" in refused.err) == (2, True)
        made = run / name
        made.touch() if made.suffix else made.mkdir()
        refused = call("merge", "run", "-o", "out")
        assert (refused.code, said in refused.err) == (2, True), refused.err
        made.unlink() if made.suffix else made.rmdir()
    (run / "recipe.yaml").write_bytes(recipe.read_bytes())
    assert call("merge", "run", "-o", "out", *ROOMY).out == "out\n"
    assert merge("-o", "again").code == 0
    assert digests(tmp_path / "again") == digests(tmp_path / "out")


# The Hub --------------------------------------------------------------------------------------


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        yield server


def test_references_on_the_hub_are_pinned_to_their_commit(run, hub: Hub, recipe: Path, tmp_path):
    files = {path.name: path.read_bytes() for path in (tmp_path / "m1").iterdir()}
    commit = hub.add("owner/name", files)
    found = {"merge_method": "passthrough", "models": [{"model": "owner/name@main"}]}
    online = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": f"{tmp_path}/hf"}
    result = run("merge", "-", "-o", "out", stdin=json.dumps(found), **online)
    assert result.code == 0, result.err
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    locked = yaml.safe_load((tmp_path / "out" / "atlas_recipe.lock.yaml").read_text())
    assert locked["models"] == [{"model": f"owner/name@{commit}"}]
    assert locked["locked"][f"owner/name@{commit}"]["commit"] == commit
    card = (tmp_path / "out" / "README.md").read_text()
    assert yaml.safe_load(card.split("---")[1])["base_model"] == ["owner/name"]
    again = run("merge", "out/atlas_recipe.lock.yaml", "-o", "again", **online)
    assert again.code == 0, again.err
    assert digests(tmp_path / "again") == digests(tmp_path / "out")


def test_the_licence_of_a_base_on_the_hub_comes_with_the_merge(run, hub: Hub, recipe, tmp_path):
    files = {path.name: path.read_bytes() for path in (tmp_path / "m1").iterdir()}
    hub.add("owner/name", {**files, "LICENSE": b"MIT", "NOTICE.txt": b"by owner"})
    found = {"merge_method": "passthrough", "models": [{"model": "owner/name"}]}
    online = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": f"{tmp_path}/hf"}
    result = run("merge", "-", "-o", "out", stdin=json.dumps(found), **online)
    assert result.code == 0, result.err
    assert (tmp_path / "out" / "LICENSE").read_bytes() == b"MIT"
    assert (tmp_path / "out" / "NOTICE.txt").read_bytes() == b"by owner"


def test_push_uploads_every_file(run, recipe: Path, tmp_path: Path):
    with UploadHub() as server:
        online = {"HF_ENDPOINT": server.endpoint, "HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_x"}
        result = run("merge", recipe, "-o", "out", "--push", "owner/merged", **online)
    assert (result.code, result.out) == (0, "out\n"), result.err
    assert result.err.startswith("atlas: pushed to ")
    written = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    card = server.files["owner/merged"].pop("README.md").decode()
    assert server.files == {"owner/merged": {k: v for k, v in written.items() if k != "README.md"}}
    assert "atlas inspect merged" in card, "the card says how the model is used under its name"


def test_a_push_that_fails_keeps_the_model_and_says_so(run, recipe: Path, tmp_path: Path):
    online = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_x"}
    result = run("merge", recipe, "-o", "out", "--push", "owner/merged", **online)
    assert (result.code, len(result.error_lines)) == (3, 1), result.err
    assert result.err.endswith("; nothing is lost: atlas push out owner/merged\n")
    assert (tmp_path / "out" / "model.safetensors").is_file()
