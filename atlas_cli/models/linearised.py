"""Linearised image encoders, whose checkpoints number their parameters instead of naming them.

The published code keeps `model.params.N` beside the `model.params0.N` it was expanded around.
N counts the parameters of an open_clip model without its text transformer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from atlas_cli.errors import MismatchError
from atlas_cli.io.tensors import LazyTensor, LazyTensors

_NUMBERED = re.compile(r"(?:.*\.)?(params0?)\.(\d+)")
_BEFORE = ("positional_embedding", "text_projection", "logit_scale")
_AFTER = ("token_embedding.weight", "ln_final.weight", "ln_final.bias")
_TOWER = (
    *("class_embedding", "positional_embedding", "proj", "conv1", "ln_pre", "transformer"),
    "ln_post",
)
_LAYER = ("ln_1", "attn", "ln_2", "mlp")
_INNER = ("in_proj_weight", "in_proj_bias", "out_proj", "c_fc", "c_proj", "weight", "bias")


def is_linearised(tensors: LazyTensors) -> bool:
    """Whether a checkpoint holds a linearised model."""
    return any(name.endswith("params0.0") for name in tensors)


def open_linearised(tensors: LazyTensors, base: LazyTensors, where: str) -> dict[str, LazyTensor]:
    """The parameters under open_clip's names, by their position.

    Raises MismatchError unless every shape fits `base` and the point of expansion is `base`.
    """
    found: dict[str, dict[int, LazyTensor]] = {"params": {}, "params0": {}}
    for name, tensor in tensors.items():
        if (match := _NUMBERED.fullmatch(name)) is None:
            raise MismatchError(f"{where}: {name} has no place in a linearised model")
        found[match[1]][int(match[2])] = tensor
    names = parameter_order([name for name in base if name.startswith("visual.")])
    wanted = range(len(names))
    if any(sorted(group) != list(wanted) for group in found.values()):
        count = len(found["params"])
        raise MismatchError(f"{where}: has {count} parameters, expected {len(names)} for this base")
    for number, name in enumerate(names):
        if name in base:
            _check_origin(name, found["params0"][number], base[name], where)
    return {name: found["params"][number] for number, name in enumerate(names)}


def _check_origin(name: str, origin: LazyTensor, base: LazyTensor, where: str) -> None:
    if origin.shape != base.shape:
        raise MismatchError(f"{where}: {name} has shape {origin.shape}, expected {base.shape}")
    if not torch.equal(origin.read().float(), base.read().float()):
        raise MismatchError(
            f"{where}: was linearised around other weights than those of the base ({name} differs)"
        )


def parameter_order(names: Sequence[str]) -> list[str]:
    """The parameters in the order in which the module that the authors saved lists them."""
    return [*_BEFORE, *sorted(names, key=_position), *_AFTER]


def _position(name: str) -> tuple[int, ...]:
    """Where a parameter of a vision transformer comes; raises MismatchError for another tower."""
    words = name.removeprefix("visual.").split(".")
    try:
        if words[0] == "transformer":
            _, _, layer, kind, *inner = words
            middle = (int(layer), _LAYER.index(kind))
        else:
            middle, inner = (0, 0), words[1:]
        return (_TOWER.index(words[0]), *middle, *map(_INNER.index, inner))
    except ValueError as problem:
        raise MismatchError(f"{name}: only linearised vision transformers are read") from problem
