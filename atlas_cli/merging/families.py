"""Models under the names of another: CLIP of open_clip and of transformers, wrapped or not."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from atlas_cli import layouts
from atlas_cli.models import normalised, unwrapped
from atlas_cli.tensors import LazyTensor, LazyTensors


def is_clip(names: Iterable[str]) -> bool:
    """Whether names are those of a CLIP model, of open_clip or of transformers."""
    marks = ("visual.", "vision_model.")
    return any(unwrapped(name).startswith(marks) for name in names)


def plain(tensors: LazyTensors, where: str) -> LazyTensors:
    """A model as it can be written: names of open_clip without wrappers, others as they are."""
    if is_clip(tensors) and not layouts.is_transformers(tensors):
        return normalised(tensors, where)
    return tensors


def block_of(name: str, *, transformers: bool) -> tuple[str, str]:
    """open_clip's name of a tensor, and what of it this is: see layouts.place_of."""
    return layouts.place_of(unwrapped(name)) if transformers else (unwrapped(name), "")


def renamed(tensors: LazyTensors, like: LazyTensors, where: str) -> LazyTensors:
    """The tensors under the names that `like` has for them; left alone if they have them already.

    Names that have no counterpart are kept, for whoever compares the two to complain of.
    """
    if tensors.keys() == like.keys() or not (is_clip(tensors) and is_clip(like)):
        return tensors
    blocks = normalised(tensors, where)
    transformers = layouts.is_transformers(like)
    found: dict[str, LazyTensor] = {}
    used: set[str] = set()
    for name, wanted in like.items():
        if not wanted.dtype.is_floating_point:
            continue
        block, part = block_of(name, transformers=transformers)
        if block in blocks:
            found[name] = piece(blocks[block], part)
            used.add(block)
    return found | {name: tensor for name, tensor in blocks.items() if name not in used}


def piece(tensor: LazyTensor, part: str) -> LazyTensor:
    """A third of stacked projections, a transpose, or the tensor itself."""
    if part == layouts.TRANSPOSED:
        turned = (tensor.shape[1], tensor.shape[0])
        return LazyTensor(turned, tensor.dtype, lambda: tensor.read().T.contiguous())
    if part not in layouts.THIRDS:
        return tensor
    rows = tensor.shape[0] // 3
    shape = (rows, *tensor.shape[1:])
    first = layouts.THIRDS.index(part) * math.prod(shape)

    def read(start: int, stop: int) -> torch.Tensor:
        return tensor.span(first + start, first + stop)

    return LazyTensor(shape, tensor.dtype, lambda: read(0, math.prod(shape)).reshape(shape), read)
