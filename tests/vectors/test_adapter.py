"""Adapters extracted from whole models: peft loads them, and the model is the fine-tuned one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from atlas_cli.models.open_clip_import import import_open_clip

open_clip = import_open_clip()  # mends torchvision, which these libraries import too
import peft  # noqa: E402
import transformers  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*tied:UserWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings:UserWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to True:UserWarning"),
]
SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "vocab_size": 40}
FAMILIES: dict[str, Any] = {
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SMALL, intermediate_size=24, num_key_value_heads=1)
    ),
    "qwen, tied": lambda: transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(
            **SMALL, intermediate_size=24, num_key_value_heads=1, tie_word_embeddings=True
        )
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=40, n_positions=20)
    ),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, vocab_size=40,
            tie_word_embeddings=False,
        )
    ),
}  # fmt: skip


def move(path: Path, *, keep: str = "bias") -> None:
    """A step of low rank in every matrix, and of norms; biases of layers stay."""
    random = torch.Generator().manual_seed(1)
    moved = {}
    for name, tensor in load_file(path).items():
        step = torch.zeros(tensor.shape)
        if tensor.dim() > 1 and tensor.dtype.is_floating_point:
            for _ in range(3):
                sizes = (len(tensor), tensor[0].numel())
                ends = [torch.randn(size, generator=random) for size in sizes]
                step += 0.02 * torch.outer(*ends).view(tensor.shape)
        elif not name.endswith(keep) and tensor.dtype.is_floating_point:
            step = 0.02 * torch.randn(tensor.shape, generator=random)
        moved[name] = (tensor + step).to(tensor.dtype)
    save_file(moved, path, {"format": "pt"})


def logits(model: Any) -> torch.Tensor:
    tokens = torch.arange(12).view(1, 12)
    more = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model.eval()(tokens, **more).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_with_its_adapter_is_the_fine_tuned_one(family: str, call, tmp_path: Path):
    torch.manual_seed(0)
    model = FAMILIES[family]()
    model.save_pretrained(tmp_path / "base")
    shutil.copytree(tmp_path / "base", tmp_path / "tuned")
    move(tmp_path / "tuned" / "model.safetensors")
    asked = ("extract", tmp_path / "base", tmp_path / "tuned", "--json")
    result = call(*asked, "-o", tmp_path / "adapter", "--lora", "3")
    assert result.code == 0, result.err
    (made,) = json.loads(result.out)["adapters"]
    assert made["error"] < 1e-5
    assert made["rank"] == 3
    base, tuned = (type(model).from_pretrained(tmp_path / name) for name in ("base", "tuned"))
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(logits(adapted), logits(tuned), rtol=1e-4, atol=1e-5)

    result = call(*asked, "-o", tmp_path / "most", "--lora", "0.9")
    (made,) = json.loads(result.out)["adapters"]
    assert 0 < made["error"] <= 0.1**0.5
    assert made["rank"] <= 3


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_adapter_of_open_clip_has_fused_attention(call, tmp_path: Path):
    """Weights are stored in fp16, whose rounding has every rank."""
    from atlas_cli.sources.locate import builtin_model

    shutil.copytree(builtin_model("tiny"), tmp_path / "tuned")
    move(tmp_path / "tuned" / "open_clip_model.safetensors")
    result = call(
        *("extract", "builtin:tiny", tmp_path / "tuned", "--json"),
        *("-o", tmp_path / "adapter", "--lora", "3"),
    )
    assert result.code == 0, result.err
    (made,) = json.loads(result.out)["adapters"]
    assert f"peft cannot adapt {made['left_out'][0]}" in result.err
    load = open_clip.create_model
    base, tuned = load(f"local-dir:{builtin_model('tiny')}"), load(f"local-dir:{tmp_path}/tuned")
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
    found, wanted = dict(adapted.named_parameters()), dict(tuned.named_parameters())
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        if name not in made["left_out"]:
            torch.testing.assert_close(
                found[name],
                tensor,
                rtol=1e-3,
                atol=5e-4,
                msg=lambda said, name=name: f"{name}: {said}",
            )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--lora", "0"), "--lora 0: expected a rank such as 16, or a share such as 0.99"),
        (("--lora", "1.5"), "--lora 1.5: expected a rank"),
        (("--lora", "4", "--rank", "2"), "--lora sets the rank itself"),
        (("--lora", "4", "--dtype", "int8"), "an adapter has fp32, fp16 or bf16"),
        (("--lora", "4", "--scale", "2"), "--scale is for task vectors"),
    ],
)
def test_wrong_flags_are_one_line(flags: tuple[str, ...], said: str, call, tmp_path: Path):
    result = call("extract", "builtin:tiny", "builtin:tiny", "-o", tmp_path / "out", *flags)
    assert result.code == 2
    assert said in result.err
    assert not (tmp_path / "out").exists()


def test_what_gives_no_adapter_is_told(call, tmp_path: Path):
    asked = ("extract", "builtin:tiny", "builtin:tiny", "--lora", "4", "-o")
    assert "builtin:tiny: is identical to builtin:tiny" in call(*asked, tmp_path / "out").err
    assert "an adapter is a folder" in call(*asked, tmp_path / "out.safetensors").err
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").touch()
    assert "exists already; use --force" in call(*asked, tmp_path / "full").err
    assert "holds no adapter" in call(*asked, tmp_path / "full", "--force").err
    assert not (tmp_path / "out").exists()
