"""A module that runs with composed weights in place of its own, and their gradients."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from atlas_cli.core.adapters import Head
from atlas_cli.core.compose import (
    Composition,
    Layout,
    Scattered,
    Segments,
    coefficient_gradient,
    compose_block,
)
from atlas_cli.parallel import ThreadPool

if TYPE_CHECKING:
    from atlas_cli.models.accelerator import Accelerator

_AT_ONCE = 64  # images of a forward pass without gradients

LossOf = Callable[[torch.Tensor], torch.Tensor]


class Replica:
    """A copy of a module's structure that shares all tensors but has gradients of its own.

    The composed tensors stand where the module's own were.
    """

    def __init__(
        self, module: torch.nn.Module, composed: Mapping[str, torch.Tensor], prefix: str
    ) -> None:
        self.module = sharing_copy(module)
        self.call: Callable[[torch.Tensor], torch.Tensor] = self.module
        self.parameters = _leaves(composed)
        for name, parameter in self.parameters.items():
            path, _, leaf = name.removeprefix(prefix).rpartition(".")
            setattr(self.module.get_submodule(path), leaf, parameter)

    def run(self, images: torch.Tensor) -> torch.Tensor:
        """What the module gives for a batch."""
        return self.call(images)


class LinearisedReplica(Replica):
    """A copy of a module that runs as f(x; theta0) + J delta, by forward-mode differentiation."""

    def __init__(
        self, module: torch.nn.Module, composed: Mapping[str, torch.Tensor], prefix: str
    ) -> None:
        self.module = sharing_copy(module)
        self.parameters = _leaves(composed)
        own = dict(self.module.named_parameters())
        self._names = {name: name.removeprefix(prefix) for name in composed}
        self._base = {short: own[short].detach() for short in self._names.values()}
        with warnings.catch_warnings():  # torch warns of itself when this is first imported
            warnings.simplefilter("ignore", DeprecationWarning)
            importlib.import_module("torch._decomp.decompositions_for_jvp")

    def run(self, images: torch.Tensor) -> torch.Tensor:
        """The first-order expansion for a batch."""

        def features(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
            return functional_call(self.module, parameters, (images,))  # type: ignore[no-any-return]

        with sdpa_kernel(SDPBackend.MATH), _without_fast_path():
            value, change = jvp(features, (self._base,), (self._delta(),))  # type: ignore[misc]
        return value + change  # type: ignore[no-any-return]

    def _delta(self) -> dict[str, torch.Tensor]:
        """What is given: theta - theta0."""
        return {self._names[name]: tensor for name, tensor in self.parameters.items()}


class TangentReplica(LinearisedReplica):
    """The same for tensors that are theta itself."""

    def _delta(self) -> dict[str, torch.Tensor]:
        return {name: tensor - self._base[name] for name, tensor in super()._delta().items()}


@contextmanager
def _without_fast_path() -> Iterator[None]:
    """Without the fast path of torch's attention, which has no derivative."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _leaves(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.nn.Parameter]:
    return {name: torch.nn.Parameter(tensor) for name, tensor in tensors.items()}


def sharing_copy(module: torch.nn.Module) -> torch.nn.Module:
    """A copy of a module's structure that shares all of its tensors."""
    shared = {id(tensor): tensor for tensor in [*module.parameters(), *module.buffers()]}
    return copy.deepcopy(module, shared).eval()


class FunctionalModel:
    """A module that runs with given tensors in place of its own, and keeps their gradients.

    `prefix` is what the names of the tensors have before the module's own. Buffers, such as the
    statistics of batch normalisation, stay those of the module, and dropout is off.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        tensors: Mapping[str, torch.Tensor],
        *,
        prefix: str = "",
        thread_pool: ThreadPool | None = None,
        replica: type[Replica],
    ) -> None:
        # A derivative forwards has one thread.
        count = thread_pool.parts if thread_pool and replica is Replica else 1
        self._over_blocks = thread_pool.map if thread_pool else map
        self._over_parts = thread_pool.map if thread_pool and count > 1 else map
        self._tensors = dict(tensors)
        self._replicas = [replica(module, self._tensors, prefix) for _ in range(count)]
        self.accelerator: Accelerator | None = None  # None: float32, and all images at once

    def hold(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take tensors that were made otherwise: from now on the module runs with these."""
        for name, tensor in self._tensors.items():
            tensor.copy_(tensors[name])

    def compile(self, how: Callable[[torch.nn.Module], Callable[..., torch.Tensor]]) -> None:
        """From now on run what `how` makes of the module; an expansion stays as it is."""
        for replica in self._replicas:
            replica.call = how(replica.module)

    def features(self, images: torch.Tensor) -> torch.Tensor:
        """What the module gives for a batch, without gradients."""
        found = []
        for first in range(0, len(images), _AT_ONCE * len(self._replicas)):
            some = images[first : first + _AT_ONCE * len(self._replicas)]
            if self.accelerator:
                found.append(self.accelerator.features(self.features_at_once, some))
            else:
                found.append(self.features_at_once(some))
        return torch.cat(found)

    def features_at_once(self, images: torch.Tensor) -> torch.Tensor:
        """The same for as many images as run at a time."""

        def run(item: tuple[Replica, torch.Tensor]) -> torch.Tensor:
            with torch.no_grad(), self._precision():
                return item[0].run(item[1]).float()

        return torch.cat(list(self._over_parts(run, self._dealt(images))))

    def backward(self, images: torch.Tensor, loss_of: LossOf) -> torch.Tensor:
        """Add the gradients of loss_of(features of the batch) to those kept; gives the loss."""
        if self.accelerator:
            return self.accelerator.backward(self, images, loss_of)
        parts = self.forward_parts(images)
        features = torch.cat([part.detach() for part in parts]).float().requires_grad_()
        loss = loss_of(features)
        loss.backward()
        assert features.grad is not None
        self.backward_parts(parts, features.grad)
        return loss.detach()

    def forward_parts(self, images: torch.Tensor) -> list[torch.Tensor]:
        """The features of a batch, a tensor per replica, with what their gradients need."""

        def forth(item: tuple[Replica, torch.Tensor]) -> torch.Tensor:
            with torch.enable_grad(), self._precision():
                return item[0].run(item[1])

        return list(self._over_parts(forth, self._dealt(images)))

    def backward_parts(self, parts: list[torch.Tensor], gradient: torch.Tensor) -> None:
        """Add the gradients of features, given dL/dfeatures of the whole batch."""

        def back(item: tuple[torch.Tensor, torch.Tensor]) -> None:
            item[0].backward(item[1].to(item[0].dtype))

        pieces = gradient.split([len(part) for part in parts])
        list(self._over_parts(back, zip(parts, pieces, strict=True)))

    def take_gradients(self) -> list[torch.Tensor | None]:
        """The gradients that are kept, which are let go."""
        found = []
        for replica in self._replicas:
            for parameter in replica.parameters.values():
                found.append(parameter.grad)
                parameter.grad = None
        return found

    def add_gradients(self, kept: list[torch.Tensor | None]) -> None:
        """Add what `take_gradients` gave."""
        leaves = [p for replica in self._replicas for p in replica.parameters.values()]
        for parameter, before in zip(leaves, kept, strict=True):
            if before is not None:
                parameter.grad = (
                    _sum(before, parameter.grad) if parameter.grad is not None else before
                )

    def gradients(self) -> dict[str, torch.Tensor]:
        """dL/dtheta of the composed tensors since the last call; they are let go."""
        summed: dict[str, torch.Tensor] = {}
        for name in self._tensors:
            for replica in self._replicas:
                parameter = replica.parameters[name]
                if parameter.grad is not None:
                    summed[name] = _sum(summed.get(name), parameter.grad)
                    parameter.grad = None
        return summed

    def _dealt(self, images: torch.Tensor) -> Iterator[tuple[Replica, torch.Tensor]]:
        """The batch in as many equal parts as there are replicas."""
        images = self.accelerator.arranged(images) if self.accelerator else images
        parts = images.tensor_split(len(self._replicas))
        return ((r, part) for r, part in zip(self._replicas, parts, strict=True) if len(part))

    def _precision(self) -> AbstractContextManager[Any]:
        return self.accelerator.autocast() if self.accelerator else nullcontext()


def _sum(total: torch.Tensor | None, gradient: torch.Tensor) -> torch.Tensor:
    return gradient if total is None else total.add_(gradient)


class ComposedModel(FunctionalModel):
    """A module whose parameters named in a composition are composed before it runs.

    A linear one runs the module's first-order expansion at the base instead:
    f(x; theta0) + J (theta - theta0).
    """

    def __init__(
        self,
        module: torch.nn.Module,
        composition: Composition,
        *,
        prefix: str = "",
        thread_pool: ThreadPool | None = None,
        linear: bool = False,
    ) -> None:
        self.composition = _from_zero(composition) if linear else composition
        composed = {
            name: torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device)
            for name, tensor in composition.base.items()
        }
        replica = LinearisedReplica if linear else Replica
        super().__init__(module, composed, prefix=prefix, thread_pool=thread_pool, replica=replica)
        self._without_effect = _columns_of(composition.layout, key_biases(module, prefix))

    def load(self, coefficients: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Compose: from now on the module runs with these tensors."""
        self.loaded = coefficients.detach().float()
        with torch.no_grad():
            self.compose(self.loaded)
        return self._tensors

    def compose(self, values: torch.Tensor) -> None:
        """Write the composed tensors."""
        self.compose_blocks(self.composition, values, self._tensors)

    def compose_blocks(
        self, composition: Composition, values: torch.Tensor, names: Iterable[str]
    ) -> None:
        """Write some of the composed tensors."""

        def write(name: str) -> None:
            compose_block(composition, name, values, self._tensors[name])

        list(self._over_blocks(write, names))

    def gradient(self) -> torch.Tensor:
        """dL/dlambda of everything since the last call, in float64; the gradients are let go."""
        found = coefficient_gradient(self.composition, self.gradients(), self._over_blocks)
        if self._without_effect:
            found[:, self._without_effect] = 0
        return found

    def features_for(self, head: torch.Tensor | Head) -> AbstractContextManager[None]:
        """Run for a while so that the features are those that a head takes: always the same."""
        return nullcontext()


def _from_zero(composition: Composition) -> Composition:
    """The same composition on top of nothing: what is added to the base."""
    base = {
        name: torch.zeros(1, device=tensor.device).expand(tensor.shape)
        for name, tensor in composition.base.items()
    }
    return dataclasses.replace(composition, base=base)


class LayerNormModel(ComposedModel):
    """A model that adds what is learned, (1, numbers), to its LayerNorms' weights and biases."""

    def __init__(
        self, module: torch.nn.Module, *, prefix: str = "", thread_pool: ThreadPool | None = None
    ) -> None:
        names = norm_names(module)
        base = {f"{prefix}{name}": module.get_parameter(name).detach() for name in names}
        sizes = [math.prod(tensor.shape) for tensor in base.values()]
        labels = tuple(f"{name}[{i}]" for name, t in base.items() for i in range(t.numel()))
        whole = Layout(labels, {name: Segments((0,), ()) for name in base})
        super().__init__(
            module, Composition(base, {}, whole, 1), prefix=prefix, thread_pool=thread_pool
        )
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


def key_biases(module: torch.nn.Module, prefix: str = "") -> dict[str, slice]:
    """Where the biases of keys are in the stacked ones of torch's attention, by name.

    No output depends on them: q . (k + b) = q . k + q . b, where the last is the same for all keys,
    and softmax does not see it. Their gradient is zero. What is computed for it is rounding, which
    AdamW would scale up to whole steps in directions that depend on the number of processes.
    """
    return {
        prefix + f"{path}.in_proj_bias".lstrip("."): slice(part.embed_dim, 2 * part.embed_dim)
        for path, part in module.named_modules()
        if isinstance(part, torch.nn.MultiheadAttention)
        and part.in_proj_bias is not None
        and part.bias_k is None
        and not part.add_zero_attn  # then some keys have no bias
    }


def _columns_of(layout: Layout, parts: Mapping[str, slice]) -> list[int]:
    """The columns of a table that scale nothing but some parts of blocks."""
    inside: set[int] = set()
    outside: set[int] = set()
    for name, placement in layout.placements.items():
        if isinstance(placement, Scattered):
            outside |= {*range(placement.first, placement.first + placement.parts)}
            continue
        part = parts.get(name, slice(0, 0))
        bounds = itertools.pairwise(placement.bounds)
        for (first, last), column in zip(bounds, placement.columns, strict=True):
            (inside if part.start <= first and last <= part.stop else outside).add(column)
    return sorted(inside - outside)
