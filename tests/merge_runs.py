"""Tiny models for merges: named tensors in a folder, and recipes that name the folders."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32"}
Tensors = dict[str, torch.Tensor]
ROOMY = ("--memory", "8GB")  # the process of the tests itself is in the budget


def llama(seed: int, *, layers: int = 3, width: int = 8, dtype: torch.dtype = torch.float32):
    """Random tensors under Llama's names; those of other seeds are small steps from seed 0."""
    shapes = {"model.embed_tokens.weight": (20, width), "model.norm.weight": (width,)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes[f"{prefix}self_attn.q_proj.weight"] = (width, width)
        shapes[f"{prefix}mlp.up_proj.weight"] = (2 * width, width)
        shapes[f"{prefix}input_layernorm.weight"] = (width,)
    shapes["lm_head.weight"] = (20, width)
    base, random = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
    first = {name: torch.randn(shape, generator=base) for name, shape in shapes.items()}
    if seed:
        first = {n: t + 0.1 * torch.randn(t.shape, generator=random) for n, t in first.items()}
    return {name: tensor.to(dtype) for name, tensor in first.items()}


def write_model(folder: Path, tensors: Mapping[str, torch.Tensor], shards: int = 1) -> Path:
    """A folder as transformers writes it, in one file or in several."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", {"format": "pt"})
        return folder
    where = {}
    for number in range(shards):
        name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(tensors.items())[number::shards])
        save_file(part, folder / name, {"format": "pt"})
        where |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def read_model(folder: Path) -> Tensors:
    """All tensors of a folder."""
    found: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def digests(folder: Path) -> dict[str, str]:
    """The sha256 of every file in a folder."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def write_recipe(path: Path, found: Mapping[str, Any]) -> Path:
    """A recipe as JSON, which is YAML."""
    path.write_text(json.dumps(found))
    return path


def linear(*weights: float, **more: Any) -> dict[str, Any]:
    """A linear merge of ./m1, ./m2, ... with these weights."""
    models = [
        {"model": f"./m{number}", "parameters": {"weight": weight}}
        for number, weight in enumerate(weights, start=1)
    ]
    return {"merge_method": "linear", "models": models, **more}
