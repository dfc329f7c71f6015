"""What models may differ in, and files that no merge can use: quantised, GGUF, pipelines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from merge_runs import CONFIG, linear, llama, read_model, write_model
from safetensors.torch import save_file

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def test_a_tied_model_merges_with_one_that_stores_its_head(merge, tmp_path: Path):
    tied = {name: tensor for name, tensor in llama(1).items() if name != HEAD}
    for name in ("m1", "m2"):
        config = CONFIG | {"tie_word_embeddings": name == "m1"}
        write_model(tmp_path / name, tied if name == "m1" else llama(2))
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    out = merge(linear(1, 3))
    found, two = read_model(out), llama(2)
    torch.testing.assert_close(found[HEAD], 0.25 * tied[EMBEDDING] + 0.75 * two[HEAD])
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False


def test_buffers_that_only_some_models_store_are_left_out(merge, tmp_path: Path):
    more = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "model.layers.0.attn.masked_bias": torch.tensor(-1e4),
    }
    write_model(tmp_path / "m2", llama(2) | more)
    assert read_model(merge(linear(1, 1))).keys() == llama(1).keys()


def test_models_of_several_dtypes_are_merged_in_one_that_holds_all(merge, tmp_path: Path):
    write_model(tmp_path / "m1", llama(1, dtype=torch.bfloat16))
    write_model(tmp_path / "m2", llama(2, dtype=torch.float16))
    found, one, two = read_model(merge(linear(1, 1))), llama(1), llama(2)
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    wanted = (one[HEAD].bfloat16().float() + two[HEAD].half().float()) / 2
    torch.testing.assert_close(found[HEAD], wanted)


@pytest.mark.parametrize(
    ("packed", "kind"),
    [
        ({"q_proj.qweight": torch.ones(2, 8, dtype=torch.int32)}, "GPTQ or AWQ"),
        ({"q_proj.weight.absmax": torch.ones(4)}, "bitsandbytes"),
        ({"q_proj.weight": torch.ones(8, 8, dtype=torch.int8)}, "int8"),
        ({"q_proj.weight_packed": torch.ones(8, 1, dtype=torch.int32)}, "compressed-tensors"),
        ({"q_proj.weight_scale_inv": torch.ones(1)}, "fp8"),
        ({"q_proj.weight": torch.ones(8, 8).to(torch.float8_e4m3fn)}, "F8_E4M3"),
    ],
)
def test_quantised_weights_are_refused_by_name(refused, tmp_path: Path, packed, kind: str):
    name = "model.layers.0.self_attn."
    tensors = {n: t for n, t in llama(2).items() if n != f"{name}q_proj.weight"}
    write_model(tmp_path / "m2", tensors | {name + end: tensor for end, tensor in packed.items()})
    said = refused(linear(1, 1))
    assert f"{name}{next(iter(packed))}" in said
    assert kind in said
    assert "dequantise it first" in said


def test_gguf_and_pipelines_are_refused_with_what_to_take_instead(refused, tmp_path: Path):
    (tmp_path / "m2" / "model.safetensors").unlink()
    (tmp_path / "m2" / "model-q4.gguf").write_bytes(b"GGUF" + bytes(60))
    assert "GGUF, which llama.cpp runs; take the model" in refused(linear(1, 1))
    recipe = linear(1, 1)
    recipe["models"][1]["model"] = "./m2/model-q4.gguf"
    assert "is a GGUF file" in refused(recipe)
    (tmp_path / "m2" / "model-q4.gguf").unlink()
    (tmp_path / "m2" / "model_index.json").write_text("{}")
    assert "a diffusers pipeline; name one of its parts" in refused(linear(1, 1))


def test_a_part_of_diffusers_keeps_its_file_names(merge, tmp_path: Path):
    for number in (1, 2):
        folder = tmp_path / f"m{number}"
        (folder / "model.safetensors").unlink()
        stem = "diffusion_pytorch_model"
        save_file(llama(number), folder / f"{stem}.safetensors")
        save_file(llama(number, dtype=torch.float16), folder / f"{stem}.fp16.safetensors")
    whole = merge(linear(1, 1))
    assert [path.name for path in whole.glob("*.safetensors")] == [f"{stem}.safetensors"]
    parts = merge(linear(1, 1), "--max-shard-size", "2KB", to="parts")
    index = json.loads((parts / f"{stem}.safetensors.index.json").read_text())
    assert {name.partition("-")[0] for name in index["weight_map"].values()} == {stem}
    assert read_model(parts).keys() == read_model(whole).keys()


def test_numbers_without_a_point_are_numbers(merge):
    assert read_model(merge(linear(1, 1)))
    text = "merge_method: karcher\nmodels: [{model: ./m1}, {model: ./m2}]\nparameters: {tol: 1e-10}"
    from atlas_cli.recipes.merge import read_merge
    from atlas_cli.recipes.text import write_mapping

    assert read_merge(text).recipe.parameters == {"tol": 1e-10}
    assert write_mapping({"name": "1e5"}, "") == "name: '1e5'\n"
