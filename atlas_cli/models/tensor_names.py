"""Tensors by name: CLIP as open_clip and as transformers call its parts, wrapped or not."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping

import torch

from atlas_cli.errors import CheckpointError, MismatchError
from atlas_cli.io.checkpoint import open_tensors
from atlas_cli.io.tensors import LazyTensor, LazyTensors
from atlas_cli.sources.locate import Source

_WRAPPERS = ("module.", "_orig_mod.", "model.", "image_encoder.")
MASKS = ("attn_mask", "position_ids")
INFORMATION = ("input_resolution", "context_length", "vocab_size")
_BUFFERS = (*MASKS, "num_batches_tracked")  # a module makes them itself
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
_FACTOR = re.compile(r"[._]lora[._]?(A|B|up|down|embedding_A|embedding_B)(\.|$)")
_QKV = re.compile(r"(.*)encoder\.layers\.(\d+)\.self_attn\.([qkv])_proj\.(weight|bias)$")


def is_adapter(source: Source, tensors: LazyTensors) -> bool:
    """Whether a source is an adapter of PEFT, by the name of its file or of its tensors."""
    named = source.weights[0].name.startswith("adapter_model.")
    return named or any(".lora_A." in name for name in tensors)


def has_factors(names: Iterable[str]) -> bool:
    """Whether some tensors are factors of LoRA, of any library: they are no weights."""
    return any(_FACTOR.search(name) for name in names)


def is_transformers(tensors: LazyTensors) -> bool:
    """Whether names are those that transformers gives to CLIP."""
    return any("encoder.layers." in name for name in tensors)


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


def normalised(tensors: LazyTensors, where: str) -> dict[str, LazyTensor]:
    """Tensors under open_clip's names, whatever their file calls them."""
    plain: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        inner = unwrapped(name)
        if inner in plain:
            raise CheckpointError(f"{where}: two tensors would both be {inner}; one is {name}")
        plain[inner] = tensor
    if is_transformers(plain):
        return to_open_clip(plain)
    kept = {name: tensor for name, tensor in plain.items() if not _is_passing(name)}
    if "conv1.weight" in kept:  # an image tower saved on its own
        return {f"visual.{name}": tensor for name, tensor in kept.items()}
    return kept


def _is_passing(name: str) -> bool:
    """Whether a tensor is no part of the model: a mask, a size, a constant of a script."""
    return name.endswith(MASKS) or name in INFORMATION or name.startswith("CONSTANTS.")


def unwrapped(name: str) -> str:
    """A name without the prefixes that training wrappers put before it."""
    while name.startswith(_WRAPPERS):
        name = name.partition(".")[2]
    return name


def is_clip(names: Iterable[str]) -> bool:
    """Whether names are those of a CLIP model, of open_clip or of transformers."""
    marks = ("visual.", "vision_model.")
    return any(unwrapped(name).startswith(marks) for name in names)


def plain(tensors: LazyTensors, where: str) -> LazyTensors:
    """A model as it can be written: names of open_clip without wrappers, others as they are."""
    if is_clip(tensors) and not is_transformers(tensors):
        return normalised(tensors, where)
    return tensors


def block_of(name: str, *, transformers: bool) -> tuple[str, str]:
    """open_clip's name of a tensor, and what of it this is: see place_of."""
    return place_of(unwrapped(name)) if transformers else (unwrapped(name), "")


def renamed(tensors: LazyTensors, like: LazyTensors, where: str) -> LazyTensors:
    """The tensors under the names that `like` has for them; left alone if they have them already.

    Names that have no counterpart are kept, for whoever compares the two to complain of.
    """
    if tensors.keys() == like.keys() or not (is_clip(tensors) and is_clip(like)):
        return tensors
    blocks = normalised(tensors, where)
    transformers = is_transformers(like)
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


# Sources and modules --------------------------------------------------------------------------


def read_tensors(source: Source, allow: Collection[str] = ()) -> dict[str, LazyTensor]:
    """The tensors of a source under open_clip's names (`visual.*` for the image tower)."""
    return normalised(open_tensors(source.weights, allow), source.reference.text)


def has_text(tensors: LazyTensors) -> bool:
    """Whether there is a text tower among the tensors."""
    return any(name.startswith(("transformer.", "text.")) for name in tensors)


def fill(module: torch.nn.Module, tensors: LazyTensors, where: str) -> None:
    """Copy tensors into a module by name. Raises MismatchError that lists what does not fit."""
    places = module.state_dict()
    if problems := _mismatches(places, tensors):
        listed = "; ".join(problems[:3])
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise MismatchError(f"{where}: the weights do not fit the architecture: {listed}{more}")
    with torch.no_grad():
        for name, place in places.items():
            if name in tensors:
                place.copy_(tensors[name].read().reshape(place.shape))


def _mismatches(places: Mapping[str, torch.Tensor], tensors: LazyTensors) -> list[str]:
    problems = []
    for name, place in places.items():
        if name in tensors:
            found, wanted = tensors[name].shape, tuple(place.shape)
            if found != wanted and not {found, wanted} <= {(), (1,)}:
                problems.append(f"{name} has shape {found}, expected {wanted}")
        elif not name.endswith(_BUFFERS):
            problems.append(f"{name} is missing")
    return problems + [f"{name} is unknown" for name in tensors if name not in places]
