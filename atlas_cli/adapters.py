"""LoRA adapters of an image tower, made and written by peft (extra `lora`)."""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from atlas_cli.errors import AtlasError, UsageError
from atlas_cli.towers import twin
from atlas_cli.tunable import Pair

ALPHA = 32  # the scale is ALPHA / rank, as in the paper's own adapters
_PREFIX = "base_model.model."
_TOWER = "visual."
# peft adapts the output of torch's attention along with its input, but adds that product twice
# (as of 0.21), so that an adapter of it has no one meaning: its `up` stays zero.
_UNTRAINED = ".base_layer.out_proj."


def start_factors(
    clip: torch.nn.Module, rank: int, seed: int
) -> tuple[dict[str, torch.Tensor], list[Pair]]:
    """The trained factors of a fresh adapter, and the weights they adapt; all `up` are zero."""
    with _adapted(clip, rank, seed) as (peft, model):
        found = peft.get_peft_model_state_dict(model)
        names = [name for name in found if _UNTRAINED not in name]
        factors = {name: found[name].detach().clone() for name in names}
    parameters = dict(clip.named_parameters())
    pairs = []
    for down in factors:
        module = down.removesuffix(".lora_A.weight")
        if module != down:
            inner = module.removeprefix(_PREFIX)
            whole = f"{inner}.in_proj_weight"
            weight = whole if whole in parameters else f"{inner}.weight"
            pairs.append(Pair(weight, f"{module}.lora_B.weight", down))
    return factors, pairs


def write_adapter(
    clip: torch.nn.Module, rank: int, factors: Mapping[str, torch.Tensor], folder: Path
) -> None:
    """Have peft write trained factors in its own format."""
    with _adapted(clip, rank, 0) as (peft, model):
        peft.set_peft_model_state_dict(model, {name: t.cpu() for name, t in factors.items()})
        try:
            model.save_pretrained(str(folder))
        except OSError as problem:
            raise AtlasError(f"{folder}: cannot be written: {problem.strerror}") from problem


@contextmanager
def _adapted(clip: torch.nn.Module, rank: int, seed: int) -> Iterator[tuple[ModuleType, Any]]:
    """A model of peft's around a copy of the structure that shares all weights."""
    peft = _import_peft()
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # peft warns of models that are not of transformers
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        config = peft.LoraConfig(r=rank, lora_alpha=ALPHA, target_modules=targets_of(clip))
        yield peft, peft.get_peft_model(twin(clip), config)


def _import_peft() -> ModuleType:
    try:
        return importlib.import_module("peft")
    except ImportError as problem:
        raise UsageError("--lora needs peft; pip install 'atlas-cli[lora]'") from problem


def targets_of(clip: torch.nn.Module) -> str:
    """A pattern of the image tower's adapted modules: its attention and its linear layers."""
    names: set[str] = set()
    inside: tuple[str, ...] = ("visual.attnpool.",)  # called otherwise than as a layer
    for name, module in clip.named_modules():
        attends = isinstance(module, torch.nn.MultiheadAttention)
        if name.startswith(_TOWER) and not name.startswith(inside):
            if attends or isinstance(module, torch.nn.Linear):
                names.add(re.sub(r"\\\.\d+\\\.", r"\\.\\d+\\.", re.escape(name)))
            if attends:
                inside = (*inside, f"{name}.")
    if not names:
        raise UsageError("--lora: this image tower has no layers that peft adapts")
    return "|".join(sorted(names))
