"""The models of a merge, opened and held against each other before any value is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from atlas_cli.core.storage import Factors
from atlas_cli.errors import MismatchError
from atlas_cli.io.checkpoint import open_tensors
from atlas_cli.io.tensors import LazyTensor, LazyTensors
from atlas_cli.models.lora import open_adapter
from atlas_cli.models.tensor_names import plain, renamed, unwrapped
from atlas_cli.sources.locate import Source

_SHOWN = 5


@dataclass(frozen=True)
class Located:
    """The files behind a reference: a model, and the adapter that is added to it, if any."""

    model: Source
    adapter: Source | None = None


def open_layout(reference: str, located: Located) -> LazyTensors:
    """The tensors of the model whose names the result has."""
    tensors = plain(open_tensors(located.model.weights), reference)
    return _adapted(tensors, located.adapter)


def open_like(reference: str, located: Located, like: LazyTensors) -> LazyTensors:
    """The tensors of a model under the names of another, to which they must fit."""
    tensors = renamed(open_tensors(located.model.weights), like, reference)
    return _adapted(tensors, located.adapter)


# LoRA -----------------------------------------------------------------------------------------


def _adapted(tensors: LazyTensors, adapter: Source | None) -> LazyTensors:
    """base + B A, in the dtype of the base, for every tensor that the adapter changes."""
    if adapter is None:
        return tensors
    plainly = {unwrapped(name): name for name in tensors}
    base = {inner: tensors[name] for inner, name in plainly.items()}
    blocks = open_adapter(adapter, open_tensors(adapter.weights), base)
    changed = {plainly[name]: _plus(base[name], read) for name, read in blocks.items()}
    return {**tensors, **changed}


def _plus(base: LazyTensor, read: Callable[[], Factors]) -> LazyTensor:
    width = base.shape[1] if len(base.shape) > 1 else 1
    for size in base.shape[2:]:
        width *= size

    def part(start: int, stop: int) -> torch.Tensor:
        first, last = start // width, -(-stop // width)
        rows = base.span(first * width, last * width).float().reshape(last - first, width)
        for one in read().parts:
            low, high = max(first, one.start), min(last, one.start + len(one.up))
            if low < high:
                up = one.up[low - one.start : high - one.start]
                rows[low - first : high - first] += up @ one.down
        flat = rows.reshape(-1)[start - first * width : stop - first * width]
        return flat.to(base.dtype)

    size = base.shape[0] * width
    return LazyTensor(base.shape, base.dtype, lambda: part(0, size).reshape(base.shape), part)


# Fitting --------------------------------------------------------------------------------------


def check_fit(layout: LazyTensors, models: Mapping[str, LazyTensors], *, cast: bool) -> None:
    """Raise MismatchError that lists every tensor which is missing, extra, or of another kind.

    With `cast`, the recipe names a dtype to compute in, so that dtypes may differ.
    """
    problems = [
        f"{reference}: {line}"
        for reference, tensors in models.items()
        for line in _problems(layout, tensors, cast=cast)
    ]
    if problems:
        more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise MismatchError(
            "the models do not fit each other: " + "; ".join(problems[:_SHOWN] + more)
        )


def _problems(layout: LazyTensors, tensors: LazyTensors, *, cast: bool) -> Sequence[str]:
    lines = []
    for name, wanted in layout.items():
        if not wanted.dtype.is_floating_point:
            continue
        found = tensors.get(name)
        if found is None:
            lines.append(f"{name} is missing")
        elif found.shape != wanted.shape and {found.shape, wanted.shape} != {(), (1,)}:
            lines.append(f"{name} has shape {found.shape}, expected {wanted.shape}")
        elif found.dtype != wanted.dtype and not cast:
            kinds = f"{_word(found.dtype)}, expected {_word(wanted.dtype)}"
            lines.append(f"{name} has dtype {kinds} (or give a dtype to compute in)")
    extra = [n for n, t in tensors.items() if n not in layout and t.dtype.is_floating_point]
    return lines + [f"{name} is unknown" for name in extra]


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
