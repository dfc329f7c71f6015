"""Models, towers and libraries that are not what is needed: what is said of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from conftest import TINY_CONFIG, write_images, write_open_clip
from merge_runs import ROOMY, llama, write_model, write_recipe
from refusals import check, check_commands
from safetensors.torch import load_file, save_file

from atlas_cli.errors import install_hint
from atlas_cli.learning.fit import fit
from atlas_cli.learning.run import RunOptions
from atlas_cli.models.accelerator import Accelerator
from atlas_cli.models.clip import build
from atlas_cli.models.folders import Blueprint
from atlas_cli.models.linearised import parameter_order
from atlas_cli.models.trainable import write_adapter
from atlas_cli.models.transformers_config import check_installed, preprocess_config
from atlas_cli.recipes.fit import FitRecipe
from atlas_cli.recipes.model import check_recipe

WEIGHTS = "open_clip_model.safetensors"


def test_adapters_that_have_no_place_in_a_model(call, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "m1", llama(1))
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    factors = {f"{name}.lora_A.weight": torch.ones(2, 8), f"{name}.lora_B.weight": torch.ones(8, 2)}
    more = {
        "whole": {"base_model.model.other.weight": torch.ones(3)},
        "dora": {f"{name}.lora_magnitude_vector": torch.ones(5)},
    }
    for kind, tensors in more.items():
        (tmp_path / kind).mkdir()
        facts = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
        facts |= {"use_dora": kind == "dora"}
        (tmp_path / kind / "adapter_config.json").write_text(json.dumps(facts))
        save_file({**factors, **tensors}, tmp_path / kind / "adapter_model.safetensors")

    def merging(kind: str) -> tuple[str | Path, ...]:
        models = [{"model": f"./m1+./{kind}", "parameters": {"weight": 1}}]
        recipe = {"merge_method": "linear", "models": models}
        return ("merge", write_recipe(tmp_path / f"{kind}.yaml", recipe), "-o", "out", *ROOMY)

    cases = {
        "./whole: other.weight has no place in the model, so it is not applied": merging("whole"),
        "./dora: atlas does not apply the DoRA of model.layers.0.self_attn.q_proj exactly": (
            merging("dora")
        ),
    }
    check_commands(call, cases, 1)


def test_towers_that_do_not_fit(call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "photos", count=1)
    write_open_clip(tmp_path / "whole")
    write_open_clip(tmp_path / "tower")
    tensors = load_file(tmp_path / "whole" / WEIGHTS)
    seen = {name: tensor for name, tensor in tensors.items() if name.startswith("visual.")}
    save_file({**seen, "visual.extra": torch.ones(1)}, tmp_path / "tower" / WEIGHTS)
    names = parameter_order(list(seen))
    count = len(names)
    numbered = {
        f"model.params{kind}.{n}": torch.zeros(1) for n in range(count) for kind in ("", "0")
    }
    save_file(numbered, tmp_path / "linear.safetensors")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "open_clip_config.json").mkdir()
    save_file(tensors, tmp_path / "odd" / WEIGHTS)
    scored = ("--data", "photos", "-q")
    cases = {
        "./tower: visual.extra has no place in ./whole (1 such tensors)": (
            *("eval", "./tower", "--text", "./whole", *scored),
        ),
        f"linear.safetensors: {names[0]} has shape (1,), expected": (
            *("extract", "./whole", "linear.safetensors", "-o", "v.safetensors"),
        ),
        "open_clip_config.json: cannot be read: is not a regular file": ("eval", "./odd", *scored),
    }
    check_commands(call, cases, 1)


def test_settings_that_atlas_does_not_follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").touch()
    photos = write_images(tmp_path / "photos", count=1)
    module, _ = build(Blueprint(TINY_CONFIG, {}))
    given = {"data": str(photos), "model": "builtin:tiny", "vectors": ["builtin:letters"]}
    recipe = check_recipe(FitRecipe, given)
    check(
        {
            "here: do_resize is false, which atlas does not follow": (
                lambda: preprocess_config({"do_resize": False}, "here")
            ),
            "here: size 256, crop 224, resample 3: atlas resizes and crops to one size": (
                lambda: preprocess_config({"size": 256}, "here")
            ),
            "--precision fp8: expected auto, fp32, bf16": (
                lambda: fit(recipe, RunOptions(precision="fp8", device="cpu"))
            ),
            "file/adapter: cannot be written: Not a directory": (
                lambda: write_adapter(module, 2, {}, tmp_path / "file" / "adapter")
            ),
        }
    )
    monkeypatch.setitem(sys.modules, "transformers", None)
    hint = install_hint("hf")
    said = f"roberta: is a text tower of transformers, which is not installed; run: {hint}"
    check({said: lambda: check_installed("roberta")})


def test_memory_that_is_not_enough_for_one_image():
    told: list[str] = []

    def too_large(images: torch.Tensor) -> torch.Tensor:
        return torch.empty(1 << 50)  # more than any machine has

    accelerator = Accelerator(torch.device("cpu"), "fp32", told.append)
    said = "not enough memory on cpu; fewer vectors, --storage int8, --device-memory 0 or"
    check({said: lambda: accelerator.features(too_large, torch.zeros(4, 1))})
    assert [line.partition(":")[0] for line in told] == [
        f"not enough memory on cpu for {size} images at a time" for size in (4, 2)
    ]
