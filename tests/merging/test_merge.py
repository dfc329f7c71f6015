"""Merges end to end: formulas, dtypes, shards, threads, memory, locks, and what is refused."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from blake3 import blake3
from merge_runs import (
    CONFIG,
    ROOMY,
    digests,
    linear,
    llama,
    read_model,
    write_model,
    write_recipe,
)
from safetensors import safe_open
from safetensors.torch import save_file

from atlas_cli.merging import execute

Merge = Callable[..., Path]


def close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name in found:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-6, atol=1e-6)


# Formulas -------------------------------------------------------------------------------------


def test_linear_is_the_weighted_mean(merge: Merge):
    found = read_model(merge(linear(1, 3)))
    one, two = llama(1), llama(2)
    close(found, {name: 0.25 * one[name] + 0.75 * two[name] for name in one})


def test_task_arithmetic_adds_weighted_differences_to_the_base(merge: Merge):
    recipe = linear(0.4, 0.3, -0.2) | {"merge_method": "task_arithmetic", "base_model": "./base"}
    found = read_model(merge(recipe))
    models = [llama(number) for number in range(4)]
    weights = (0.4, 0.3, -0.2)
    wanted = {
        name: base + sum(w * (m[name] - base) for w, m in zip(weights, models[1:], strict=True))
        for name, base in models[0].items()
    }
    close(found, wanted)


def test_gradients_and_filters_decide_tensor_by_tensor(merge: Merge):
    weight = [{"filter": "mlp", "value": [0, 1]}, {"value": 0.5}]
    recipe = linear(0.0, 0.0, parameters={"normalize": False})
    recipe["models"][0]["parameters"] = {"weight": weight}
    found, one = read_model(merge(recipe)), llama(1)
    for layer, wanted in enumerate((0.0, 0.5, 1.0)):
        name = f"model.layers.{layer}.mlp.up_proj.weight"
        torch.testing.assert_close(found[name], wanted * one[name])
    for name in ("lm_head.weight", "model.norm.weight", "model.layers.2.input_layernorm.weight"):
        torch.testing.assert_close(found[name], 0.5 * one[name])


def test_slices_over_all_layers_are_models(merge: Merge):
    sources = [{"model": f"./{name}", "layer_range": [0, 3]} for name in ("base", "m1")]
    recipe = {"merge_method": "slerp", "base_model": "./base", "parameters": {"t": 0.3}}
    sliced = merge(recipe | {"slices": [{"sources": sources}]}, to="sliced")
    plain = merge(recipe | {"models": [{"model": "./m1"}]}, to="plain")
    close(read_model(sliced), read_model(plain))


def test_slices_that_end_behind_the_last_layer_are_refused(refused):
    sources = [{"model": f"./{name}", "layer_range": [0, 4]} for name in ("base", "m1")]
    recipe = {"merge_method": "slerp", "base_model": "./base", "parameters": {"t": 0.3}}
    said = refused(recipe | {"slices": [{"sources": sources}]}, code=2)
    assert "slices[0]: layer_range ends at 4, but ./base has 3 layers" in said


def test_random_methods_follow_the_seed_and_not_the_order(merge: Merge):
    recipe = linear(0.5, 0.5, base_model="./base", merge_method="dare_linear")
    for entry in recipe["models"]:
        entry["parameters"]["density"] = 0.5
    first = merge(recipe, "--threads", "1", to="one")
    again = merge(recipe, "--threads", "2", to="two")
    other = merge(recipe | {"seed": 1}, to="three")
    assert all(map(torch.equal, read_model(first).values(), read_model(again).values()))
    names = ("model.embed_tokens.weight", "lm_head.weight")
    assert not any(torch.equal(read_model(first)[n], read_model(other)[n]) for n in names)


# Dtypes and files -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [
        ({}, torch.bfloat16),
        ({"dtype": "float32"}, torch.float32),
        ({"out_dtype": "float16"}, torch.float16),
        ({"dtype": "torch.float32", "out_dtype": "bfloat16"}, torch.bfloat16),
    ],
)
def test_dtype_is_what_is_computed_in_and_out_dtype_what_is_written(
    merge: Merge, tmp_path: Path, keys: dict[str, str], dtype: torch.dtype
):
    for number in (1, 2):
        write_model(tmp_path / f"m{number}", llama(number, dtype=torch.bfloat16))
    found = read_model(merge(linear(0.3, 0.7, **keys)))
    assert {tensor.dtype for tensor in found.values()} == {dtype}
    one, two = (llama(n, dtype=torch.bfloat16)["lm_head.weight"].float() for n in (1, 2))
    wanted = 0.3 * one + 0.7 * two
    tolerance = 1e-6 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(
        found["lm_head.weight"].float(), wanted, rtol=tolerance, atol=tolerance
    )
    if keys.get("dtype") and dtype == torch.bfloat16:  # rounded once, at the end
        assert torch.equal(found["lm_head.weight"], wanted.bfloat16())


def test_config_says_the_dtype_that_was_written(merge: Merge):
    kept = json.loads((merge(linear(1, 1)) / "config.json").read_text())
    cast = merge(linear(1, 1, out_dtype="bfloat16"), to="cast")
    assert kept == CONFIG
    assert json.loads((cast / "config.json").read_text()) == CONFIG | {"torch_dtype": "bfloat16"}


def test_large_models_are_written_in_shards_with_an_index(merge: Merge, tmp_path: Path):
    whole = merge(linear(1, 1), to="whole")
    parts = merge(linear(1, 1), "--max-shard-size", "1KB", to="parts")
    index = json.loads((parts / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in parts.glob("*.safetensors"))
    assert files == sorted(set(index["weight_map"].values()))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in read_model(whole).values())
    close(read_model(parts), read_model(whole))


def test_inputs_may_be_sharded_each_in_its_own_way(merge: Merge, tmp_path: Path):
    whole = merge(linear(1, 1), to="whole")
    write_model(tmp_path / "s1", llama(1), shards=3)
    recipe = linear(1, 1)
    recipe["models"][0]["model"] = "./s1"
    close(read_model(merge(recipe, to="parts")), read_model(whole))


def test_integers_are_copied_and_empty_tensors_stay(merge: Merge, tmp_path: Path):
    more = {
        "position_ids": torch.arange(4),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.0),
    }
    for number in (1, 2):
        write_model(tmp_path / f"m{number}", llama(number) | more)
    found = read_model(merge(linear(1, 1)))
    assert torch.equal(found["position_ids"], torch.arange(4))
    assert (found["empty"].shape, found["scalar"].item()) == ((0, 3), 2.0)


def test_the_files_of_the_base_go_with_the_weights(merge: Merge):
    out = merge(linear(1, 1, base_model="./m1"))
    assert {path.name for path in out.iterdir()} == {
        *("config.json", "tokenizer.json", "model.safetensors"),
        *("README.md", "atlas_recipe.lock.yaml"),
    }


# Threads, memory, tiles -----------------------------------------------------------------------


@pytest.mark.parametrize("method", ["linear", "ties", "dare_ties", "slerp", "tsv"])
def test_any_number_of_threads_gives_the_same_bytes(
    merge: Merge, monkeypatch: pytest.MonkeyPatch, method: str
):
    monkeypatch.setattr("atlas_cli.merging.plan.TILE", 16)
    monkeypatch.setattr("atlas_cli.merging.plan._TILES", 2)
    recipe = linear(0.5, 0.5, merge_method=method, base_model="./base")
    if method == "slerp":
        recipe["models"] = [{"model": "./m1"}]
        recipe["parameters"] = {"t": 0.4}
    found = {}
    for threads in ("1", "2", "4"):
        if method == "linear":
            recipe.pop("base_model", None)
        found[threads] = digests(merge(recipe, "--threads", threads, to=f"out{threads}"))
    assert found["1"] == found["2"] == found["4"]


@pytest.mark.parametrize("shape", [(70, 30, 40), (3, 100_000), (1_300_000,)])
def test_a_tensor_of_many_tiles_is_merged_as_one(
    merge: Merge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
):
    monkeypatch.setattr("atlas_cli.merging.plan.TILE", 1 << 12)
    one, two = ({"w": torch.randn(shape)} for _ in range(2))
    write_model(tmp_path / "m1", one)
    write_model(tmp_path / "m2", two)
    close(read_model(merge(linear(0.5, 0.5))), {"w": 0.5 * one["w"] + 0.5 * two["w"]})


def test_a_budget_that_is_too_small_says_what_is_needed(refused):
    assert "use --memory" in refused(linear(1, 1), "--memory", "100MB")


def test_a_process_that_grows_after_the_check_merges_within_what_one_tile_needs(
    merge: Merge, monkeypatch: pytest.MonkeyPatch
):
    whole = digests(merge(linear(1, 1), to="whole"))
    sizes = iter([0])  # when memory is checked, and far more than the budget from then on
    monkeypatch.setattr("atlas_cli.merging.execute.resident", lambda: next(sizes, 10**15))
    assert digests(merge(linear(1, 1), "--threads", "2")) == whole


def test_peak_memory_stays_within_the_budget_for_one_large_tensor(
    run_python, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A tensor of 200 MB in each of two models, with 400 MB for everything, torch included."""
    monkeypatch.chdir(tmp_path)
    for number in (1, 2):
        (tmp_path / f"m{number}").mkdir()
        values = torch.full((25_000, 4096), float(number), dtype=torch.bfloat16)
        save_file({"w": values}, tmp_path / f"m{number}" / "model.safetensors")
    path = write_recipe(tmp_path / "r.yaml", linear(1, 1))
    code = (
        "import re, sys\nfrom atlas_cli.cli.app import main\n"
        "assert main(['merge', sys.argv[1], '-o', 'out', '--memory', '400MB', '-q']) == 0\n"
        "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])"
    )
    peak = int(run_python(code, str(path)).splitlines()[-1]) * 1024
    assert peak < 400e6
    found = read_model(tmp_path / "out")["w"]
    assert (found.min().item(), found.max().item()) == (1.5, 1.5)


# What is refused ------------------------------------------------------------------------------


def test_tensors_that_do_not_fit_are_listed(refused, tmp_path: Path):
    tensors = llama(2)
    del tensors["model.layers.1.input_layernorm.weight"]
    tensors["extra.weight"] = torch.ones(2)
    tensors["model.norm.weight"] = torch.ones(9)
    write_model(tmp_path / "m2", tensors)
    said = refused(linear(1, 1))
    for clause in (
        "./m2: model.norm.weight has shape (9,), expected (8,)",
        "./m2: model.layers.1.input_layernorm.weight is missing",
        "./m2: extra.weight is unknown",
    ):
        assert clause in said


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_named(refused, merge: Merge, tmp_path: Path, value: float):
    tensors = llama(2)
    tensors["lm_head.weight"][3, 2] = value
    write_model(tmp_path / "m2", tensors)
    assert "./m2: lm_head.weight holds values that are not finite" in refused(linear(1, 1))
    found = read_model(merge(linear(1, 1), "--allow-nonfinite"))
    assert not found["lm_head.weight"].isfinite().all()


@pytest.mark.parametrize("method", ["task_arithmetic", "ties", "dare_linear"])
@pytest.mark.parametrize("ill", ["base", "m2"])
def test_the_model_that_is_not_finite_is_named(refused, tmp_path: Path, method: str, ill: str):
    tensors = llama(0 if ill == "base" else 2)
    tensors["lm_head.weight"][3, 2] = math.inf
    write_model(tmp_path / ill, tensors)
    said = refused(linear(0.5, 0.5, merge_method=method, base_model="./base"))
    assert f"./{ill}: lm_head.weight holds values that are not finite" in said


@pytest.mark.parametrize("method", ["linear", "model_stock", "ties"])
def test_an_input_that_changes_meanwhile_is_named(
    refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
):
    run = execute.run

    def run_later(*arguments: Any) -> None:
        write_model(tmp_path / "m2", llama(3))
        run(*arguments)

    monkeypatch.setattr("atlas_cli.merging.execute.run", run_later)
    recipe = {"merge_method": method, "models": [{"model": "./m1"}, {"model": "./m2"}]}
    recipe |= {} if method == "linear" else {"base_model": "./base"}
    recipe |= {} if method == "model_stock" else {"parameters": {"weight": 0.5}}
    said = refused(recipe)
    assert "m2/model.safetensors: changed while it was being read" in said


def test_an_overflow_in_the_result_is_named(refused, tmp_path: Path):
    for number in (1, 2):
        tensors = llama(number, dtype=torch.float16)
        tensors["lm_head.weight"] += 60_000
        write_model(tmp_path / f"m{number}", tensors)
    recipe = linear(1, 1, parameters={"normalize": False}, dtype="float32", out_dtype="float16")
    assert "the merged model: lm_head.weight holds values that are not finite" in refused(recipe)


def test_a_tensor_without_a_value_of_a_parameter_is_named(refused):
    recipe = linear(1, 1)
    recipe["models"][0]["parameters"]["weight"] = [{"filter": "mlp", "value": 1}]
    assert "no filter gives it a weight of ./m1" in refused(recipe)


def test_a_filter_that_is_nowhere_is_warned_of(call, merge: Merge, tmp_path: Path):
    recipe = linear(1, 1)
    recipe["models"][0]["parameters"]["weight"] = [{"filter": "mpl", "value": 1}, {"value": 2}]
    result = call("merge", write_recipe(tmp_path / "r.yaml", recipe), "--dry-run", *ROOMY)
    assert result.err == "atlas: warning: filter 'mpl' is in the name of no tensor\n"


# The lock file --------------------------------------------------------------------------------


def test_merging_the_lock_on_a_copy_of_the_inputs_gives_the_same_bytes(
    call, merge: Merge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    out = merge(linear(1, 2, seed=3))
    elsewhere = tmp_path / "elsewhere"
    for number in (1, 2):
        write_model(elsewhere / f"m{number}", llama(number))
    monkeypatch.chdir(elsewhere)
    assert call("merge", out / "atlas_recipe.lock.yaml", "-o", "out", *ROOMY).code == 0
    assert digests(elsewhere / "out") == digests(out)


def test_a_lock_refuses_inputs_that_have_changed(call, merge: Merge, tmp_path: Path):
    out = merge(linear(1, 2))
    write_model(tmp_path / "m2", llama(3))
    result = call("merge", out / "atlas_recipe.lock.yaml", "-o", "again", *ROOMY)
    assert result.code == 1
    assert "./m2: model.safetensors is not what the recipe was locked with" in result.err
    assert not (tmp_path / "again").exists()


def test_a_lock_names_the_kind_of_digest_and_those_of_older_versions_stay_valid(
    call, merge: Merge, tmp_path: Path
):
    path = merge(linear(1, 2)) / "atlas_recipe.lock.yaml"
    lock = yaml.safe_load(path.read_text())
    content = (tmp_path / "m1" / "model.safetensors").read_bytes()
    digest = blake3(content).hexdigest()
    assert lock["locked"]["./m1"] == {"blake3": {"model.safetensors": digest}}
    for name in ("m1", "m2"):
        content = (tmp_path / name / "model.safetensors").read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        lock["locked"][f"./{name}"] = {"sha256": {"model.safetensors": digest}}
    Path("old.yaml").write_text(yaml.safe_dump(lock))
    assert call("merge", "old.yaml", "-o", "old", *ROOMY).code == 0
    assert yaml.safe_load(Path("old/atlas_recipe.lock.yaml").read_text()) == lock
    assert call("merge", "old/atlas_recipe.lock.yaml", "-o", "again", *ROOMY).code == 0
    assert digests(Path("again")) == digests(Path("old"))
    lock["locked"]["./m2"]["sha256"]["model.safetensors"] = "0" * 64
    Path("old.yaml").write_text(yaml.safe_dump(lock))
    result = call("merge", "old.yaml", "-o", "other", *ROOMY)
    assert result.code == 1
    assert "./m2: model.safetensors is not what the recipe was locked with: sha256 " in result.err


def test_no_name_breaks_out_of_the_code_of_the_card(merge: Merge, tmp_path: Path):
    hostile = "a`b ```# title"
    (tmp_path / "m1").rename(tmp_path / hostile)
    recipe = linear(1, 2)
    recipe["models"][0]["model"] = f"./{hostile}"
    card = (merge(recipe) / "README.md").read_text()
    assert f"- ```` ./{hostile} ````\n- `./m2`\n" in card
    shown = card.partition("````yaml\n")[2].partition("\n````\n")[0]
    assert yaml.safe_load(shown) == recipe


def test_the_recipe_is_in_the_metadata_and_in_the_card(merge: Merge):
    out = merge(linear(1, 2))
    with safe_open(out / "model.safetensors", framework="pt") as file:
        kept = json.loads(file.metadata()["atlas_recipe"])
    locked = yaml.safe_load((out / "atlas_recipe.lock.yaml").read_text())
    assert kept == locked
    assert set(locked["locked"]) == {"./m1", "./m2"}
    card = (out / "README.md").read_text()
    front = {"library_name": "transformers", "license": "unknown"}
    assert yaml.safe_load(card.split("---")[1]) == front | {"tags": ["atlas", "merge", "linear"]}
    shown = yaml.safe_load(card.partition("```yaml\n")[2].partition("```")[0])
    assert shown == linear(1, 2)


# LoRA -----------------------------------------------------------------------------------------


def test_an_adapter_after_a_plus_is_added_to_its_model(merge: Merge, tmp_path: Path):
    name = "model.layers.1.mlp.up_proj"
    up, down = torch.randn(16, 2), torch.randn(2, 8)
    (tmp_path / "lora").mkdir()
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
    (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps(settings))
    factors = {
        f"base_model.model.{name}.lora_A.weight": down,
        f"base_model.model.{name}.lora_B.weight": up,
    }
    save_file(factors, tmp_path / "lora" / "adapter_model.safetensors")
    recipe = {"merge_method": "passthrough", "models": [{"model": "./m1+./lora"}]}
    wanted = llama(1)
    wanted[f"{name}.weight"] += 2 * up @ down
    close(read_model(merge(recipe)), wanted)
