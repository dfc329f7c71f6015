"""Image towers whose weights are trained: in place, or by LoRA factors of peft (extra `lora`)."""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from atlas_cli.errors import AtlasError, UsageError, install_hint
from atlas_cli.models.composed import (
    FunctionalModel,
    Replica,
    TangentReplica,
    key_biases,
    norm_names,
    sharing_copy,
)
from atlas_cli.parallel import ThreadPool

_PROJECTIONS = ("proj", "attnpool.c_proj.weight", "attnpool.c_proj.bias", "head.proj.weight")


def names_of(module: torch.nn.Module, tune: str) -> list[str]:
    """The parameters of an image tower that are tuned. Raises UsageError if there are none."""
    every = [name for name, _ in module.named_parameters()]
    chosen = {
        "all": every,
        "layernorm": norm_names(module),
        "projection": [name for name in every if name in _PROJECTIONS],
    }[tune]
    if not chosen:
        raise UsageError(f"--tune {tune}: this image tower has no {tune}")
    return chosen


def checkpoint_activations(module: torch.nn.Module) -> None:
    """Compute activations again on the way back instead of keeping them, as open_clip does it."""
    if not hasattr(module, "transformer") and not hasattr(module, "trunk"):
        raise UsageError("--checkpoint-activations: open_clip does it for transformers only")
    module.set_grad_checkpointing(True)  # type: ignore[operator]


class TrainableModel(FunctionalModel):
    """A model that is trained in place: what it learns are its own tensors.

    A linear one trains the weights theta of f(x; theta0) + J (theta - theta0), in copies.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        names: list[str],
        *,
        prefix: str = "",
        thread_pool: ThreadPool | None = None,
        linear: bool = False,
    ) -> None:
        own = {f"{prefix}{name}": module.get_parameter(name).detach() for name in names}
        tensors = {name: tensor.clone() for name, tensor in own.items()} if linear else own
        replica = TangentReplica if linear else Replica
        super().__init__(module, tensors, prefix=prefix, thread_pool=thread_pool, replica=replica)
        self._without_effect = key_biases(module, prefix)

    @property
    def values(self) -> Mapping[str, torch.Tensor]:
        """What is trained, where it is."""
        return self._tensors

    def load(self, values: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """From now on the module runs with these weights; nothing to do if they are its own."""
        for name, tensor in self._tensors.items():
            if values[name].data_ptr() != tensor.data_ptr():
                tensor.copy_(values[name])
        return self._tensors

    def gradient(self) -> Mapping[str, torch.Tensor]:
        """dL/dtheta of everything since the last call; the gradients are let go."""
        found = self.gradients()
        for name in self._without_effect.keys() & found.keys():
            found[name][self._without_effect[name]] = 0
        return found


@dataclass(frozen=True)
class Pair:
    """The names of the factors that a weight is adapted by: weight + scale * up @ down."""

    weight: str
    up: str
    down: str


class LoraModel(FunctionalModel):
    """A model of which some weights are W + scale * up @ down, and the factors are trained."""

    def __init__(
        self,
        module: torch.nn.Module,
        factors: Mapping[str, torch.Tensor],
        pairs: list[Pair],
        scale: float,
        *,
        prefix: str = "",
        thread_pool: ThreadPool | None = None,
    ) -> None:
        self.values = dict(factors)
        self._pairs, self._scale = pairs, scale
        self._base = {
            pair.weight: module.get_parameter(pair.weight.removeprefix(prefix)).detach()
            for pair in pairs
        }
        tensors = {name: tensor.clone() for name, tensor in self._base.items()}
        super().__init__(module, tensors, prefix=prefix, thread_pool=thread_pool, replica=Replica)

    def load(self, values: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """W + scale * up @ down: from now on the module runs with these weights."""
        device = next(iter(self._base.values())).device
        self.values = {name: tensor.to(device) for name, tensor in values.items()}
        for pair in self._pairs:
            up, down = self.values[pair.up], self.values[pair.down]
            base, tensor = self._base[pair.weight], self._tensors[pair.weight]
            torch.addmm(base, up, down, alpha=self._scale, out=tensor)
        return self._tensors

    def gradient(self) -> Mapping[str, torch.Tensor]:
        """dL/dup = scale * G @ down^T and dL/ddown = scale * up^T @ G, where G = dL/dW."""
        found, gradients = {}, self.gradients()
        for pair in self._pairs:
            up, down, whole = self.values[pair.up], self.values[pair.down], gradients[pair.weight]
            found[pair.up] = self._scale * whole @ down.T
            found[pair.down] = self._scale * up.T @ whole
        return found


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
        yield peft, peft.get_peft_model(sharing_copy(clip), config)


def _import_peft() -> ModuleType:
    try:
        return importlib.import_module("peft")
    except ImportError as problem:
        raise UsageError(f"--lora needs peft; {install_hint('lora')}") from problem


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
