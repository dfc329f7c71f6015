"""Small models laid out exactly as published repositories are, for the loopback Hub."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import torch
from adapters import adapt
from safetensors.torch import load_file, save_file

from atlas_cli.models.open_clip_import import import_open_clip

import_open_clip()  # mends torchvision, which transformers imports too
import transformers  # noqa: E402

BASE = "openai/clip-vit-base-patch32"
EIGHT = ("sun397", "stanford-cars", "resisc45", "eurosat", "svhn", "gtsrb", "mnist", "dtd")


def small_config() -> Any:
    """A CLIP whose text tower takes the tokens of open_clip's tokenizer."""
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    tower |= {"num_attention_heads": 2, "hidden_act": "quick_gelu"}
    vision = {**tower, "image_size": 32, "patch_size": 16}
    text = {**tower, "max_position_embeddings": 16, "vocab_size": 49408}
    text |= {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
    return transformers.CLIPConfig(vision_config=vision, text_config=text, projection_dim=16)


def clip() -> Any:
    torch.manual_seed(0)
    return transformers.CLIPModel(small_config())


def tuned(model: Any, seed: int) -> Any:
    """A copy whose image tower has moved a little, and nothing else, as the published ones."""
    made = copy.deepcopy(model)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.vision_model.parameters():
            parameter += 0.02 * parameter.std() * torch.randn(parameter.shape, generator=random)
    return made


def write_base(model: Any, folder: Path) -> Path:
    """config.json, model.safetensors and preprocessor_config.json, as OpenAI's repositories."""
    model.save_pretrained(folder)
    transformers.CLIPImageProcessor(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
    ).save_pretrained(folder)
    return folder


def write_vision(model: Any, folder: Path, *, prefix: bool = True) -> Path:
    """A CLIPVisionModel: config.json and model.safetensors, of version 4 with a prefix."""
    _vision(model).save_pretrained(folder)
    found = load_file(folder / "model.safetensors")
    plain = {name.removeprefix("vision_model."): tensor for name, tensor in found.items()}
    start = "vision_model." if prefix else ""
    named = {f"{start}{name}": tensor.contiguous() for name, tensor in plain.items()}
    save_file(named, folder / "model.safetensors", {"format": "pt"})
    return folder


def write_adapter(model: Any, folder: Path) -> Path:
    """A peft adapter of the vision model, whose names lack that segment."""
    vision = _inner(_vision(model))
    with warnings.catch_warnings(action="ignore"):  # of what peft calls and transformers gives up
        adapt(vision, folder, r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"])
    return folder


def write_open_clip(base: Path, weights: Path, folder: Path) -> Path:
    """open_clip_config.json and open_clip_model.safetensors, as open_clip pushes them."""
    from atlas_cli.models.clip import read_blueprint
    from atlas_cli.sources.locate import locate, parse_reference

    found = read_blueprint(locate(parse_reference(str(base))))
    folder.mkdir()
    config = {"model_cfg": found.model, "preprocess_cfg": found.preprocess}
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    tensors = {name: tensor.contiguous() for name, tensor in torch.load(weights).items()}
    save_file(tensors, folder / "open_clip_model.safetensors", {"format": "pt"})
    return folder


def _vision(model: Any) -> Any:
    vision = transformers.CLIPVisionModel(model.config.vision_config)
    _inner(vision).load_state_dict(_inner(model.vision_model).state_dict())
    return vision


def _inner(vision: Any) -> Any:
    """The module that version 4 calls vision_model, and that version 5 is itself."""
    return getattr(vision, "vision_model", vision)


def open_clip_state(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a folder under open_clip's names."""
    from atlas_cli.models.folders import read_tensors
    from atlas_cli.sources.locate import locate, parse_reference

    source = locate(parse_reference(str(folder)))
    return {name: tensor.read().clone() for name, tensor in read_tensors(source).items()}
