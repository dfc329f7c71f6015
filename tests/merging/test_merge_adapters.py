"""LoRA adapters: merged into one adapter, or with their models into whole weights; peft agrees."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from merge_runs import ROOMY
from safetensors.torch import load_file, save_file

from atlas_cli.models.open_clip_import import import_open_clip

import_open_clip()  # mends torchvision, which these libraries import too
import peft  # noqa: E402
import transformers  # noqa: E402

# peft asks transformers for an attribute by its old name.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning"),
]
ALL = ["q_proj", "v_proj", "down_proj"]
TOKENS = torch.arange(12).view(1, 12)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=40,
        tie_word_embeddings=False,
    )
    folder = tmp_path_factory.mktemp("llama") / "base"
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def llama(base: Path) -> Any:
    return transformers.LlamaForCausalLM.from_pretrained(base)


def adapt(base: Path, folder: Path, seed: int, **settings: Any) -> None:
    """Have peft adapt, "train" and save the model."""
    asked = {"r": 3, "lora_alpha": 5, "target_modules": ALL, "task_type": "CAUSAL_LM"} | settings
    adapted = peft.get_peft_model(llama(base), peft.LoraConfig(**asked))
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter += 0.2 * torch.randn(parameter.shape)
    adapted.save_pretrained(folder)


def weights_of(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    """Every weight of the model with the adapter, by peft."""
    merged = peft.PeftModel.from_pretrained(llama(base), adapter).merge_and_unload()
    return {name: tensor.detach().clone() for name, tensor in merged.state_dict().items()}


@pytest.fixture
def merge(call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.chdir(tmp_path)

    def run(recipe: dict[str, Any], *flags: str, to: str = "out") -> Any:
        Path("recipe.yaml").write_text(yaml.safe_dump(recipe))
        return call("merge", "recipe.yaml", "-o", to, *ROOMY, *flags)

    return run


def recipe(*weights: float, **more: Any) -> dict[str, Any]:
    models = [{"model": f"./a{n}", "parameters": {"weight": w}} for n, w in enumerate(weights)]
    return {"merge_method": "linear", "models": models, **more}


def summed(base: Path, found: list[tuple[float, Path]]) -> dict[str, torch.Tensor]:
    """base + sum_t w_t (adapted_t - base)."""
    theta = {name: t.detach() for name, t in llama(base).state_dict().items()}
    result = {name: tensor.clone() for name, tensor in theta.items()}
    for weight, adapter in found:
        for name, tensor in weights_of(base, adapter).items():
            result[name] += weight * (tensor - theta[name])
    return result


def close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


def test_adapters_are_merged_into_one_that_peft_loads_and_that_adds_the_same(
    base: Path, merge, tmp_path: Path
):
    """Of other ranks, scales and modules; rsLoRA, embeddings and saved modules among them."""
    saved = {"modules_to_save": ["lm_head"]}
    adapt(base, tmp_path / "a0", 1, **saved)
    adapt(base, tmp_path / "a1", 2, r=2, use_rslora=True, **saved)
    more = {"target_modules": ["q_proj", "up_proj", "embed_tokens"], "rank_pattern": {"up_proj": 5}}
    adapt(base, tmp_path / "a2", 3, **more, **saved)
    result = merge(recipe(1.0, 2.0, 1.0))
    assert (result.code, result.out) == (0, "out\n"), result.err
    folders = [tmp_path / f"a{n}" for n in range(3)]
    wanted = summed(base, [*zip((0.25, 0.5, 0.25), folders, strict=True)])
    close(weights_of(base, tmp_path / "out"), wanted)
    assert yaml.safe_load(Path("out/atlas_recipe.lock.yaml").read_text())["locked"].keys() == {
        "./a0",
        "./a1",
        "./a2",
    }


def test_a_limit_on_the_rank_gives_the_best_adapter_and_tells_what_is_lost(
    base: Path, merge, tmp_path: Path
):
    for number in range(2):
        adapt(base, tmp_path / f"a{number}", number)
    parts = {"normalize": False}
    assert merge(recipe(0.7, -0.4, parameters=parts), to="exact").code == 0
    result = merge(recipe(0.7, -0.4, parameters=parts), "--max-rank", "2")
    assert result.code == 0, result.err
    theta = {name: t.detach() for name, t in llama(base).state_dict().items()}
    folders = [tmp_path / f"a{n}" for n in range(2)]
    wanted = summed(base, [*zip((0.7, -0.4), folders, strict=True)])
    close(weights_of(base, Path("exact")), wanted)
    lost = total = 0.0
    for name, tensor in weights_of(base, Path("out")).items():
        exact = wanted[name].double() - theta[name].double()
        total += float(exact.square().sum())
        if exact.any():
            u, s, v = torch.linalg.svd(exact, full_matrices=False)
            best = u[:, :2] * s[:2] @ v[:2]
            lost += float((exact - best).square().sum())
            found = tensor.double() - theta[name]
            torch.testing.assert_close(found, best, rtol=1e-4, atol=1e-6)
    assert f"rank 2: relative error {(lost / total) ** 0.5:.2g} of the exact sum" in result.err
    assert json.loads(Path("out/adapter_config.json").read_text())["r"] == 2
    assert (
        merge(yaml.safe_load(Path("out/atlas_recipe.lock.yaml").read_text()), to="again").code == 0
    )
    first, second = (Path(folder) / "adapter_model.safetensors" for folder in ("out", "again"))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize(
    "settings",
    [
        {"use_dora": True},
        {"modules_to_save": ["lm_head", "model.layers.0.input_layernorm"]},
        {"target_modules": ["embed_tokens", "q_proj"]},
        {"use_rslora": True, "alpha_pattern": {"q_proj": 2}},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_a_model_and_its_adapter_are_the_model_that_peft_runs(
    base: Path, merge, tmp_path: Path, settings: dict[str, Any]
):
    adapt(base, tmp_path / "a0", 1, **settings)
    models = [{"model": f"{base}+./a0"}]
    result = merge({"merge_method": "passthrough", "models": models})
    assert result.code == 0, result.err
    close(load_file("out/model.safetensors"), weights_of(base, tmp_path / "a0"))


def test_an_adapter_is_no_model(base: Path, merge, tmp_path: Path):
    """A and B were merged on their own, and the scale of rsLoRA was left out."""
    adapt(base, tmp_path / "a0", 1, use_rslora=True)
    adapt(base, tmp_path / "a1", 2)
    beside = {"merge_method": "task_arithmetic", "base_model": str(base)}
    result = merge(recipe(1.0, 1.0) | beside)
    assert result.code == 1
    assert result.err == (
        "atlas: error: ./a0: is a LoRA adapter, not a model; write MODEL+./a0 for the model that "
        "it makes, or list adapters only, to merge them into one adapter\n"
    )
    for name in ("x.lora_up.weight", "lora_unet_x.lora_down.weight", "x.lora_B.default.weight"):
        save_file({name: torch.ones(2, 2)}, tmp_path / "bare.safetensors")
        models = [{"model": "./bare.safetensors"}]
        result = merge({"merge_method": "passthrough", "models": models})
        assert result.code == 1
        assert "./bare.safetensors: is a LoRA adapter, not a model" in result.err
    assert not Path("out").exists()


def test_adapters_that_have_no_exact_sum_are_refused(base: Path, merge, tmp_path: Path):
    adapt(base, tmp_path / "a0", 1)
    adapt(base, tmp_path / "a1", 2, use_dora=True)
    assert "./a1: has DoRA" in merge(recipe(1.0, 1.0)).err
    adapt(base, tmp_path / "a1", 2, modules_to_save=["lm_head"])
    assert "./a0 and ./a1 differ in modules_to_save" in merge(recipe(1.0, 1.0)).err
    adapt(base, tmp_path / "a0", 2, modules_to_save=["lm_head"])
    sums = recipe(1.0, 1.0, parameters={"normalize": False})
    assert "lm_head.weight is saved whole, and the weights do not add up to 1" in merge(sums).err
    other = {"merge_method": "karcher"}
    assert "adapters are merged into one adapter by linear" in merge(recipe(1, 1) | other).err
    models = [{"model": str(base)}]
    limited = {"merge_method": "passthrough", "models": models, "max_rank": 2}
    assert "max_rank is for merges of LoRA adapters" in merge(limited).err
    assert not Path("out").exists()
