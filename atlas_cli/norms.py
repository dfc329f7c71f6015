"""A module whose LayerNorms are tuned themselves: what one does without task vectors."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from atlas_cli.core.blocks import Layout, Segments
from atlas_cli.core.compose import Composition
from atlas_cli.towers import Crew, Tower


class NormTower(Tower):
    """A tower that adds what is learned, (1, numbers), to its LayerNorms' weights and biases."""

    def __init__(
        self, module: torch.nn.Module, *, prefix: str = "", crew: Crew | None = None
    ) -> None:
        names = norm_names(module)
        base = {f"{prefix}{name}": module.get_parameter(name).detach() for name in names}
        sizes = [math.prod(tensor.shape) for tensor in base.values()]
        labels = tuple(f"{name}[{i}]" for name, t in base.items() for i in range(t.numel()))
        whole = Layout(labels, {name: Segments((0,), ()) for name in base})
        super().__init__(module, Composition(base, {}, whole, 1), prefix=prefix, crew=crew)
        self._sizes = sizes

    def load(self, coefficients: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """base + what is learned: from now on the module runs with these tensors."""
        self.loaded = coefficients.detach().float()
        parts = self.loaded.flatten().split(self._sizes)
        for (name, tensor), part in zip(self._tensors.items(), parts, strict=True):
            tensor.copy_(self.composition.base[name] + part.view(tensor.shape))
        return self._tensors

    def gradient(self) -> torch.Tensor:
        """dL/dvalues of everything since the last call; the gradients are let go."""
        found = self.gradients()
        parts = [
            found.get(name, torch.zeros_like(tensor)).flatten()
            for name, tensor in self._tensors.items()
        ]
        return torch.cat(parts)[None]


def norm_names(module: torch.nn.Module) -> list[str]:
    """The weights and biases of a module's LayerNorms."""
    return [
        f"{path}.{name}" if path else name
        for path, part in module.named_modules()
        if isinstance(part, torch.nn.LayerNorm)
        for name, _ in part.named_parameters(recurse=False)
    ]
