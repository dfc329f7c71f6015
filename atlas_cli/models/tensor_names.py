"""The names of CLIP's tensors: those that transformers gives them, and those of open_clip."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import torch

from atlas_cli.errors import MismatchError
from atlas_cli.io.tensors import LazyTensor, LazyTensors

_LAYER = (
    (r"encoder\.layers\.(\d+)\.layer_norm([12])\.", r"transformer.resblocks.\1.ln_\2."),
    (r"encoder\.layers\.(\d+)\.self_attn\.out_proj\.", r"transformer.resblocks.\1.attn.out_proj."),
    (r"encoder\.layers\.(\d+)\.mlp\.fc1\.", r"transformer.resblocks.\1.mlp.c_fc."),
    (r"encoder\.layers\.(\d+)\.mlp\.fc2\.", r"transformer.resblocks.\1.mlp.c_proj."),
)
_VISION_NAMES = (
    (r"embeddings\.class_embedding$", "class_embedding"),
    (r"embeddings\.patch_embedding\.weight$", "conv1.weight"),
    (r"embeddings\.position_embedding\.weight$", "positional_embedding"),
    (r"pre_layrnorm\.", "ln_pre."),
    (r"post_layernorm\.", "ln_post."),
    *_LAYER,
)
_TEXT_NAMES = (
    (r"embeddings\.token_embedding\.weight$", "token_embedding.weight"),
    (r"embeddings\.position_embedding\.weight$", "positional_embedding"),
    (r"final_layer_norm\.", "ln_final."),
    *_LAYER,
)
_PROJECTIONS = {
    "visual_projection.weight": "visual.proj",
    "text_projection.weight": "text_projection",
}
THIRDS, TRANSPOSED = ("q", "k", "v"), "transposed"
_QKV = re.compile(r"(.*)encoder\.layers\.(\d+)\.self_attn\.([qkv])_proj\.(weight|bias)$")


def to_open_clip(tensors: LazyTensors) -> dict[str, LazyTensor]:
    """The same tensors under open_clip's names: q, k, v stacked, projections transposed."""
    renamed: dict[str, LazyTensor] = {}
    stacks: dict[str, dict[str, LazyTensor]] = {}
    for name, tensor in tensors.items():
        if name.endswith("position_ids"):
            continue
        target, part = place_of(name)
        if part in THIRDS:
            stacks.setdefault(target, {})[part] = tensor
        else:
            renamed[target] = _transposed(tensor) if part == TRANSPOSED else tensor
    return renamed | {name: _stacked(name, parts) for name, parts in stacks.items()}


def place_of(name: str) -> tuple[str, str]:
    """open_clip's name of a tensor, and what of it this is: q, k, v, its transpose, or all ("")."""
    if part := _QKV.match(name):
        tower = "visual." if not part[1].startswith("text_model.") else ""
        return f"{tower}transformer.resblocks.{part[2]}.attn.in_proj_{part[4]}", part[3]
    if name in _PROJECTIONS:
        return _PROJECTIONS[name], TRANSPOSED
    return _rename(name), ""


def _rename(name: str) -> str:
    if name == "logit_scale":
        return name
    is_text = name.startswith("text_model.")
    inner = name.removeprefix("text_model.").removeprefix("vision_model.")
    for pattern, replacement in _TEXT_NAMES if is_text else _VISION_NAMES:
        found, count = re.subn(f"^{pattern}", replacement, inner)
        if count:
            return found if is_text else f"visual.{found}"
    raise MismatchError(f"{name}: not a tensor of a transformers CLIP model")


def _transposed(tensor: LazyTensor) -> LazyTensor:
    shape = (tensor.shape[1], tensor.shape[0])
    return LazyTensor(shape, tensor.dtype, lambda: tensor.read().T.contiguous())


def _stacked(name: str, parts: Mapping[str, LazyTensor]) -> LazyTensor:
    if missing := [letter for letter in THIRDS if letter not in parts]:
        raise MismatchError(f"{name}: the {missing[0]} projection is missing")
    ordered = [parts[letter] for letter in THIRDS]
    if len({(part.shape, part.dtype) for part in ordered}) != 1:
        raise MismatchError(f"{name}: the q, k and v projections differ in shape or dtype")
    shape = (3 * ordered[0].shape[0], *ordered[0].shape[1:])
    size = math.prod(ordered[0].shape)

    def part(start: int, stop: int) -> torch.Tensor:
        ends = [(max(start - n * size, 0), min(stop - n * size, size)) for n in range(3)]
        pieces = [t.span(*e) for t, e in zip(ordered, ends, strict=True) if e[0] < e[1]]
        return torch.cat(pieces)

    return LazyTensor(
        shape, ordered[0].dtype, lambda: torch.cat([one.read() for one in ordered]), part
    )


def piece(tensor: LazyTensor, part: str) -> LazyTensor:
    """A third of stacked projections, a transpose, or the tensor itself."""
    if part == TRANSPOSED:
        turned = (tensor.shape[1], tensor.shape[0])
        return LazyTensor(turned, tensor.dtype, lambda: tensor.read().T.contiguous())
    if part not in THIRDS:
        return tensor
    rows = tensor.shape[0] // 3
    shape = (rows, *tensor.shape[1:])
    first = THIRDS.index(part) * math.prod(shape)

    def read(start: int, stop: int) -> torch.Tensor:
        return tensor.span(first + start, first + stop)

    return LazyTensor(shape, tensor.dtype, lambda: read(0, math.prod(shape)).reshape(shape), read)
