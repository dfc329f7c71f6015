"""LoRA files of the paper's own code, which used LoRA-Torch -> low-rank blocks, not multiplied out.

Such a file holds the factors of an image encoder and nothing else; in particular it does not say
alpha, which was 32 for every rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping

from atlas_cli.core.storage import Factors, Part
from atlas_cli.errors import CheckpointError, MismatchError
from atlas_cli.models import unwrapped
from atlas_cli.tensors import LazyTensor, LazyTensors

_FACTOR = re.compile(r"(.+\.)(w|o|qkv)_lora_([AB])")
_WEIGHTS = {"w": "weight", "o": "out_proj.weight", "qkv": "in_proj_weight"}
_ALPHA = 32


def is_lora_torch(tensors: LazyTensors) -> bool:
    """Whether names are those that LoRA-Torch gives to its factors."""
    return any(_FACTOR.fullmatch(name) for name in tensors)


def open_lora_torch(
    tensors: LazyTensors, base: LazyTensors, where: str
) -> dict[str, Callable[[], Factors]]:
    """The blocks of `base` that the factors change, each (32 / rank) * B @ A once it is asked for.

    Raises CheckpointError for any other tensor, MismatchError for factors that do not fit.
    """
    found: dict[str, dict[str, LazyTensor]] = {}
    for name, tensor in tensors.items():
        match = _FACTOR.fullmatch(unwrapped(name))
        if match is None:
            raise CheckpointError(f"{where}: {name} is no factor of LoRA, so it is not applied")
        found.setdefault(match[1] + _WEIGHTS[match[2]], {})[match[3]] = tensor
    return {name: _block(name, factors, base, where) for name, factors in found.items()}


def _block(
    name: str, factors: Mapping[str, LazyTensor], base: LazyTensors, where: str
) -> Callable[[], Factors]:
    if name not in base:
        raise MismatchError(f"{where}: there is no {name} in the base model")
    if factors.keys() != {"A", "B"}:
        raise CheckpointError(f"{where}: {name} lacks one of its factors")
    up, down, shape = factors["B"], factors["A"], base[name].shape
    rank = down.shape[0] if down.shape else 0
    if not rank or (up.shape, down.shape) != ((shape[0], rank), (rank, math.prod(shape[1:]))):
        shapes = f"{up.shape} by {down.shape}"
        raise MismatchError(f"{where}: the factors of {name} are {shapes}, but it has {shape}")

    def read() -> Factors:
        return Factors(shape, (Part(0, up.read().float() * (_ALPHA / rank), down.read().float()),))

    return read
