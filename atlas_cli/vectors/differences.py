"""What a fine-tuned source changes in a base model, whatever form the source has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from atlas_cli.core.patterns import find_pattern
from atlas_cli.core.storage import Block, Dense
from atlas_cli.errors import CheckpointError, MismatchError
from atlas_cli.io.checkpoint import open_tensors, read_metadata
from atlas_cli.io.files import sha256_of
from atlas_cli.io.tensors import LazyTensor, LazyTensors
from atlas_cli.models.folders import (
    has_text,
    is_adapter,
    is_transformers,
    normalised,
    read_tensors,
)
from atlas_cli.models.linearised import is_linearised, open_linearised
from atlas_cli.models.lora import is_lora_torch, open_adapter, open_lora_torch
from atlas_cli.models.tensor_names import THIRDS
from atlas_cli.sources.locate import Source
from atlas_cli.vectors.format import in_scope, open_vector

_SHOWN = 3


@dataclass(frozen=True)
class Choice:
    """What the user wants of a source: which tower, and what may be overlooked."""

    scope: str = "visual"
    ignore: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()

    def overlooks(self, name: str) -> bool:
        """Whether a tensor of that name need not fit."""
        return any(find_pattern(pattern, name) for pattern in self.ignore)


@dataclass(frozen=True)
class Difference:
    """tau by block: each a function of the base's float32 values, called when it is needed.

    `dropped` names what was left out, `parts` is the largest number of low-rank parts of a block,
    `origin` adds to the provenance, and a `fingerprint` must be that of the base.
    """

    blocks: Mapping[str, Callable[[torch.Tensor], Block]]
    dropped: tuple[str, ...] = ()
    parts: int = 0
    linearised: bool = False
    scale: float = 1.0
    fingerprint: str | None = None
    origin: Mapping[str, Any] = field(default_factory=dict)


def open_difference(source: Source, base: LazyTensors, choice: Choice) -> Difference:
    """Understand a source and check that it fits the base. Values are read later, by block."""
    if "atlas" in read_metadata(source.weights[0]):
        return _of_vector(source, choice)
    where = source.reference.text
    if source.adapter:
        return _of_model(where, read_tensors(source, choice.allow), base, choice)
    raw = open_tensors(source.weights, choice.allow)
    if raw.keys() <= {"weight", "bias"}:
        raise CheckpointError(f"{where}: is a classification head (weight, bias), not a model")
    if is_lora_torch(raw) or is_adapter(source, raw):
        return _of_adapter(source, raw, base, choice)
    if is_linearised(raw):
        tensors = open_linearised(raw, base, where)
        return _of_model(where, tensors, base, choice, linearised=True)
    tensors = normalised(raw, where)
    # CLIPVisionModel has no projection: the one of the base stays as it is.
    alone = is_transformers(raw) and not has_text(tensors)
    return _of_model(where, tensors, base, choice, absent=("visual.proj",) if alone else ())


# A whole model --------------------------------------------------------------------------------


def _of_model(
    where: str,
    tensors: LazyTensors,
    base: LazyTensors,
    choice: Choice,
    *,
    absent: tuple[str, ...] = (),
    linearised: bool = False,
) -> Difference:
    wanted, found = in_scope(base, choice.scope), in_scope(tensors, choice.scope)
    if not found:
        raise MismatchError(f"{where}: has no tensors of scope {choice.scope}")
    problems = problems_between(wanted, found)
    forgiven = {n for n in problems if choice.overlooks(n) or (n in absent and n not in found)}
    if unforgiven := [text for name, text in problems.items() if name not in forgiven]:
        more = f" (and {len(unforgiven) - _SHOWN} more)" if len(unforgiven) > _SHOWN else ""
        raise MismatchError(
            f"{where}: does not fit the base model: {'; '.join(unforgiven[:_SHOWN])}{more}; "
            "what may be left out can be named with --ignore"
        )
    blocks = {name: minus(tensor) for name, tensor in found.items() if name not in problems}
    return Difference(blocks, tuple(sorted(forgiven)), linearised=linearised)


def problems_between(wanted: LazyTensors, found: LazyTensors) -> dict[str, str]:
    """A clause for every tensor that is missing, extra or of another shape, by its name."""
    problems = {name: f"{name} is missing" for name in wanted if name not in found}
    for name, tensor in found.items():
        if name not in wanted:
            problems[name] = f"{name} is not in the base"
        elif tensor.shape != wanted[name].shape and {tensor.shape, wanted[name].shape} != _SCALARS:
            shapes = f"{tensor.shape}, expected {wanted[name].shape}"
            problems[name] = f"{name} has shape {shapes}"
    return dict(sorted(problems.items()))


_SCALARS: set[tuple[int, ...]] = {(), (1,)}


def minus(tensor: LazyTensor) -> Callable[[torch.Tensor], Block]:
    """tau = fine-tuned - base, rounded to float32.

    base + tau, rounded too, is the fine-tuned value bit for bit where tau needed no rounding, as
    it does from half to twice the base. It is off by at most 1 ulp of the fine-tuned value where
    |tau| <= 2 |fine-tuned|; elsewhere, for a value that shrank to less than a third or changed its
    sign and shrank, by at most half an ulp of tau. No other float32 tau comes nearer there.
    """
    return lambda base: Dense(tensor.read().float().reshape(base.shape) - base)


# Sources that are differences already ---------------------------------------------------------


def _of_adapter(source: Source, raw: LazyTensors, base: LazyTensors, choice: Choice) -> Difference:
    kept = {name: tensor for name, tensor in raw.items() if not choice.overlooks(name)}
    where, origin = source.reference.text, {}
    if is_lora_torch(raw):
        blocks = open_lora_torch(kept, base, where)
    else:
        blocks = open_adapter(source, kept, base)
        origin = {"adapter_config": sha256_of(source.folder / "adapter_config.json")}
    wanted = in_scope(base, choice.scope)
    if not blocks.keys() & wanted.keys():
        raise MismatchError(f"{where}: the adapter changes nothing in scope {choice.scope}")
    return Difference(
        {name: _given(read) for name, read in blocks.items() if name in wanted},
        tuple(sorted(raw.keys() - kept.keys())),
        parts=len(THIRDS),
        origin=origin,
    )


def _of_vector(source: Source, choice: Choice) -> Difference:
    """A task vector that exists already, to be scaled or kept in another form."""
    vector = open_vector(source.weights[0])
    header = vector.header
    if header.scope != choice.scope:
        raise MismatchError(
            f"{source.reference.text}: is a task vector of scope {header.scope}; "
            f"use --scope {header.scope}"
        )
    return Difference(
        {name: _given(lambda name=name: vector.read(name)) for name in vector.names},  # type: ignore[misc]
        parts=max(len(block.starts) for block in header.blocks),
        linearised=header.linearised,
        scale=header.scale,
        fingerprint=header.fingerprint,
        origin={"vector_of": header.finetuned},
    )


def _given(read: Callable[[], Block]) -> Callable[[torch.Tensor], Block]:
    return lambda base: read()
