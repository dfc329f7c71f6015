"""Optimizers of coefficients and of weights: AdamW, and the sharpness-aware SGD of SAR."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from atlas_cli.core.losses import penalty

_MOMENTS = ("exp_avg", "exp_avg_sq")
_SCALER = ("scale", "_growth_tracker")
_HIGH, _FAR = 1.0, 3.0  # above twice the first loss
_PATIENCE = 8  # high losses in a row
_HALVINGS = 20
_GOOD = "good."


@dataclass(frozen=True)
class OptimizerConfig:
    """Settings of an optimizer; by default the paper's for a few images per class.

    `schedule` is cosine (half a cosine, from the rate to zero) or constant; before it, the rate
    rises over `warmup` steps. Coefficients beyond `low` or `high` count as these bounds, and get
    no gradient: only the decay moves them back. `sharp` asks for sharpness-aware SGD instead of
    AdamW. `backs_off` says that a loss far above the first one sends coefficients back.
    """

    rate: float = 0.1
    decay: float = 0.1
    clip: float = 1.0
    penalty_order: int = 1
    penalty_weight: float = 0.0
    schedule: str = "cosine"
    warmup: int = 0
    warmup_share: float = 0.0  # of all steps, where `warmup` is not given
    sharp: bool = False
    backs_off: bool = False
    low: float = -math.inf
    high: float = math.inf

    def rate_at(self, number: int, steps: int) -> float:
        """The learning rate of a step, counted from 0, out of `steps`."""
        warmup = self.warmup or int(self.warmup_share * steps)
        if number < warmup:
            return self.rate * (number + 1) / warmup
        if self.schedule == "constant":
            return self.rate
        share = (number - warmup) / (steps - warmup)
        return self.rate * (1 + math.cos(math.pi * share)) / 2

    def bounded(self, coefficients: torch.Tensor) -> torch.Tensor:
        """The coefficients that are composed: a copy, within the bounds."""
        return coefficients.detach().clamp(self.low, self.high)


class _Onward:
    """An optimizer that never goes back."""

    back_to: int | None = None

    def goes_back(self, loss: float) -> bool:
        """Whether a loss at the values sent them back to where they were good: never here."""
        return False


class _Adam(_Onward):
    """AdamW on named tensors, which it changes in place."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        steps: int,
        optimizer_config: OptimizerConfig,
        *,
        scaled: bool,
        fused: bool,
    ) -> None:
        self._leaves = {name: torch.nn.Parameter(tensor) for name, tensor in tensors.items()}
        self.number = 0
        self._steps = steps
        self._config = optimizer_config
        self._fused = fused
        self._optimizer = torch.optim.AdamW(
            self._leaves.values(),
            lr=optimizer_config.rate,
            weight_decay=optimizer_config.decay,
            foreach=False,
            fused=fused,
        )
        device = next(iter(self._leaves.values())).device.type
        self.scaler = torch.amp.GradScaler(device, enabled=scaled)

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""
        return self._config.rate_at(self.number, self._steps)

    def _descend(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """One step of AdamW along gradients of the (scaled) loss, clipped after unscaling."""
        for name, gradient in gradients.items():
            self._leaves[name].grad = gradient
        if self.scaler.is_enabled():
            self.scaler.unscale_(self._optimizer)
        self._regularise()
        torch.nn.utils.clip_grad_norm_(self._leaves.values(), self._config.clip)
        self._optimizer.param_groups[0]["lr"] = self.rate
        self.scaler.step(self._optimizer)
        self.scaler.update()
        self._optimizer.zero_grad()
        self.number += 1

    def _regularise(self) -> None:
        """Add the gradients of a penalty; there is none here."""

    def skip(self) -> None:
        """Count a step that moves nothing."""
        self.number += 1

    def state(self) -> dict[str, torch.Tensor]:
        """All that the next step depends on: the tensors themselves, valid until that step."""
        found = {name: leaf.detach() for name, leaf in self._leaves.items()}
        for name, leaf in self._leaves.items():
            kept = self._optimizer.state.get(leaf, {})
            found |= {f"{key}.{name}": value for key, value in kept.items()}
        scaler = self.scaler.state_dict()
        found |= {f"scaler.{key}": torch.tensor(scaler[key]) for key in _SCALER if scaler}
        return {**found, "number": torch.tensor(self.number)}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        self.number = int(state["number"].item())
        for name, leaf in self._leaves.items():
            with torch.no_grad():
                leaf.copy_(state[name])
            if f"step.{name}" in state:  # not before the first step, which an overflow puts off
                counted = leaf.device if self._fused else "cpu"
                self._optimizer.state[leaf] = {
                    "step": state[f"step.{name}"].to(counted, copy=True),
                    **{key: state[f"{key}.{name}"].to(leaf.device, copy=True) for key in _MOMENTS},
                }
        if scaler := self.scaler.state_dict():
            self.scaler.load_state_dict(
                {**scaler, **{key: state[f"scaler.{key}"].item() for key in _SCALER}}
            )


class CoefficientOptimizer(_Adam):
    """AdamW on a copy of a table of coefficients, within bounds and with a penalty."""

    def __init__(
        self,
        start: torch.Tensor,
        steps: int,
        optimizer_config: OptimizerConfig,
        *,
        scaled: bool = False,
    ) -> None:
        self._start = start.clone()
        tensors = {"coefficients": start.clone()}
        super().__init__(tensors, steps, optimizer_config, scaled=scaled, fused=False)
        self.coefficients = self._leaves["coefficients"]
        self._first, self._above = math.nan, 0  # the first loss, and how many were high since
        self._halvings = 0
        self._good: dict[str, torch.Tensor] = {}

    @property
    def values(self) -> torch.Tensor:
        """The coefficients that are composed: a copy, within the bounds."""
        return self._config.bounded(self.coefficients)

    def step(self, gradient: torch.Tensor) -> None:
        """One step along a gradient of the (scaled) loss."""
        inside = self.values == self.coefficients  # the loss is flat beyond the bounds
        self._descend({"coefficients": gradient.to(self.coefficients.dtype) * inside})

    def reset(self) -> None:
        """Return to the start and forget all gradients. The count of steps goes on."""
        with torch.no_grad():
            self.coefficients.copy_(self._start)
        self._optimizer.state.clear()

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""
        return super().rate * 0.5**self._halvings

    @property
    def base_rate(self) -> float:
        """The rate that the schedule begins with."""
        return self._config.rate * 0.5**self._halvings

    def goes_back(self, loss: float) -> bool:
        """Whether a loss sent the coefficients back to where it was last no worse than at first.

        It does so where it is no number, beyond 2 |first| + 3, or beyond 2 |first| + 1 eight times
        in a row: losses of single batches differ, and a high rate may overshoot at first. The rate
        is halved, and the count of steps goes on.
        """
        self.back_to = None
        if not self._config.backs_off:
            return False
        if not self._good:
            self._first = loss
        rise = loss - 2 * abs(self._first)
        self._above = self._above + 1 if rise > _HIGH else 0
        if rise <= _FAR and self._above < _PATIENCE:  # false of NaN
            if loss <= self._first and not self._is_good:
                self._good = {name: tensor.clone() for name, tensor in super().state().items()}
            return False
        if not self._good or self._halvings == _HALVINGS:
            return False
        number, self._halvings, self._above = self.number + 1, self._halvings + 1, 0
        self.back_to = int(self._good["number"].item())
        if not any(name.startswith("step.") for name in self._good):
            self._optimizer.state.clear()  # before the first step there were no moments
        super().restore(self._good)
        self.number = number
        return True

    @property
    def is_lost(self) -> bool:
        """Whether it went back, and no step since the first has been any good."""
        return self._halvings > 0 and int(self._good["number"].item()) == 0

    @property
    def _is_good(self) -> bool:
        """Whether the values are those to which it would go back."""
        return bool(self._good) and torch.equal(self.coefficients, self._good["coefficients"])

    def _regularise(self) -> None:
        if self._config.penalty_weight and self.coefficients.grad is not None:
            loss = self._config.penalty_weight * penalty(
                self.coefficients, self._config.penalty_order
            )
            self.coefficients.grad += torch.autograd.grad(loss, self.coefficients)[0]

    def state(self) -> dict[str, torch.Tensor]:
        """All that the next step depends on: copies."""
        found = {name: tensor.clone() for name, tensor in super().state().items()}
        if self._good:
            found |= {f"{_GOOD}{name}": tensor for name, tensor in self._good.items()}
            found["first"] = torch.tensor(self._first, dtype=torch.float64)
            found["halvings"] = torch.tensor(self._halvings)
            found["above"] = torch.tensor(self._above)
        return found

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        super().restore(state)
        if "halvings" in state:
            self._first, self._above = state["first"].item(), int(state["above"].item())
            self._halvings = int(state["halvings"].item())
            kept = {name: tensor for name, tensor in state.items() if name.startswith(_GOOD)}
            self._good = {name[len(_GOOD) :]: tensor.clone() for name, tensor in kept.items()}


class WeightOptimizer(_Adam):
    """AdamW on weights, in the very tensors that it is given."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        steps: int,
        optimizer_config: OptimizerConfig,
        *,
        scaled: bool = False,
    ) -> None:
        super().__init__(tensors, steps, optimizer_config, scaled=scaled, fused=True)

    @property
    def values(self) -> Mapping[str, torch.Tensor]:
        """The weights themselves."""
        return {name: leaf.detach() for name, leaf in self._leaves.items()}

    def step(self, gradient: Mapping[str, torch.Tensor]) -> None:
        """One step along gradients of the (scaled) loss, which are used up."""
        self._descend(gradient)

    def reset(self) -> None:
        """Not possible: there is no second copy of the weights at the start."""
        raise NotImplementedError("weights are never sent back to their start")


RADIUS = 0.05
_MOMENTUM = 0.9
_TINY = 1e-12


class SharpnessAwareOptimizer(_Onward):
    """Sharpness-aware SGD, which takes two gradients per step.

    The first, g, moves coefficients w up to w + radius * g / |g|; along the second, taken there,
    SGD with momentum steps from w. Where a gradient is zero, since nothing was selected, nothing
    moves.
    """

    def __init__(self, start: torch.Tensor, steps: int, optimizer_config: OptimizerConfig) -> None:
        self._start, self._steps, self._config = start.clone(), steps, optimizer_config
        self.coefficients = start.clone()
        self.scaler = torch.amp.GradScaler(start.device.type, enabled=False)
        self.number = 0
        self.reset()

    def reset(self) -> None:
        """Return to the start and forget all gradients. The count of steps goes on."""
        self.coefficients = self._start.clone()
        self._momentum = torch.zeros_like(self._start)
        self._above: torch.Tensor | None = None

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""
        return self._config.rate_at(self.number, self._steps)

    @property
    def values(self) -> torch.Tensor:
        """The coefficients that are composed: a copy; between two gradients, those above."""
        return self._config.bounded(self.coefficients if self._above is None else self._above)

    def step(self, gradient: torch.Tensor) -> None:
        """Climb along the first gradient; descend along the second, and count a step."""
        gradient = gradient.to(self.coefficients.dtype)
        if self._above is None:
            norm = gradient.norm()
            self._above = self.coefficients + gradient * (RADIUS / (norm + _TINY))
            return
        if gradient.any():
            decayed = gradient + self._config.decay * self.coefficients
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
        self.coefficients = state["coefficients"].to(self._start.device, copy=True)
        self._momentum = state["momentum"].to(self._start.device, copy=True)
        self.number = int(state["number"].item())


def make_optimizer(
    start: torch.Tensor, steps: int, config: OptimizerConfig, *, scaled: bool
) -> CoefficientOptimizer | SharpnessAwareOptimizer:
    """An optimizer of coefficients of the kind that its settings ask for."""
    if config.sharp:
        return SharpnessAwareOptimizer(start, steps, config)
    return CoefficientOptimizer(start, steps, config, scaled=scaled)
