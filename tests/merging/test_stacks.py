"""Slices and modules: where each layer of a result comes from, and what is written about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import yaml
from merge_runs import CONFIG, ROOMY, llama, read_model, write_model

TYPES = ["full_attention", "sliding_attention", "full_attention"]


def source(model: str, first: int, end: int, **parameters: Any) -> dict[str, Any]:
    return {"model": f"./{model}", "layer_range": [first, end], "parameters": parameters}


def stack(*slices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"merge_method": "passthrough", "slices": [{"sources": one} for one in slices], **more}


def layer(tensors: dict[str, torch.Tensor], number: int) -> dict[str, torch.Tensor]:
    prefix = f"model.layers.{number}."
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


def test_a_stack_repeats_layers_and_says_where_they_come_from(merge, call, tmp_path: Path):
    config = CONFIG | {"num_hidden_layers": 3, "layer_types": TYPES}
    (tmp_path / "m1" / "config.json").write_text(json.dumps(config))
    recipe = stack([source("m1", 0, 3)], [source("m2", 1, 3)], [source("m1", 2, 3)])
    out = merge(recipe)
    found, one, two = read_model(out), llama(1), llama(2)
    wanted = [*(layer(one, n) for n in range(3)), layer(two, 1), layer(two, 2), layer(one, 2)]
    assert all(same(layer(found, number), each) for number, each in enumerate(wanted))
    assert not layer(found, 6)
    assert same({"e": found["model.embed_tokens.weight"]}, {"e": one["model.embed_tokens.weight"]})
    assert torch.equal(found["lm_head.weight"], one["lm_head.weight"])
    config = json.loads((out / "config.json").read_text())
    assert config["num_hidden_layers"] == 6
    # m2 does not say what its layers are: those of the same number in m1 stand for them.
    assert config["layer_types"] == [*TYPES, TYPES[1], TYPES[2], TYPES[2]]
    lock = (out / "atlas_recipe.lock.yaml").read_text()
    assert "# model.layers 3-4: passthrough of ./m2 1-2\n" in lock
    plan = json.loads(call("merge", tmp_path / "out.yaml", "--dry-run", "--json", *ROOMY).out)
    assert plan["layers"][2]["sources"] == [{"model": "./m1", "layer_range": [2, 3]}]
    assert plan["layers"][2]["layers"] == [5, 6]
    again = merge(yaml.safe_load(lock), to="again")
    assert (again / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()


def test_the_first_slice_gives_the_embedding_and_the_last_one_the_head(merge, tmp_path: Path):
    write_model(tmp_path / "deep", llama(4, layers=5))
    found = read_model(merge(stack([source("deep", 3, 5)], [source("m1", 0, 1)])))
    deep, one = llama(4, layers=5), llama(1)
    assert torch.equal(found["model.embed_tokens.weight"], deep["model.embed_tokens.weight"])
    assert torch.equal(found["model.norm.weight"], one["model.norm.weight"])
    assert torch.equal(found["lm_head.weight"], one["lm_head.weight"])
    assert same(layer(found, 1), layer(deep, 4))
    assert same(layer(found, 2), layer(one, 0))


def test_a_slice_has_its_own_method_parameters_and_gradient(merge):
    recipe = stack(
        [source("m1", 0, 1, scale=[{"filter": "up_proj", "value": 0.5}])],
        [source("m1", 0, 2, weight=[0, 1]), source("m2", 1, 3, weight=[1, 0])],
        parameters={"normalize": False},
    )
    recipe["slices"][1] |= {"merge_method": "linear"}
    found, one, two = read_model(merge(recipe)), llama(1), llama(2)
    up, query = "mlp.up_proj.weight", "self_attn.q_proj.weight"
    assert torch.equal(layer(found, 0)[up], 0.5 * layer(one, 0)[up])
    assert torch.equal(layer(found, 0)[query], layer(one, 0)[query])
    assert same(layer(found, 1), layer(two, 1))  # where the gradient begins
    assert same(layer(found, 2), layer(one, 1))  # and where it ends


def test_modules_are_merged_apart_and_what_no_module_has_is_copied(merge, tmp_path: Path):
    def speech(seed: int) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(seed)
        names = [
            f"model.{side}.layers.{n}.fc1.weight"
            for side in ("encoder", "decoder")
            for n in range(3)
        ]
        names += ["model.encoder.conv1.weight", "model.decoder.embed_tokens.weight", "extra.weight"]
        return {name: torch.randn(4, 4, generator=draw) for name in names}

    for number in (1, 2):
        folder = write_model(tmp_path / f"s{number}", speech(number))
        config = CONFIG | {"encoder_layers": 3, "decoder_layers": 3}
        (folder / "config.json").write_text(json.dumps(config))
    recipe = {
        "merge_method": "linear",
        "base_model": "./s1",
        "parameters": {"weight": 1},
        "modules": {
            "encoder": {"models": [{"model": "./s1"}, {"model": "./s2"}]},
            "decoder": {"slices": [{"sources": [source("s2", 1, 3)]}]},
        },
    }
    out = merge(recipe)
    found, one, two = read_model(out), speech(1), speech(2)
    conv, fc = "model.encoder.conv1.weight", "model.encoder.layers.2.fc1.weight"
    for name in (conv, fc):
        torch.testing.assert_close(found[name], (one[name] + two[name]) / 2)
    old, new = (f"model.decoder.layers.{n}.fc1.weight" for n in (2, 1))
    assert torch.equal(found[new], two[old])
    assert torch.equal(found["extra.weight"], one["extra.weight"])
    config = json.loads((out / "config.json").read_text())
    assert (config["encoder_layers"], config["decoder_layers"]) == (3, 2)


def test_slices_of_a_model_with_two_stacks_need_modules(refused, tmp_path: Path):
    towers = {f"{side}.blocks.{n}.w": torch.ones(2, 2) for side in "ab" for n in range(2)}
    write_model(tmp_path / "m1", towers)
    said = refused(stack([source("m1", 0, 2)]), code=2)
    assert "./m1 has 2 stacks of layers (a.blocks, b.blocks); give slices for each under" in said
    recipe = {"merge_method": "passthrough", "modules": {"c": {"models": [{"model": "./m1"}]}}}
    assert "modules.c: no tensor of ./m1 belongs to it" in refused(recipe, code=2)


def test_a_base_that_is_not_a_source_gives_the_same_layers(merge):
    recipe = stack([source("m1", 1, 3, weight=0.5)], base_model="./base")
    found = read_model(merge(recipe | {"merge_method": "task_arithmetic"}))
    base, one = layer(llama(0), 1), layer(llama(1), 1)
    for name, tensor in layer(found, 0).items():
        torch.testing.assert_close(tensor, (base[name] + one[name]) / 2)


def test_parameters_without_effect_are_named_once_and_refused_with_strict(call, merge, tmp_path):
    recipe = {
        "name": "mine",
        "merge_method": "slerp",
        "base_model": "./base",
        "models": [{"model": "./m1", "parameters": {"weight": 1, "density": 0.5}}],
        "parameters": {"t": [0.5], "normalize": True, "int8_mask": True},
    }
    (tmp_path / "r.yaml").write_text(json.dumps(recipe))
    ran = call("merge", tmp_path / "r.yaml", "-o", "out", "--memory", "8GB")
    paths = ("name", "parameters.int8_mask", "parameters.normalize")
    paths += ("parameters.t (a gradient of one value)",)
    paths += ("models[0].parameters.density", "models[0].parameters.weight")
    assert (ran.code, len(ran.err.splitlines())) == (0, 1)
    assert ran.err.startswith("atlas: warning: no effect here: ")
    assert all(path in ran.err for path in paths)
    strict = call("merge", tmp_path / "r.yaml", "-o", "strict", "--strict")
    assert (strict.code, strict.out, len(strict.error_lines)) == (2, "", len(paths))
    recipe["parameters"]["normalise"] = True
    (tmp_path / "r.yaml").write_text(json.dumps(recipe))
    wrong = call("merge", tmp_path / "r.yaml", "-o", "out2")
    assert wrong.code == 2
    assert "unknown parameter 'normalise'" in wrong.err


def test_a_language_model_that_sees_keeps_the_names_that_its_library_reads(merge, tmp_path: Path):
    seen = "model.visual.blocks.0.attn.qkv.weight"
    for number in (0, 1):
        tensors = {
            n.replace("model.", "model.language_model."): t for n, t in llama(number).items()
        }
        write_model(tmp_path / f"see{number}", tensors | {seen: torch.full((4, 4), float(number))})
    models = [{"model": f"./see{n}", "parameters": {"weight": 0.5}} for n in (0, 1)]
    out = merge({"merge_method": "linear", "models": models})
    assert (out / "model.safetensors").is_file()
    found = read_model(out)
    assert found.keys() == {*tensors, seen}
    assert bool((found[seen] == 0.5).all())
