"""A small CLIP of transformers, and adapters that PEFT makes of it."""

from __future__ import annotations

from pathlib import Path

import torch

from atlas_cli.models.open_clip_import import import_open_clip

import_open_clip()  # mends torchvision, which these libraries import too
import peft  # noqa: E402
import transformers  # noqa: E402

ALL = ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]
Tensors = dict[str, torch.Tensor]


def small_config() -> transformers.CLIPConfig:
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    tower |= {"num_attention_heads": 2, "hidden_act": "quick_gelu"}
    vision = {**tower, "image_size": 32, "patch_size": 16}
    text = {**tower, "max_position_embeddings": 16, "vocab_size": 500}
    return transformers.CLIPConfig(vision_config=vision, text_config=text, projection_dim=24)


def clip(base: Path) -> torch.nn.Module:
    return transformers.CLIPModel.from_pretrained(base)


def adapt(model: torch.nn.Module, folder: Path, **settings) -> Tensors:
    """Have peft adapt, "train" and save a model; the deltas by name of the adapted module."""
    torch.manual_seed(2)
    config = peft.LoraConfig(**({"r": 4, "lora_alpha": 8, "target_modules": ALL} | settings))
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape))
    adapted.save_pretrained(folder)
    return deltas_of(adapted.base_model.model)


def deltas_of(model: torch.nn.Module) -> Tensors:
    with torch.no_grad():
        return {
            name: module.get_delta_weight("default").clone()
            for name, module in model.named_modules()
            if isinstance(module, peft.tuners.lora.LoraLayer) and module.lora_A
        }
