"""mergekit's recipes run unchanged on a Llama and on CLIP, and give mergekit's tensors."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from atlas_cli.cli.app import main
from atlas_cli.models.clip import import_open_clip
from atlas_cli.sources.references import builtin_model

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
    "task_arithmetic": {"models": plain({"weight": 0.6}, {"weight": -1.4}), "base_model": "base"},
    "task_arithmetic_gradient": {
        "merge_method": "task_arithmetic",
        "models": plain({"weight": 0.6}, GRADIENT),
        "base_model": "base",
    },
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
    "multislerp": {"models": plain(*({"weight": w} for w in (0.5, 0.3))), "base_model": "base"},
    "karcher": {"models": plain({}, {}, {})},
    "passthrough": {"models": plain({"scale": 0.3})},
    "breadcrumbs_ties": {
        "models": plain(*[{"weight": 0.5, "density": 0.8, "gamma": 0.05}] * 2),
        "base_model": "base",
    },
}
# What is drawn by chance is compared in test_mergekit_methods.py; here nothing is dropped.
RECIPES |= {
    name: {"models": plain(*({"weight": w} for w in (0.6, 0.2, -0.3))), "base_model": "base"}
    for name in ("dare_linear", "dare_ties", "della", "della_linear")
}
EXACT = ("linear", "task_arithmetic", "passthrough", "dare_linear", "dare_ties", "della_linear")
# Which of several elements of equal magnitude mergekit takes depends on a sort that is not stable.
SELECTING = ("ties", "breadcrumbs", "sce", "breadcrumbs_ties")


def any_gradient(found: Any) -> bool:
    """Whether a list of numbers is anywhere in it."""
    if isinstance(found, dict):
        return any(map(any_gradient, found.values()))
    return isinstance(found, list) and (
        isinstance(found[0], int | float) or any(map(any_gradient, found))
    )


# mergekit knows no layers in a bare file, so that a gradient has no meaning there.
FLAT = [name for name, recipe in RECIPES.items() if not any_gradient(recipe)]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def merged(request, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four small Llamas, and every recipe merged by both programs."""
    folder = tmp_path_factory.mktemp(request.param)
    write_llamas(folder, getattr(torch, request.param))
    for name, recipe in RECIPES.items():
        text = yaml.safe_dump(spelt({"merge_method": name, **recipe}, folder))
        (folder / f"{name}.yaml").write_text(text)
    run_mergekit(folder)
    return folder


def run_mergekit(folder: Path, *flags: str) -> None:
    command = [PYTHON, Path(__file__).parent.parent / "mergekit_runs.py", folder, *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def raw(request, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four weight files of a CLIP model, and every recipe merged by both programs."""
    folder = tmp_path_factory.mktemp(f"raw-{request.param}")
    start = load_file(builtin_model("tiny") / "open_clip_model.safetensors")
    random = torch.Generator().manual_seed(0)
    for name in ("base", "a", "b", "c"):
        moved = {
            key: tensor + 0.05 * (name != "base") * torch.randn(tensor.shape, generator=random)
            for key, tensor in start.items()
            if tensor.is_floating_point()
        }
        found = {key: tensor.to(getattr(torch, request.param)) for key, tensor in moved.items()}
        save_file(found, folder / f"{name}.safetensors")
    for name in FLAT:
        text = yaml.safe_dump(
            spelt({"merge_method": name, **RECIPES[name]}, folder, ".safetensors")
        )
        (folder / f"{name}.yaml").write_text(text)
    run_mergekit(folder, "raw")
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


def spelt(recipe: dict[str, Any], folder: Path, suffix: str = "") -> dict[str, Any]:
    """The recipe with the folders of its models, or their files."""
    models = [{**one, "model": f"{folder / one['model']}{suffix}"} for one in recipe["models"]]
    found = {**recipe, "models": models}
    if "base_model" in recipe:
        found["base_model"] = f"{folder / recipe['base_model']}{suffix}"
    return found


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


@pytest.mark.parametrize("name", RECIPES)
def test_the_same_recipe_gives_the_same_tensors(merged: Path, tmp_path: Path, name: str):
    compare(merged, tmp_path, name)


@pytest.mark.parametrize("name", FLAT)
def test_the_same_recipe_of_weight_files_gives_the_same_tensors(
    raw: Path, tmp_path: Path, name: str
):
    compare(raw, tmp_path, name)


def compare(folder: Path, tmp_path: Path, name: str) -> None:
    """The same bits, or the same to rounding, or nearer to the exact result than mergekit's."""
    ours, theirs = merge(folder / f"{name}.yaml", tmp_path / "x"), tensors_of(folder / name)
    assert ours.keys() == theirs.keys()
    method = name.partition("_g")[0].partition("_f")[0]
    far = []
    for key, wanted in theirs.items():
        found = ours[key]
        if name == "karcher" and not wanted.ndim:  # mergekit leaves a scalar in float32
            wanted = wanted.to(found.dtype)
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), key
        if method in EXACT:
            assert torch.equal(found, wanted), key
        elif apart(found, wanted) > (1e-6 if found.dtype == torch.float32 else 2e-3):
            far.append(key)
    if not far:
        return
    if method in SELECTING:
        assert next(iter(ours.values())).dtype == torch.bfloat16
        assert apart(flat(ours), flat(theirs)) < 0.05
        return
    text = (folder / f"{name}.yaml").read_text() + "\ndtype: float64\n"
    (tmp_path / "exact.yaml").write_text(text)
    exact = merge(tmp_path / "exact.yaml", tmp_path / "exact")
    for key in far:
        assert apart(ours[key], exact[key]) < apart(theirs[key], exact[key]), key


def merge(recipe: Path, target: Path) -> dict[str, torch.Tensor]:
    assert main(["merge", str(recipe), "-o", str(target), "--memory", "4GB", "-q"]) == 0
    return tensors_of(target)


def flat(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())
