"""A base and a fine-tuned model -> a LoRA adapter of PEFT, for any architecture.

Weights of layers become factors of a limited rank, small modules such as norms are saved whole.
What PEFT cannot express is named, and counts as lost.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from atlas_cli.core.storage import leading_factors
from atlas_cli.errors import AtlasError, CheckpointError, MismatchError, UsageError
from atlas_cli.io.checkpoint import open_tensors, write_tensors
from atlas_cli.io.tensors import LazyTensor, LazyTensors
from atlas_cli.models.adapters import lora_settings
from atlas_cli.models.folders import has_factors, plain, renamed
from atlas_cli.models.module_kinds import (
    ATTENTION,
    EMBEDDING,
    FACTORED,
    LINEAR,
    OTHER,
    TRANSPOSED,
    Modules,
    modules_of,
)
from atlas_cli.models.saving import whole_folder
from atlas_cli.sources.locate import Source
from atlas_cli.vectors.differences import Choice, problems_between
from atlas_cli.vectors.writer import check_fits

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_SHOWN = 3


@dataclass(frozen=True)
class AdapterForm:
    """How much is kept of every matrix, and in which dtype: a rank, a share of energy, or both."""

    rank: int | None = None
    energy: float | None = None
    dtype: str = "fp32"


@dataclass(frozen=True)
class ExtractedAdapter:
    """An adapter that was written. `error` is |what it leaves out| / |fine-tuned - base|."""

    path: str
    name: str
    modules: int
    saved: int
    rank: int
    parameters: int
    bytes: int
    error: float
    left_out: list[str]

    def __str__(self) -> str:
        return self.path


@dataclass
class _Adapter:
    """The tensors of an adapter while it is made, and the squares of what is kept and lost."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)
    saved: set[str] = field(default_factory=set)
    left_out: list[str] = field(default_factory=list)
    total: float = 0.0
    lost: float = 0.0


def extract_adapter(
    base: Source,
    finetuned: Source,
    form: AdapterForm,
    choice: Choice,
    target: tuple[str, Path],
    advance: Callable[[int], None] = lambda count: None,
    architecture: str | None = None,
) -> ExtractedAdapter:
    """Write the adapter that turns a base into a fine-tuned model, as far as its rank allows.

    `target` is its name and its folder, which appears when it is complete.
    """
    theta, tuned, modules = open_pair(base, finetuned, choice, architecture)
    made = _Adapter()
    for name in sorted(tuned):
        _add(made, name, theta, tuned[name], modules, form, finetuned.reference.text)
        advance(1)
    if not made.ranks and not made.saved:
        raise MismatchError(
            f"{finetuned.reference.text}: is identical to {base.reference.text} in all that an "
            "adapter can change"
        )
    _silence_outputs(made, modules)
    name, folder = target
    config = adapter_config(made, base, modules)
    with whole_folder(folder) as place:
        write_tensors(place / WEIGHTS, dict(sorted(made.tensors.items())), {"format": "pt"})
        (place / CONFIG).write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    return ExtractedAdapter(
        path=str(folder),
        name=name,
        modules=len(made.ranks),
        saved=len(made.saved),
        rank=max(made.ranks.values(), default=0),
        parameters=sum(tensor.numel() for tensor in made.tensors.values()),
        bytes=(folder / WEIGHTS).stat().st_size,
        error=math.sqrt(made.lost / made.total),
        left_out=made.left_out,
    )


def open_pair(
    base: Source, finetuned: Source, choice: Choice, architecture: str | None = None
) -> tuple[LazyTensors, LazyTensors, Modules]:
    """Both models under the same names, without what is not compared, and the base's modules."""
    theta = plain(open_tensors(base.weights, choice.allow), base.reference.text)
    raw = open_tensors(finetuned.weights, choice.allow)
    where = finetuned.reference.text
    if base.adapter or finetuned.adapter:
        raise UsageError(f"{where}: an adapter is extracted from whole models, not from a sum")
    if has_factors(raw) or has_factors(theta):
        raise CheckpointError(f"{where}: an adapter is extracted from whole models, not from LoRA")
    tuned = renamed(raw, theta, where)
    floating = {n: t for n, t in theta.items() if t.dtype.is_floating_point}
    found = {n: t for n, t in tuned.items() if t.dtype.is_floating_point}
    problems = problems_between(floating, found)
    if lines := [text for name, text in problems.items() if not choice.overlooks(name)]:
        more = f" (and {len(lines) - _SHOWN} more)" if len(lines) > _SHOWN else ""
        raise MismatchError(
            f"{where}: does not fit the base model: {'; '.join(lines[:_SHOWN])}{more}; "
            "what may be left out can be named with --ignore"
        )
    same = {name: tensor for name, tensor in found.items() if name not in problems}
    return floating, same, modules_of(base, theta, architecture)


# Tensors --------------------------------------------------------------------------------------


def _add(
    made: _Adapter,
    name: str,
    theta: LazyTensors,
    tuned: LazyTensor,
    modules: Modules,
    form: AdapterForm,
    where: str,
) -> None:
    """Keep what changed in a tensor: as factors, or whole, or not at all."""
    values = tuned.read().float()
    delta = values - theta[name].read().float().reshape(values.shape)
    square = float(delta.double().square().sum())
    if not math.isfinite(square):
        raise CheckpointError(f"{where}: {name} holds values that are not finite (NaN or Inf)")
    if not square:
        return
    made.total += square
    own = modules.prefix + name
    module, _, leaf = own.rpartition(".")
    kind = modules.kinds.get(module, "")
    if modules.kinds.get(module.removesuffix(".out_proj")) == ATTENTION != kind:
        kind = ""
    if (leaf == "weight" and kind in FACTORED) or (leaf == "in_proj_weight" and kind == ATTENTION):
        made.lost += _add_factors(made, module, kind, delta, form)
        for other in modules.tied.get(module, []):  # such as the head, which reads the embedding
            _add_factors(made, other, modules.kinds[other], delta, form)
    elif kind == OTHER:
        # Whole modules: also those of their tensors that did not change.
        made.saved.add(module)
        for other, tensor in theta.items():
            if (modules.prefix + other).rpartition(".")[0] == module:
                made.tensors.setdefault(f"{_PREFIX}{modules.prefix}{other}", tensor.read())
        made.tensors[f"{_PREFIX}{own}"] = tuned.read().contiguous()
    else:
        made.lost += square
        made.left_out.append(name)


def _add_factors(
    made: _Adapter, module: str, kind: str, delta: torch.Tensor, form: AdapterForm
) -> float:
    """Keep a matrix as B A; gives the square of what that leaves out."""
    dtype, shape = _DTYPES[form.dtype], delta.shape
    matrix = delta.T if kind in (TRANSPOSED, EMBEDDING) else delta.flatten(1)
    up, down, lost = leading_factors(matrix, rank=form.rank, energy=form.energy)
    rank = up.shape[1]
    if kind not in (TRANSPOSED, EMBEDDING) and len(shape) > 2:
        up, down = (
            up.reshape(shape[0], rank, *[1] * (len(shape) - 2)),
            down.reshape(rank, *shape[1:]),
        )
    for letter, factor in (("A", down), ("B", up)):
        kept = factor.to(dtype).contiguous()
        check_fits(float(kept.abs().max()), f"{module}.weight", form.dtype)
        made.tensors[factor_name(module, letter, kind)] = kept
    made.ranks[module] = rank
    return lost


def factor_name(module: str, letter: str, kind: str) -> str:
    """What PEFT calls a factor of a module."""
    if kind == EMBEDDING:
        return f"{_PREFIX}{module}.lora_embedding_{letter}"
    return f"{_PREFIX}{module}.lora_{letter}.weight"


def _silence_outputs(made: _Adapter, modules: Modules) -> None:
    """Zeros for the output projection of every adapted attention, which PEFT adapts along.

    PEFT 0.21 adds its product of factors twice, so that it is left out of the adapter.
    """
    for attention, rank in made.ranks.items():
        if modules.kinds[attention] == ATTENTION:
            width = made.tensors[factor_name(attention, "A", ATTENTION)].shape[1]
            output = f"{attention}.base_layer.out_proj"
            made.tensors[factor_name(output, "A", LINEAR)] = torch.zeros(rank, width)
            made.tensors[factor_name(output, "B", LINEAR)] = torch.zeros(width, rank)


# Files ----------------------------------------------------------------------------------------


def adapter_config(made: _Adapter, base: Source, modules: Modules) -> dict[str, Any]:
    """The settings that PEFT reads."""
    name = base.reference.name if base.reference.kind == "hub" else str(base.folder)
    return {
        **lora_settings(made.ranks),
        "task_type": "CAUSAL_LM" if modules.architecture.endswith("ForCausalLM") else None,
        "base_model_name_or_path": name,
        "revision": base.commit,
        "modules_to_save": sorted(made.saved) or None,
        "fan_in_fan_out": TRANSPOSED in {modules.kinds.get(module) for module in made.ranks},
    }


def check_folder(folder: Path, *, force: bool) -> None:
    """Raise AtlasError unless an adapter can be written there without a loss."""
    if not folder.absolute().parent.is_dir():
        raise AtlasError(f"{folder.parent}: no such folder")
    if folder.exists() and not folder.is_dir():
        raise AtlasError(f"{folder}: is a file; an adapter is a folder")
    if folder.exists() and any(folder.iterdir()):
        if not force:
            raise AtlasError(f"{folder}: exists already; use --force to replace it")
        if not (folder / CONFIG).is_file():
            raise AtlasError(f"{folder}: holds no adapter; remove it yourself")
