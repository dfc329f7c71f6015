"""mergekit's recipes run unchanged on a Llama, and give mergekit's tensors."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from atlas_cli.commands.app import main
from atlas_cli.vision import import_open_clip

PYTHON = os.environ.get("ATLAS_MERGEKIT_PYTHON")
pytestmark = pytest.mark.skipif(
    not PYTHON, reason="ATLAS_MERGEKIT_PYTHON does not name a python with mergekit 0.1.5"
)
LAYERS = 4
GRADIENT = {"weight": [0.2, 0.9, 0.5]}
FILTERED = {"weight": [{"filter": "self_attn", "value": 0.3}, {"filter": "mlp", "value": [0, 1]}]}
FILTERED["weight"].append({"value": 0.5})


def plain(*models: dict[str, Any]) -> list[dict[str, Any]]:
    names = ("a", "b", "c")
    return [
        {"model": name, "parameters": given} for name, given in zip(names, models, strict=False)
    ]


RECIPES: dict[str, dict[str, Any]] = {
    "linear": {"models": plain({"weight": 0.7}, {"weight": 0.4})},
    "linear_gradient": {"merge_method": "linear", "models": plain(GRADIENT, {"weight": 0.5})},
    "linear_filter": {"merge_method": "linear", "models": plain(FILTERED, {"weight": [1, 0]})},
    "slerp": {"models": plain({}, {}), "base_model": "a", "parameters": {"t": 0.3}},
    "slerp_gradient": {
        "merge_method": "slerp",
        "models": plain({}, {}),
        "base_model": "a",
        "parameters": {
            "t": [
                {"filter": "self_attn", "value": [0, 0.5, 0.3, 0.7, 1]},
                {"filter": "mlp", "value": [1, 0.5, 0.7, 0.3, 0]},
                {"value": 0.5},
            ]
        },
    },
    "task_arithmetic": {"models": plain({"weight": 0.6}, GRADIENT), "base_model": "base"},
    "ties": {
        "models": plain({"weight": 0.6, "density": 0.5}, {"weight": 0.3, "density": 0.7}),
        "base_model": "base",
        "parameters": {"normalize": True, "lambda": 0.9},
    },
    "breadcrumbs": {
        "models": plain(*[{"weight": 0.5, "density": 0.8, "gamma": 0.05}] * 2),
        "base_model": "base",
    },
    "model_stock": {"models": plain({}, {}, {}), "base_model": "base"},
    "nuslerp": {"models": plain({"weight": 0.4}, {"weight": 0.6})},
    "sce": {
        "models": plain({}, {}, {}),
        "base_model": "base",
        "parameters": {"select_topk": 0.6},
    },
}
EXACT = ("linear", "task_arithmetic")
SELECTING = ("ties", "breadcrumbs", "sce")  # among equal magnitudes mergekit follows no rule


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def merged(request, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four small Llamas, and every recipe merged by both programs."""
    folder = tmp_path_factory.mktemp(request.param)
    write_llamas(folder, getattr(torch, request.param))
    for name, recipe in RECIPES.items():
        text = yaml.safe_dump(spelt({"merge_method": name, **recipe}, folder))
        (folder / f"{name}.yaml").write_text(text)
    driver = Path(__file__).parent / "mergekit_runs.py"
    done = subprocess.run([PYTHON, driver, folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


def write_llamas(folder: Path, dtype: torch.dtype) -> None:
    import_open_clip()
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    base = LlamaForCausalLM(config).to(dtype)
    start = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    base.save_pretrained(folder / "base", max_shard_size="100KB")
    for name in ("a", "b", "c"):
        moved = {key: tensor + 0.02 * torch.randn_like(tensor) for key, tensor in start.items()}
        base.load_state_dict(moved)
        base.save_pretrained(folder / name, max_shard_size="100KB")


def spelt(recipe: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The recipe with the folders of its models."""
    models = [{**entry, "model": str(folder / entry["model"])} for entry in recipe["models"]]
    found = {**recipe, "models": models}
    if "base_model" in recipe:
        found["base_model"] = str(folder / recipe["base_model"])
    return found


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


@pytest.mark.parametrize("name", RECIPES)
def test_the_same_recipe_gives_the_same_tensors(merged: Path, tmp_path: Path, name: str):
    recipe, target = merged / f"{name}.yaml", tmp_path / "x"
    assert main(["merge", str(recipe), "-o", str(target), "--memory", "4GB", "-q"]) == 0
    ours, theirs = tensors_of(tmp_path / "x"), tensors_of(merged / name)
    assert ours.keys() == theirs.keys()
    method = name.partition("_g")[0].partition("_f")[0]
    for key, wanted in theirs.items():
        found = ours[key]
        assert found.dtype == wanted.dtype, key
        assert found.shape == wanted.shape, key
        if method in EXACT:
            assert torch.equal(found, wanted), key
            continue
        difference = (found.double() - wanted.double()).norm() / wanted.double().norm()
        loose = 0.05 if method in SELECTING and wanted.dtype != torch.float32 else 1e-6
        limit = loose if wanted.dtype == torch.float32 else max(loose, 2e-3)
        assert difference <= limit, f"{key}: {difference:.2g}"
