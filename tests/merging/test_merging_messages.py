"""Merges of what does not go together, or into places that cannot be written: what is said."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from language_models import write_tokenizer
from merge_runs import CONFIG, ROOMY, linear, llama, write_model, write_recipe
from refusals import check, check_commands
from safetensors.torch import save_file

from atlas_cli.io.staging import StagingFolder
from atlas_cli.merging.execute import check_device
from atlas_cli.merging.plan import Limits, Output, Plan

QUERY = "model.layers.0.self_attn.q_proj"


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """m1, m2 and m3 in the working directory."""
    monkeypatch.chdir(tmp_path)
    for number in (1, 2, 3):
        write_model(tmp_path / f"m{number}", llama(number))


def merging(name: str, recipe: Mapping[str, Any], *more: str) -> tuple[str | Path, ...]:
    return ("merge", write_recipe(Path(f"{name}.yaml"), recipe), *more, *ROOMY)


def write_adapter(folder: Path, **whole: torch.Tensor) -> Path:
    """A LoRA of one layer, with further tensors."""
    folder.mkdir()
    facts = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(facts))
    factors = {"lora_A.weight": torch.ones(2, 8), "lora_B.weight": torch.ones(8, 2), **whole}
    named = {f"base_model.model.{QUERY}.{name}": tensor for name, tensor in factors.items()}
    save_file(named, folder / "adapter_model.safetensors")
    return folder


def test_adapters_of_several_bases_or_without_a_weight(call, tmp_path: Path):
    for number in (1, 2):
        frozen = {"base_layer.weight": torch.full((8, 8), float(number))}
        write_adapter(tmp_path / f"a{number}", **frozen)
        write_adapter(tmp_path / f"b{number}")

    def of(kind: str, weight: object) -> dict[str, object]:
        entries = [{"model": f"./{kind}{n}", "parameters": {"weight": weight}} for n in (1, 2)]
        return {"merge_method": "linear", "models": entries}

    filtered = [{"filter": "mlp", "value": 0.5}]
    bases = merging("a", of("a", 0.5), "-o", "out")
    check_commands(call, {f"./a2: its {QUERY}.weight is that of another base": bases}, 1)
    weights = merging("b", of("b", filtered), "-o", "out")
    said = f"{QUERY}: no filter gives it a weight of ./b1; add an entry without one"
    check_commands(call, {said: weights}, 2)


def test_tokens_that_no_model_can_give(call, tmp_path: Path):
    for number in (1, 2, 3):
        added = ["<a>"] if number == 3 else []
        tensors = llama(number)
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = torch.zeros(20 + len(added), 8)
        write_model(tmp_path / f"m{number}", tensors)
        config = CONFIG | {"vocab_size": 20 + len(added)}
        (tmp_path / f"m{number}" / "config.json").write_text(json.dumps(config))
        write_tokenizer(tmp_path / f"m{number}", added, size=20)
    row = {"source": {"kind": "model_token", "model": "./m3", "token": "<a>"}}
    spans = [
        {
            "sources": [
                {"model": f"./m{n}", "layer_range": [first, end], "parameters": {"weight": 1}}
                for n in chosen
            ]
        }
        for first, end, chosen in ((0, 2, (1, 2)), (2, 3, (2, 3)))
    ]
    tokens = {"source": "union", "tokens": {"<a>": row}}
    recipe = {"merge_method": "linear", "slices": spans, "tokenizer": tokens}
    given = merging("r", recipe, "-o", "out")
    check_commands(
        call, {"tokenizer.tokens.<a>: ./m3 is no model of what is merged there": given}, 2
    )
    # A tokenizer of whole words, with one that has no row in the embedding.
    raw = json.loads((tmp_path / "m1" / "tokenizer.json").read_text())
    raw["model"] = {"type": "WordLevel", "unk_token": "<unk>", "vocab": raw["model"]["vocab"]}
    raw["model"]["vocab"]["beyond"] = 20
    (tmp_path / "m1" / "tokenizer.json").write_text(json.dumps(raw))
    given = merging("r", linear(1, 1, tokenizer_source="union"), "-o", "out")
    said = "its tokenizer has 1 tokens beyond the 20 rows of its embedding, and only those of BPE"
    check_commands(call, {said: given}, 1)


def test_learned_recipes_that_name_other_files(call, tmp_path: Path):
    table = tmp_path / "table.json"
    table.write_text("[]")
    learned = {"merge_method": "atlas", "base_model": "builtin:tiny", "granularity": "vector"}

    def of(coefficients: object, **entry: str) -> dict[str, object]:
        return {**learned, "vectors": [entry], "coefficients": coefficients}

    one = {"letters": {"all": 0.5}}
    named = merging("named", of(one, file="builtin:letters", name="digits"), "-o", "out")
    tabled = merging("tabled", of(str(table), file="builtin:letters"), "-o", "out")
    cases = {
        "builtin:letters: is called letters, not digits": named,
        "table.json: is no table of coefficients: 'list' object has no attribute 'items'": tabled,
    }
    check_commands(call, cases, 1)
    several = merging("several", of(one, file="builtin:all", name="digits"), "-o", "out")
    check_commands(call, {"builtin:all: stands for ": several}, 2)


def test_places_that_cannot_be_written(call, as_ordinary_user, tmp_path: Path):
    (tmp_path / "sealed").mkdir(mode=0o555)
    (tmp_path / "file").touch()
    recipe = linear(1, 1)
    sealed = {
        "sealed/out: cannot be written: Permission denied": merging(
            "r", recipe, "-o", "sealed/out"
        ),
        "sealed/cut: cannot be written: Permission denied": (
            merging("r", recipe, "-o", "sealed/cut", "--slice", "1/2")
        ),
    }
    check_commands(as_ordinary_user, sealed, 1)
    steps = [{**recipe, "name": "first"}, linear(1, 1)]
    steps[1]["models"][0]["model"] = "first"
    Path("steps.yaml").write_text("\n---\n".join(map(json.dumps, steps)))
    given = ("merge", "steps.yaml", "-o", "out", "--keep-intermediate", "file/kept", *ROOMY)
    check_commands(call, {"file/kept: cannot be written: Not a directory": given}, 1)
    # A slice, and then the whole, where a file of the model has become a folder.
    assert call(*merging("r", recipe, "-o", "cut", "--slice", "1/1")).code == 0
    (staged,) = tmp_path.glob(".cut.*/**/model*.safetensors")
    staged.unlink()
    staged.mkdir()
    cut = {
        "cut: cannot be written: Is a directory": (
            merging("r", recipe, "-o", "cut", "--slice", "1/1")
        ),
    }
    check_commands(call, cut, 1)
    finish = {
        "cut: slices are missing or not complete: 1/1; write them with --slice": merging(
            "r", recipe, "-o", "cut", "--finish"
        )
    }
    check_commands(call, finish, 1)


def test_slices_beside_a_merge_that_was_stopped(call):
    recipe = merging("r", linear(1, 1), "-o", "out", "--slice", "1/2")
    StagingFolder(Path("out"), "0" * 64, {"model.safetensors": 100}).close()
    said = "out: a stopped merge without slices is there; remove "
    check_commands(call, {said: recipe}, 1)


def test_a_device_without_float64():
    made = Output(0, "a", (2,), torch.float64, torch.float64, "m.safetensors", 0, merged=True)
    limits = Limits(device=torch.device("mps"))  # has none where there is one, and none is here
    said = "--device mps: has no float64, which a is computed in"
    check({said: lambda: check_device(Plan((made,), ()), limits)})
