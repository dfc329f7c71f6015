"""What kind of layer each module of a model is, so that an adapter of PEFT can name it."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from atlas_cli.errors import CheckpointError, UsageError, install_hint
from atlas_cli.io.tensors import LazyTensors
from atlas_cli.io.torchvision_import import import_torchvision
from atlas_cli.models.clip import Opening, open_model
from atlas_cli.models.folders import is_clip, is_transformers
from atlas_cli.sources.locate import Source

LINEAR, TRANSPOSED, EMBEDDING, CONVOLUTION = "linear", "transposed linear", "embedding", "conv"
ATTENTION, OTHER = "attention", "other"
FACTORED = (LINEAR, TRANSPOSED, EMBEDDING, CONVOLUTION)
_EMBEDDINGS = re.compile(r"(^|[._])(embed|embeddings?|wte|wpe|shared|emb)([._]|$)|embed_tokens")


@dataclass(frozen=True)
class Modules:
    """The kinds of modules by name, and which of them share their weights.

    `prefix` is what the model puts before the names in its file. `tied` has the other modules
    that read the weight of a module, such as the head of an embedding.
    """

    kinds: Mapping[str, str]
    prefix: str = ""
    tied: Mapping[str, Sequence[str]] = field(default_factory=dict)
    architecture: str = ""


def modules_of(source: Source, tensors: LazyTensors, architecture: str | None = None) -> Modules:
    """The modules of the model that a source describes.

    Those of transformers and of open_clip are built to see; of any other, the names and the
    shapes of the tensors tell.
    """
    config = source.config("config.json") or {}
    named: Any = config.get("architectures") or [""]
    if config.get("model_type") and named[0]:
        return _of_transformers(source, tensors, str(named[0]))
    if is_clip(tensors) and not is_transformers(tensors):
        return Modules(_kinds(open_model(source, Opening(architecture)).module))
    return Modules(_by_names(tensors))


def _of_transformers(source: Source, tensors: LazyTensors, architecture: str) -> Modules:
    where = source.reference.text
    try:
        import_torchvision()  # transformers imports it, too, and may stumble over it
        transformers: Any = importlib.import_module("transformers")
    except ImportError as problem:
        raise UsageError(f"--lora needs transformers; {install_hint('hf')}") from problem
    try:
        config = transformers.AutoConfig.from_pretrained(source.folder)
        with torch.device("meta"):
            model = getattr(transformers, architecture)(config)
    except (AttributeError, OSError, ValueError, KeyError) as problem:
        said = str(problem).partition("\n")[0]
        raise CheckpointError(
            f"{where}: transformers cannot build {architecture}: {said}"
        ) from None
    kinds = _kinds(model)
    prefix = ""
    if not any(_module(name) in kinds for name in tensors if _module(name)):
        prefix = f"{model.base_model_prefix}."
    return Modules(kinds, prefix, _tied(model), architecture)


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _tied(model: torch.nn.Module) -> dict[str, list[str]]:
    """The names of the other modules that share the weight of each module."""
    readers: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is not None:
            readers.setdefault(id(weight), []).append(name)
    return {
        name: [other for other in names if other != name]
        for names in readers.values()
        for name in names
    }


def _kinds(model: torch.nn.Module) -> dict[str, str]:
    return {name: _kind(module) for name, module in model.named_modules() if name}


def _kind(module: torch.nn.Module) -> str:
    if isinstance(module, torch.nn.MultiheadAttention):
        return ATTENTION
    if isinstance(module, torch.nn.Linear):
        return LINEAR
    if type(module).__name__ == "Conv1D":  # of transformers: a linear layer, transposed
        return TRANSPOSED
    if isinstance(module, torch.nn.Embedding):
        return EMBEDDING
    if isinstance(module, torch.nn.Conv1d | torch.nn.Conv2d | torch.nn.Conv3d):
        # PEFT has no factors for groups.
        return CONVOLUTION if module.groups == 1 else OTHER
    return OTHER if not [*module.children()] else ""


def _by_names(tensors: LazyTensors) -> dict[str, str]:
    """Matrices are linear layers unless their name is one of an embedding."""
    found = {}
    for name, tensor in tensors.items():
        module, leaf = _module(name), name.rpartition(".")[2]
        if leaf != "weight" or not module:
            continue
        if len(tensor.shape) == 2:
            found[module] = EMBEDDING if _EMBEDDINGS.search(module) else LINEAR
        else:
            found[module] = CONVOLUTION if len(tensor.shape) > 2 else OTHER
    return found
