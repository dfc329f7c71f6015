"""The files of a model: what those with weights, configurations and tokenizers are called."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping, Sequence

# In order of preference. Safetensors first: nothing in them can be run.
WEIGHT_NAMES = (
    "open_clip_model.safetensors",
    "open_clip_pytorch_model.safetensors",
    "model.safetensors",
    "model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.safetensors.index.json",
    "open_clip_pytorch_model.bin",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "diffusion_pytorch_model.bin",
    "adapter_model.safetensors",
    "adapter_model.bin",
)
CONFIG_NAMES = (
    *("open_clip_config.json", "config.json", "preprocessor_config.json"),
    "adapter_config.json",
)
TOKENIZER_PATTERNS = ("tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "*.model")
# Files that belong to a model beside its weights: fetched and copied with them.
COMPANION_FILES = (
    *("*.json", "tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "*.jinja"),
    *("LICENSE*", "NOTICE*"),
)
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")


def is_companion(name: str) -> bool:
    """Whether a file belongs to a model beside its weights."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in COMPANION_FILES)


def why_no_weights(names: Collection[str], loose: Sequence[str]) -> str:
    """What a folder has instead of one file of weights; `loose` are those that might be it."""
    if loose:
        return f"several: {', '.join(loose[:4])}; name one of them"
    if any(name.endswith(".gguf") for name in names):
        return "GGUF, which llama.cpp runs; take the model that it was converted from"
    if "model_index.json" in names:
        return "a diffusers pipeline; name one of its parts, such as its folder unet"
    return "none"


def text_tower_patterns(config: Mapping[str, object], files: Sequence[str]) -> Sequence[str]:
    """Patterns of files that describe a text tower of transformers, and of its tokenizer.

    They lie in a folder that the open_clip configuration names, or beside the weights.
    """
    model = config.get("model_cfg")
    text = model.get("text_cfg") if isinstance(model, dict) else None
    if not isinstance(text, dict):
        return ()
    homes = {text.get("hf_model_name"), text.get("hf_tokenizer_name")}
    described = [
        name
        for name in files
        if "/" in name and name.partition("/")[0] in homes and not name.endswith(WEIGHT_SUFFIXES)
    ]
    return described or (TOKENIZER_PATTERNS if "hf_tokenizer_name" in text else ())
