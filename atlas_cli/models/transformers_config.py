"""The configuration of a CLIP model of transformers, told as one of open_clip."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

from atlas_cli.errors import AtlasError, CheckpointError, install_hint
from atlas_cli.models.folders import Blueprint, checked_blueprint
from atlas_cli.sources.locate import Source

# What transformers leaves out of config.json because it is the default.
_VISION_DEFAULTS: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
    "projection_dim": 512,
}
_TEXT_DEFAULTS: dict[str, Any] = {
    "vocab_size": 49408,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "max_position_embeddings": 77,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
_RESAMPLING = {0: "nearest", 2: "bilinear", 3: "bicubic"}
_ACTIVATIONS = {"gelu": False, "quick_gelu": True}


def transformers_blueprint(source: Source, config: Mapping[str, Any]) -> Blueprint:
    """What a folder of transformers says of its CLIP model, in the words of open_clip."""
    where = source.reference.text
    found = source.config("preprocessor_config.json")
    model = _translated(model_config, config, where)
    doubts: tuple[str, ...] = ()
    if found is not None:
        preprocess = _translated(preprocess_config, found, where)
    else:  # every CLIP of transformers that was published has the same
        preprocess = usual_preprocessing(model)
        doubts = (
            f"{where}: has no preprocessor_config.json; images are prepared as for OpenAI's CLIP, "
            f"at {preprocess['size']} pixels",
        )
    return checked_blueprint(source, model, preprocess, f"{where}: config.json", doubts)


def _translated(
    translate: Callable[[Mapping[str, Any], str], dict[str, Any]],
    config: Mapping[str, Any],
    where: str,
) -> dict[str, Any]:
    """What a configuration of transformers says in the words of open_clip."""
    try:
        return translate(config, where)
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as problem:
        raise CheckpointError(
            f"{where}: its configuration lacks something or has it in another form: {problem!r}"
        ) from problem


def is_vision_only(config: Mapping[str, Any]) -> bool:
    """Whether a transformers configuration describes an image tower alone."""
    return config.get("model_type") == "clip_vision_model"


def model_config(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """open_clip's `model_cfg` for a transformers CLIP configuration."""
    if config.get("model_type") not in {"clip", "clip_vision_model"}:
        found = config.get("model_type", "no model_type")
        way = "; open_clip has it, for example timm/ViT-B-16-SigLIP" if found == "siglip" else ""
        raise CheckpointError(f"{where}: config.json describes {found}, not a CLIP model{way}")
    vision_part = config if is_vision_only(config) else config.get("vision_config") or {}
    vision = _VISION_DEFAULTS | dict(vision_part)
    text = _TEXT_DEFAULTS | dict(config.get("text_config") or {})
    width = config.get("projection_dim", 512)
    return {
        "embed_dim": width,
        "quick_gelu": _quick_gelu([vision] if is_vision_only(config) else [vision, text], where),
        "vision_cfg": {
            "image_size": vision["image_size"],
            "patch_size": vision["patch_size"],
            **_tower(vision, where),
            "head_width": vision["hidden_size"] // vision["num_attention_heads"],
        },
        "text_cfg": {
            "context_length": text["max_position_embeddings"],
            "vocab_size": text["vocab_size"],
            **_tower(text, where),
            "heads": text["num_attention_heads"],
        },
    }


def _tower(part: Mapping[str, Any], where: str) -> dict[str, Any]:
    if part["layer_norm_eps"] != 1e-5:
        found = part["layer_norm_eps"]
        raise CheckpointError(f"{where}: layer_norm_eps is {found}; open_clip computes with 1e-05")
    return {
        "width": part["hidden_size"],
        "layers": part["num_hidden_layers"],
        "mlp_ratio": part["intermediate_size"] / part["hidden_size"],
    }


def _quick_gelu(parts: list[dict[str, Any]], where: str) -> bool:
    found = {str(part["hidden_act"]) for part in parts}
    if len(found) != 1 or not found <= _ACTIVATIONS.keys():
        listed = " and ".join(sorted(found))
        raise CheckpointError(f"{where}: hidden_act is {listed}; expected gelu or quick_gelu")
    return _ACTIVATIONS[found.pop()]


def usual_preprocessing(model: Mapping[str, Any]) -> dict[str, Any]:
    """open_clip's `preprocess_cfg` of OpenAI's CLIP, at the image size of a model."""
    return {
        "size": model["vision_cfg"]["image_size"],
        "mean": [0.48145466, 0.4578275, 0.40821073],
        "std": [0.26862954, 0.26130258, 0.27577711],
        "interpolation": "bicubic",
        "resize_mode": "shortest",
    }


def preprocess_config(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """open_clip's `preprocess_cfg` for a transformers preprocessor_config.json."""
    for key in ("do_resize", "do_center_crop", "do_normalize"):
        if config.get(key) is False:
            raise CheckpointError(f"{where}: {key} is false, which atlas does not follow")
    size, crop = _edge(config.get("size", 224)), _edge(config.get("crop_size", 224))
    resample = config.get("resample", 3)
    if size != crop or resample not in _RESAMPLING:
        raise CheckpointError(
            f"{where}: size {size}, crop {crop}, resample {resample}: atlas resizes and crops to "
            "one size by nearest, bilinear or bicubic interpolation"
        )
    return {
        "size": size,
        "mean": list(config["image_mean"]),
        "std": list(config["image_std"]),
        "interpolation": _RESAMPLING[resample],
        "resize_mode": "shortest",
    }


def _edge(size: Any) -> Any:
    """The edge of a square given as a number or as one of transformers' dictionaries."""
    if isinstance(size, dict):
        values = set(size.values())
        return values.pop() if len(values) == 1 else tuple(size.values())
    return size


def check_installed(wanted: str) -> None:
    """Refuse a text tower or tokenizer of transformers where that is not installed."""
    if not _is_installed("transformers"):
        raise AtlasError(
            f"{wanted}: is a text tower of transformers, which is not installed; "
            f"run: {install_hint('hf')}"
        )


def _is_installed(library: str) -> bool:
    try:
        return importlib.util.find_spec(library) is not None
    except ModuleNotFoundError:
        return False
