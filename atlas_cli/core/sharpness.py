"""Sharpness-aware descent: SGD along the gradient at the worst point nearby, as SAR has it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from atlas_cli.core.descent import Descent

RADIUS = 0.05
_MOMENTUM = 0.9
_TINY = 1e-12


class SharpDescender:
    """Coefficients that take two gradients per step.

    The first, g, moves them up to w + radius * g / |g|; along the second, taken there, SGD with
    momentum steps from w. Where a gradient is zero, since nothing was selected, nothing moves.
    """

    def __init__(self, start: torch.Tensor, steps: int, descent: Descent) -> None:
        self._start, self._steps, self._descent = start.clone(), steps, descent
        self.coefficients = start.clone()
        self.scaler = torch.amp.GradScaler(start.device.type, enabled=False)
        self.number = 0
        self.reset()

    def reset(self) -> None:
        """Back to the start, with nothing remembered; steps are counted on."""
        self.coefficients = self._start.clone()
        self._momentum = torch.zeros_like(self._start)
        self._above: torch.Tensor | None = None

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""
        return self._descent.rate_at(self.number, self._steps)

    @property
    def values(self) -> torch.Tensor:
        """The coefficients that are composed: a copy; between two gradients, those above."""
        return self._descent.bounded(self.coefficients if self._above is None else self._above)

    def step(self, gradient: torch.Tensor) -> None:
        """Climb along the first gradient; descend along the second, and count a step."""
        gradient = gradient.to(self.coefficients.dtype)
        if self._above is None:
            norm = gradient.norm()
            self._above = self.coefficients + gradient * (RADIUS / (norm + _TINY))
            return
        if gradient.any():
            decayed = gradient + self._descent.decay * self.coefficients
            self._momentum = _MOMENTUM * self._momentum + decayed
            self.coefficients = self.coefficients - self.rate * self._momentum
        self.skip()

    def skip(self) -> None:
        """Count a step that moves nothing."""
        self._above = None
        self.number += 1

    def state(self) -> dict[str, torch.Tensor]:
        """All that the next step depends on."""
        return {
            "coefficients": self.coefficients.clone(),
            "momentum": self._momentum.clone(),
            "number": torch.tensor(self.number),
        }

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from a state."""
        self.coefficients = state["coefficients"].to(self._start.device, copy=True)
        self._momentum = state["momentum"].to(self._start.device, copy=True)
        self.number = int(state["number"].item())
