"""Gradient descent on coefficients: AdamW with a cosine, one table, resumable to the bit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from atlas_cli.core.objectives import penalty

_MOMENTS = ("exp_avg", "exp_avg_sq")
_SCALER = ("scale", "_growth_tracker")


@dataclass(frozen=True)
class Descent:
    """How coefficients descend; the paper's recipe for a few images per class by default.

    `schedule` is cosine (half a cosine, from the rate to zero) or constant. Coefficients count as
    `low` or `high` where they are beyond, and nothing draws them back from there but the decay.
    `sharp` asks for sharpness-aware SGD instead of AdamW.
    """

    rate: float = 0.1
    decay: float = 0.1
    clip: float = 1.0
    penalty_order: int = 1
    penalty_weight: float = 0.0
    schedule: str = "cosine"
    sharp: bool = False
    low: float = -math.inf
    high: float = math.inf

    def rate_at(self, number: int, steps: int) -> float:
        """The learning rate of a step, counted from 0, of so many."""
        if self.schedule == "constant":
            return self.rate
        return self.rate * (1 + math.cos(math.pi * number / steps)) / 2

    def bounded(self, coefficients: torch.Tensor) -> torch.Tensor:
        """The coefficients that are composed: a copy, within the bounds."""
        return coefficients.detach().clamp(self.low, self.high)


class Descender:
    """Coefficients on their way down: the table, and what AdamW remembers of its gradients."""

    def __init__(
        self, start: torch.Tensor, steps: int, descent: Descent, *, scaled: bool = False
    ) -> None:
        self._start = start.clone()
        self.coefficients = start.clone().requires_grad_()
        self.number = 0
        self._steps = steps
        self._descent = descent
        self._optimizer = torch.optim.AdamW(
            [self.coefficients], lr=descent.rate, weight_decay=descent.decay, foreach=False
        )
        self.scaler = torch.amp.GradScaler(start.device.type, enabled=scaled)

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""
        return self._descent.rate_at(self.number, self._steps)

    @property
    def values(self) -> torch.Tensor:
        """The coefficients that are composed: a copy, within the bounds."""
        return self._descent.bounded(self.coefficients)

    def step(self, gradient: torch.Tensor) -> None:
        """One step of AdamW along a gradient of the (scaled) loss, clipped after unscaling."""
        inside = self.values == self.coefficients  # beyond its bounds, a coefficient does nothing
        self.coefficients.grad = gradient.to(self.coefficients.dtype) * inside
        if self.scaler.is_enabled():
            self.scaler.unscale_(self._optimizer)
        self._add_penalty()
        torch.nn.utils.clip_grad_norm_([self.coefficients], self._descent.clip)
        self._optimizer.param_groups[0]["lr"] = self.rate
        self.scaler.step(self._optimizer)
        self.scaler.update()
        self.number += 1

    def skip(self) -> None:
        """Count a step that moves nothing."""
        self.number += 1

    def reset(self) -> None:
        """Back to the start, with nothing remembered; steps are counted on."""
        with torch.no_grad():
            self.coefficients.copy_(self._start)
        self._optimizer.state.clear()

    def _add_penalty(self) -> None:
        if self._descent.penalty_weight and self.coefficients.grad is not None:
            loss = self._descent.penalty_weight * penalty(
                self.coefficients, self._descent.penalty_order
            )
            self.coefficients.grad += torch.autograd.grad(loss, self.coefficients)[0]

    def state(self) -> dict[str, torch.Tensor]:
        """All that the next step depends on."""
        kept = self._optimizer.state.get(self.coefficients, {})
        scaler = self.scaler.state_dict()
        return {
            "coefficients": self.coefficients.detach().clone(),
            "number": torch.tensor(self.number),
            **{key: value.clone() for key, value in kept.items()},
            **{f"scaler.{key}": torch.tensor(scaler[key]) for key in _SCALER if scaler},
        }

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from a state."""
        with torch.no_grad():
            self.coefficients.copy_(state["coefficients"])
        self.number = int(state["number"].item())
        if "step" in state:  # not before AdamW's first step, which an overflow puts off
            device = self.coefficients.device
            moments = {name: state[name].to(device, copy=True) for name in _MOMENTS}
            self._optimizer.state[self.coefficients] = {"step": state["step"].clone(), **moments}
        if scaler := self.scaler.state_dict():
            self.scaler.load_state_dict(
                {**scaler, **{key: state[f"scaler.{key}"].item() for key in _SCALER}}
            )
