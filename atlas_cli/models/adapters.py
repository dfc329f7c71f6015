"""A model and an adapter of PEFT -> the model that peft would run, tensor by tensor.

Beside products of factors, an adapter may hold whole tensors (`modules_to_save`, biases, saved
embeddings), which take the place of the model's, and the magnitudes of DoRA.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from atlas_cli.core.storage import Factors
from atlas_cli.errors import CheckpointError, MismatchError
from atlas_cli.io.checkpoint import open_tensors, unwrapped
from atlas_cli.io.tensors import LazyTensor, LazyTensors
from atlas_cli.models import tensor_names
from atlas_cli.models.lora import block_of_module, factor_of, open_adapter
from atlas_cli.sources.locate import Source

APPLIED = ("modules_to_save", "bias", "use_dora", "ensure_weight_tying")
_MAGNITUDE = re.compile(
    r"(?:base_model\.model\.)?(.+)\.lora_magnitude_vector(\.default)?(\.weight)?"
)
_WRAPPED = re.compile(r"\.(base_layer|modules_to_save\.default|modules_to_save|original_module)\b")


@dataclass(frozen=True)
class Parts:
    """The tensors of an adapter by what they are: factors, magnitudes by module, whole tensors.

    Whole ones have the names that the model gives them; `names` are those in the file.
    """

    factors: dict[str, LazyTensor]
    magnitudes: dict[str, LazyTensor]
    whole: dict[str, LazyTensor]
    names: dict[str, str]


def parts_of(tensors: LazyTensors) -> Parts:
    """Sort the tensors of an adapter."""
    found = Parts({}, {}, {}, {})
    for name, tensor in tensors.items():
        if factor_of(name):
            found.factors[name] = tensor
        elif match := _MAGNITUDE.fullmatch(name):
            found.magnitudes[match[1]] = tensor
        else:
            own = _WRAPPED.sub("", name.removeprefix("base_model.model."))
            found.whole[own], found.names[own] = tensor, name
    return found


def lora_settings(ranks: Mapping[str, int]) -> dict[str, Any]:
    """What adapter_config.json says of factors that hold their scale: alpha is the rank."""
    counts = Counter(ranks.values()).most_common(1)
    usual = counts[0][0] if counts else 1
    others = {module: rank for module, rank in ranks.items() if rank != usual}
    return {
        "peft_type": "LORA",
        "r": usual,
        "lora_alpha": usual,
        "rank_pattern": others,
        "alpha_pattern": others,
        "target_modules": sorted(ranks),
        "use_rslora": False,
        "use_dora": False,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "init_lora_weights": True,
    }


def add_adapter(tensors: LazyTensors, source: Source) -> LazyTensors:
    """The tensors of MODEL+ADAPTER. Raises MismatchError for what is no adapter of the model."""
    raw = open_tensors(source.weights)
    if not any(factor_of(name) for name in raw) and not _has_settings(source):
        raise MismatchError(f"{source.reference.text}: is no LoRA adapter that can follow a +")
    return adapted(tensors, source, raw)


def _has_settings(source: Source) -> bool:
    return source.weights[0].name.startswith("adapter_model.")


def adapted(tensors: LazyTensors, source: Source, raw: LazyTensors) -> LazyTensors:
    """base + B A, in the dtype of the base, for every tensor that the adapter changes.

    With DoRA, rows of that have the length of their magnitude. Raises CheckpointError for what
    cannot be applied exactly, MismatchError for what does not fit.
    """
    where = source.reference.text
    plainly = {unwrapped(name): name for name in tensors}
    base = {inner: tensors[name] for inner, name in plainly.items()}
    parts = parts_of(raw)
    whole = {}
    for name, tensor in parts.whole.items():
        inner = _place_of_whole(unwrapped(name), base)
        if inner not in base or base[inner].shape != tensor.shape:
            raise MismatchError(f"{where}: {name} has no place in the model, so it is not applied")
        whole[inner] = _as(tensor, base[inner].dtype)
    base |= whole  # factors may be added to a tensor that was saved whole
    blocks = open_adapter(source, parts.factors, base, APPLIED)
    lengths: dict[str, list[tuple[int, LazyTensor]]] = {}
    for module, magnitude in parts.magnitudes.items():
        name, start = _rows(module, magnitude, base, where)
        lengths.setdefault(name, []).append((start, magnitude))
    changed = {
        name: _plus(base[name], read, lengths.get(name, [])) for name, read in blocks.items()
    }
    return {**tensors, **{plainly[name]: one for name, one in (whole | changed).items()}}


def _place_of_whole(name: str, base: LazyTensors) -> str:
    """The tensor of the model that a whole one takes the place of, under the model's name."""
    if name not in base and any(name.endswith(end) for end in (".weight", ".bias")):
        with contextlib.suppress(MismatchError):
            found, part = tensor_names.place_of(name)
            return name if part else found
    return name


def _rows(module: str, magnitude: LazyTensor, base: LazyTensors, where: str) -> tuple[str, int]:
    """The tensor whose rows a magnitude scales, and the first of these rows."""
    name, part = block_of_module(unwrapped(module).replace(".base_layer", ""), base)
    count = math.prod(magnitude.shape)
    rows = base[name].shape[0] if name in base else 0
    rows //= 3 if part in tensor_names.THIRDS else 1
    if part == tensor_names.TRANSPOSED or count != rows:
        raise CheckpointError(f"{where}: atlas does not apply the DoRA of {module} exactly")
    return name, tensor_names.THIRDS.index(part) * rows if part in tensor_names.THIRDS else 0


def _as(tensor: LazyTensor, dtype: torch.dtype) -> LazyTensor:
    return LazyTensor(
        *(tensor.shape, dtype, lambda: tensor.read().to(dtype)),
        lambda start, stop: tensor.span(start, stop).to(dtype),
    )


def _plus(
    base: LazyTensor, read: Callable[[], Factors], lengths: list[tuple[int, LazyTensor]]
) -> LazyTensor:
    width = math.prod(base.shape[1:])

    def part(start: int, stop: int) -> torch.Tensor:
        first, last = start // width, -(-stop // width)
        rows = base.span(first * width, last * width).float().reshape(last - first, width)
        for one in read().parts:
            low, high = max(first, one.start), min(last, one.start + len(one.up))
            if low < high:
                up = one.up[low - one.start : high - one.start]
                rows[low - first : high - first] += up @ one.down
        for begin, magnitude in lengths:
            low, high = max(first, begin), min(last, begin + math.prod(magnitude.shape))
            if low < high:
                some = rows[low - first : high - first]
                wanted = magnitude.span(low - begin, high - begin).float()
                some *= (wanted / some.norm(dim=1))[:, None]
        flat = rows.reshape(-1)[start - first * width : stop - first * width]
        return flat.to(base.dtype)

    size = base.shape[0] * width
    return LazyTensor(base.shape, base.dtype, lambda: part(0, size).reshape(base.shape), part)
