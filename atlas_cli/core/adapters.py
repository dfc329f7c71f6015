"""Heads that are learned on top of image features from a few labelled images per class.

z is a feature of length 1, t_c the text prototype of a class, s the model's logit scale; the
zero-shot head has the rows s * t_c. Every head gives the zero-shot logits at its `zero`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from atlas_cli.errors import DataError
from atlas_cli.registry import ADAPTERS, adapter, late

if TYPE_CHECKING:
    import torch
    import torch.nn.functional as F
else:
    torch, F = late("torch"), late("torch.nn.functional")

Parameters = Mapping[str, "torch.Tensor"]
_STEPS = 300  # of every head that is trained on fixed features


@dataclass(frozen=True)
class Shots:
    """Features of labelled images, (images, width), not yet of length 1, and their classes.

    `text` is the zero-shot head, (classes, width). `projection`, (pooled, width), is what turns the
    features into that width, if they are taken before the model's last projection.
    """

    features: torch.Tensor
    labels: torch.Tensor
    text: torch.Tensor
    projection: torch.Tensor | None = None

    @property
    def per_class(self) -> int:
        """The number of images of the class that has fewest, of those that have any."""
        counts = torch.bincount(self.labels, minlength=len(self.text))
        return int(counts[counts > 0].min().item())


class Adapter(ABC):
    """A kind of head: its numbers, its logits, and how they are trained on fixed features.

    `rates` are AdamW's learning rates where the head is trained together with coefficients; a
    head without them is not. A `pooled` head takes features before the model's last projection.
    """

    rates: ClassVar[Mapping[str, float]] = {}
    joint: ClassVar[bool] = False  # whether that is what it does unless told otherwise
    pooled: ClassVar[bool] = False
    needs: ClassVar[int] = 1  # images of every class

    @abstractmethod
    def zero(self, shots: Shots) -> dict[str, torch.Tensor]:
        """The numbers with which the logits are those of zero-shot."""

    def start(self, shots: Shots) -> dict[str, torch.Tensor]:
        """The numbers that training starts from."""
        return self.zero(shots)

    @abstractmethod
    def logits(
        self, parameters: Parameters, features: torch.Tensor, text: torch.Tensor
    ) -> torch.Tensor:
        """(images, classes), of features that are not yet of length 1."""

    @abstractmethod
    def train(self, shots: Shots) -> dict[str, torch.Tensor]:
        """The numbers that fit the shots best, by the published procedure."""

    def linear(
        self, parameters: Parameters, text: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Weight and bias of the same logits as one linear layer on z; None if there is none."""
        return None


@dataclass(frozen=True)
class Head:
    """A learned head: features -> logits. `text` is the zero-shot head it was learned beside."""

    adapter: str
    parameters: Parameters
    text: torch.Tensor

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        """The logits of features that are not yet of length 1."""
        return ADAPTERS[self.adapter].logits(self.parameters, features, self.text)

    def __len__(self) -> int:
        """The number of classes."""
        return len(self.text)

    @property
    def device(self) -> torch.device:
        """Where its numbers are."""
        return self.text.device

    def to(self, device: torch.device) -> Head:
        """The same head on a device."""
        moved = {name: value.to(device) for name, value in self.parameters.items()}
        return Head(self.adapter, moved, self.text.to(device))

    def linear(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Weight and bias of one linear layer on z that gives the same logits, if there is one."""
        return ADAPTERS[self.adapter].linear(self.parameters, self.text)


def check_count(name: str, found: Adapter, fewest: int, where: str) -> None:
    """Raise DataError if the class with the fewest images has fewer than a head needs."""
    if fewest < found.needs:
        raise DataError(
            f"{where}: adapter {name} is fitted on images left out and needs {found.needs} of "
            f"every class, but a class has {fewest}; use tip-f, lpp or probe"
        )


# A linear layer -------------------------------------------------------------------------------


@adapter("probe")
class Probe(Adapter):
    """logits = W z, from W = s t and drawn to it: cross-entropy + 0.01 |W - s t|^2 / N.

    Full-batch AdamW with a rate of 1, and half a cosine.
    """

    rates: ClassVar = {"weight": 0.05}
    joint = True
    _PULL, _RATE = 0.01, 1.0

    def zero(self, shots: Shots) -> dict[str, torch.Tensor]:
        return {"weight": shots.text}

    def logits(
        self, parameters: Parameters, features: torch.Tensor, text: torch.Tensor
    ) -> torch.Tensor:
        return F.normalize(features, dim=-1) @ parameters["weight"].T

    def train(self, shots: Shots) -> dict[str, torch.Tensor]:
        start = self.zero(shots)["weight"]

        def loss(leaves: Parameters) -> torch.Tensor:
            pull = (leaves["weight"] - start).square().sum() * (self._PULL / len(shots.labels))
            logits = self.logits(leaves, shots.features, shots.text)
            return F.cross_entropy(logits, shots.labels) + pull

        return _descend({"weight": start}, {"weight": self._RATE}, loss)

    def linear(
        self, parameters: Parameters, text: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weight = parameters["weight"]
        return weight, weight.new_zeros(len(weight))


@adapter("lpp")
class LinearProbePlus(Adapter):
    """LP++: logit_c = w_c z + b_c + alpha_c t_c z, trained by SGD with step sizes from the data.

    w_c starts as the sum of the features of its class, alpha_c as 250 times the mean over classes
    of the mean likeness of an image to its own prototype. Gradient steps of 4 N / lambda_max(Z^T Z)
    for w and b, with momentum 0.9, and every tenth step of N / (4 max_c sum_i (t_c z_i)^2) for
    alpha, along the sum of all gradients so far.
    """

    rates: ClassVar = {"weight": 0.05, "bias": 0.05, "alpha": 0.5}
    _MOMENTUM, _EVERY, _START = 0.9, 10, 250.0

    def zero(self, shots: Shots) -> dict[str, torch.Tensor]:
        classes, width = shots.text.shape
        return {
            "weight": shots.text.new_zeros(classes, width),
            "bias": shots.text.new_zeros(classes),
            "alpha": shots.text.norm(dim=1),
        }

    def start(self, shots: Shots) -> dict[str, torch.Tensor]:
        z, t = F.normalize(shots.features, dim=-1), F.normalize(shots.text, dim=-1)
        member = F.one_hot(shots.labels, len(t)).to(z)
        counts = member.sum(0)
        own = ((z @ t.T) * member).sum(0)[counts > 0] / counts[counts > 0]
        found = self.zero(shots)
        return {
            **found,
            "weight": member.T @ z,
            "alpha": torch.full_like(found["alpha"], self._START * own.mean().item()),
        }

    def logits(
        self, parameters: Parameters, features: torch.Tensor, text: torch.Tensor
    ) -> torch.Tensor:
        weight, bias = self.linear(parameters, text)
        return F.normalize(features, dim=-1) @ weight.T + bias

    def linear(
        self, parameters: Parameters, text: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        prototypes = parameters["alpha"][:, None] * F.normalize(text, dim=-1)
        return parameters["weight"] + prototypes, parameters["bias"]

    def train(self, shots: Shots) -> dict[str, torch.Tensor]:
        z, t = F.normalize(shots.features, dim=-1), F.normalize(shots.text, dim=-1)
        count = len(shots.labels)
        rate = 4 * count / torch.linalg.matrix_norm(z, 2).square().item()
        largest = (z @ t.T).square().sum(0).max().item()
        rate_of_alpha = count / (4 * largest)
        values = {name: value.clone() for name, value in self.start(shots).items()}
        speed = {name: torch.zeros_like(values[name]) for name in ("weight", "bias")}
        pressed = torch.zeros_like(values["alpha"])
        for step in range(1, _STEPS + 1):
            gradients = _gradients(values, lambda leaves: self._loss(leaves, shots))
            pressed += gradients["alpha"]
            for name in speed:
                speed[name] = self._MOMENTUM * speed[name] + gradients[name]
                values[name] = values[name] - rate * speed[name]
            if step % self._EVERY == 0:
                values["alpha"] = values["alpha"] - rate_of_alpha * pressed
        return values

    def _loss(self, leaves: Parameters, shots: Shots) -> torch.Tensor:
        return F.cross_entropy(self.logits(leaves, shots.features, shots.text), shots.labels)


# A cache of the shots -------------------------------------------------------------------------


@adapter("tip")
class Tip(Adapter):
    """logits = s t z + alpha exp(-beta (1 - K z)) Y: K are features of the shots, Y their classes.

    alpha and beta are the best of a grid for each image when it is left out of the cache.
    """

    needs = 2
    _ALPHAS = tuple(2.0**n / 2 for n in range(9))  # 0.5 to 128
    _BETAS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)

    def zero(self, shots: Shots) -> dict[str, torch.Tensor]:
        z = F.normalize(shots.features, dim=-1)
        return {
            "keys": z,
            "classes": shots.labels.clone(),
            "alpha": z.new_zeros(()),
            "beta": z.new_ones(()),
        }

    def logits(
        self, parameters: Parameters, features: torch.Tensor, text: torch.Tensor
    ) -> torch.Tensor:
        z = F.normalize(features, dim=-1)
        member = F.one_hot(parameters["classes"], len(text)).to(z)
        near = (-parameters["beta"] * (1 - z @ parameters["keys"].T)).exp()
        return z @ text.T + parameters["alpha"] * near @ member

    def train(self, shots: Shots) -> dict[str, torch.Tensor]:
        z = F.normalize(shots.features, dim=-1)
        member = F.one_hot(shots.labels, len(shots.text)).to(z)
        distance = 1 - z @ z.T
        others = 1 - torch.eye(len(z), device=z.device)  # an image is no evidence for itself
        best, chosen = (-1.0, -math.inf), (0.0, 1.0)
        for beta in self._BETAS:
            cached = ((-beta * distance).exp() * others) @ member
            for alpha in (0.0, *self._ALPHAS):
                logits = z @ shots.text.T + alpha * cached
                hits = (logits.argmax(1) == shots.labels).double().mean().item()
                score = (hits, -F.cross_entropy(logits, shots.labels).item())
                if score > best:
                    best, chosen = score, (alpha, beta)
        alpha_found, beta_found = (z.new_tensor(value) for value in chosen)
        return {**self.zero(shots), "alpha": alpha_found, "beta": beta_found}


@adapter("tip-f")
class TipFineTuned(Tip):
    """Tip with keys, alpha and beta trained; from the features of the shots, 2 and 1.

    Full-batch AdamW, rates 0.001 for the keys and 0.1 for alpha and beta, half a cosine.
    """

    rates: ClassVar = {"keys": 1e-3, "alpha": 0.1, "beta": 0.1}
    joint = True
    needs = 1
    _ALPHA = 2.0

    def start(self, shots: Shots) -> dict[str, torch.Tensor]:
        found = self.zero(shots)
        return {**found, "alpha": torch.full_like(found["alpha"], self._ALPHA)}

    def train(self, shots: Shots) -> dict[str, torch.Tensor]:
        start = self.start(shots)
        classes = start.pop("classes")

        def loss(leaves: Parameters) -> torch.Tensor:
            logits = self.logits({**leaves, "classes": classes}, shots.features, shots.text)
            return F.cross_entropy(logits, shots.labels)

        found = _descend(start, self.rates, loss, decay=0.01, epsilon=1e-4)
        return {**found, "classes": classes}


# The model's last projection ------------------------------------------------------------------


@adapter("prolip")
class Projection(Adapter):
    """ProLIP: logits = s t norm(h P), h before the projection; cross-entropy + |P - P0|^2 / K.

    K is the number of images per class. Full-batch AdamW, half a cosine.
    """

    rates: ClassVar = {"projection": 1e-3}
    joint = True
    pooled = True
    _RATE = 1e-3

    def zero(self, shots: Shots) -> dict[str, torch.Tensor]:
        if shots.projection is None:
            raise ValueError("no projection is given")
        return {"projection": shots.projection}

    def logits(
        self, parameters: Parameters, features: torch.Tensor, text: torch.Tensor
    ) -> torch.Tensor:
        return F.normalize(features @ parameters["projection"], dim=-1) @ text.T

    def train(self, shots: Shots) -> dict[str, torch.Tensor]:
        start = self.zero(shots)

        def loss(leaves: Parameters) -> torch.Tensor:
            moved = (leaves["projection"] - start["projection"]).square().sum()
            logits = self.logits(leaves, shots.features, shots.text)
            return F.cross_entropy(logits, shots.labels) + moved / shots.per_class

        return _descend(start, {"projection": self._RATE}, loss)


# Training on fixed features -------------------------------------------------------------------


def _gradients(
    values: Parameters, loss: Callable[[Parameters], torch.Tensor]
) -> dict[str, torch.Tensor]:
    with torch.enable_grad():
        leaves = {name: value.detach().requires_grad_() for name, value in values.items()}
        found = torch.autograd.grad(loss(leaves), list(leaves.values()))
    return dict(zip(leaves, found, strict=True))


def _descend(
    start: Parameters,
    rates: Mapping[str, float],
    loss: Callable[[Parameters], torch.Tensor],
    *,
    decay: float = 0.0,
    epsilon: float = 1e-8,
) -> dict[str, torch.Tensor]:
    """Full-batch AdamW from a start, each tensor with its rate, which falls by half a cosine."""
    leaves = {name: value.detach().clone().requires_grad_() for name, value in start.items()}
    groups = [{"params": [leaf], "name": name} for name, leaf in leaves.items()]
    optimizer = torch.optim.AdamW(groups, weight_decay=decay, eps=epsilon, foreach=False)
    for step in range(_STEPS):
        for group in optimizer.param_groups:
            share = (1 + math.cos(math.pi * step / _STEPS)) / 2
            group["lr"] = rates[group["name"]] * share
        optimizer.zero_grad()
        with torch.enable_grad():
            loss(leaves).backward()
        optimizer.step()
    return {name: leaf.detach() for name, leaf in leaves.items()}
