"""An image tower whose own weights are trained: all of them, some, or low-rank factors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from atlas_cli.errors import UsageError
from atlas_cli.norms import norm_names
from atlas_cli.towers import Crew, Replica, Runner, Tangent

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


class TunedTower(Runner):
    """A tower that is trained in place: what it learns are its own tensors.

    A linear one trains the weights theta of f(x; theta0) + J (theta - theta0), in copies.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        names: list[str],
        *,
        prefix: str = "",
        crew: Crew | None = None,
        linear: bool = False,
    ) -> None:
        own = {f"{prefix}{name}": module.get_parameter(name).detach() for name in names}
        tensors = {name: tensor.clone() for name, tensor in own.items()} if linear else own
        replica = Tangent if linear else Replica
        super().__init__(module, tensors, prefix=prefix, crew=crew, replica=replica)

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
        return self.gradients()


@dataclass(frozen=True)
class Pair:
    """The names of the factors that a weight is adapted by: weight + scale * up @ down."""

    weight: str
    up: str
    down: str


class LoraTower(Runner):
    """A tower of which some weights are W + scale * up @ down, and the factors are trained."""

    def __init__(
        self,
        module: torch.nn.Module,
        factors: Mapping[str, torch.Tensor],
        pairs: list[Pair],
        scale: float,
        *,
        prefix: str = "",
        crew: Crew | None = None,
    ) -> None:
        self.values = dict(factors)
        self._pairs, self._scale = pairs, scale
        self._base = {
            pair.weight: module.get_parameter(pair.weight.removeprefix(prefix)).detach()
            for pair in pairs
        }
        tensors = {name: tensor.clone() for name, tensor in self._base.items()}
        super().__init__(module, tensors, prefix=prefix, crew=crew, replica=Replica)

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
