"""A composed model with a head whose numbers are learned together with the coefficients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from atlas_cli.core.adapters import Adapter, Head, Shots
from atlas_cli.core.compose import Composition
from atlas_cli.errors import UsageError
from atlas_cli.models.composed import ComposedModel
from atlas_cli.parallel import ThreadPool
from atlas_cli.registry import ADAPTERS


class HeadedModel(ComposedModel):
    """A composed model that may also run without its last projection, and train a head.

    Once a head is attached, values are (1, coefficients + numbers of the head): the table row by
    row, then the tensors of the head. A number of the head is zero + (rate / rate of coefficients)
    * value, so that one optimizer moves each tensor at its own rate, and all values at zero are
    the zero-shot model.
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
        super().__init__(module, composition, prefix=prefix, thread_pool=thread_pool, linear=linear)
        self._module, self._prefix = module, prefix
        self._head: _AttachedHead | None = None
        self._dropped: list[tuple[torch.nn.Module, str, object]] = []

    def attach(self, name: str, shots: Shots, rate: float) -> torch.Tensor:
        """Train a head from now on, and give the values that training starts from."""
        self._head = _AttachedHead(name, shots, rate)
        if ADAPTERS[name].pooled:
            self._drop_projection()
        table = torch.zeros(self.composition.shape, device=shots.text.device)
        return torch.cat([table.flatten(), self._head.start()])[None]

    def detach(self) -> None:
        """Train no head any more."""
        self._head = None
        self._restore_projection()

    def load(self, values: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Compose, and take the numbers of the head; a table alone leaves the head as it is."""
        if self._head is None or values.shape == self.composition.shape:
            return super().load(values)
        table, rest = self._split(values)
        self._head.load(rest)
        return super().load(table)

    def parts(self, values: torch.Tensor) -> tuple[torch.Tensor, Head]:
        """The table and the head that values stand for."""
        assert self._head is not None
        table, rest = self._split(values)
        return table.clone(), self._head.made_of(rest)

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """What the head makes of features, with gradients for its numbers."""
        assert self._head is not None
        return self._head.logits(features)

    def gradient(self) -> torch.Tensor:
        """dL/dvalues of everything since the last call; the gradients are let go."""
        if self._head is None:
            return super().gradient()
        own = self._head.gradient()
        if not self.composition.vectors:
            return own[None]
        return torch.cat([super().gradient().flatten().to(own.dtype), own])[None]

    def _split(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, columns = self.composition.shape
        flat = values.detach().flatten()
        return flat[: rows * columns].view(rows, columns), flat[rows * columns :]

    # The last projection ------------------------------------------------------------------------

    @contextmanager
    def pooled(self) -> Iterator[None]:
        """Run without the last projection for a while."""
        self._drop_projection()
        try:
            yield
        finally:
            self._restore_projection()

    def features_for(self, head: torch.Tensor | Head) -> AbstractContextManager[None]:
        """Run for a while so that the features are those that a head takes."""
        if isinstance(head, Head) and ADAPTERS[head.adapter].pooled:
            return self.pooled()
        return nullcontext()

    def _drop_projection(self) -> None:
        """From now on features are what comes before the last projection."""
        for replica in self._replicas:
            path, leaf, empty = _place_of_projection(replica.module)
            parent = replica.module.get_submodule(path)
            self._dropped.append((parent, leaf, getattr(parent, leaf)))
            setattr(parent, leaf, empty)

    def _restore_projection(self) -> None:
        for parent, leaf, kept in self._dropped:
            setattr(parent, leaf, kept)
        self._dropped.clear()

    def projection(self) -> torch.Tensor:
        """The last projection that is loaded, (pooled, width)."""
        name, flipped = projection_name(self._module)
        own = self._tensors.get(f"{self._prefix}{name}")
        found = self._module.get_parameter(name) if own is None else own
        return (found.T if flipped else found).detach().float().clone()


def projection_name(module: torch.nn.Module) -> tuple[str, bool]:
    """The parameter that is a tower's last projection, and whether it is (width, pooled).

    Raises UsageError if the tower does not end in one.
    """
    if isinstance(getattr(module, "proj", None), torch.nn.Parameter):
        return "proj", False
    last = getattr(getattr(module, "head", None), "proj", None)
    if isinstance(last, torch.nn.Linear) and last.bias is None:
        return "head.proj.weight", True
    raise UsageError(
        "adapter prolip tunes the last projection of the image tower, and this one has none that "
        "stands alone; use probe, lpp or tip-f"
    )


def _place_of_projection(
    module: torch.nn.Module,
) -> tuple[str, str, torch.nn.Module | None]:
    """Where the projection is in a module, and what stands there to have none."""
    _, flipped = projection_name(module)
    return ("head", "proj", torch.nn.Identity()) if flipped else ("", "proj", None)


class _AttachedHead:
    """The numbers of a head as one flat tensor of values, each with its own rate."""

    def __init__(self, name: str, shots: Shots, rate: float) -> None:
        self._name, self._shots = name, shots
        self._kind: Adapter = ADAPTERS[name]
        self._zero = self._kind.zero(shots)
        self._factors = {key: own / rate for key, own in self._kind.rates.items()}
        self._leaves: dict[str, torch.Tensor] = {}
        self.load(torch.zeros(sum(self._zero[key].numel() for key in self._factors)))

    def start(self) -> torch.Tensor:
        """The values of the numbers that training starts from."""
        begun = self._kind.start(self._shots)
        parts = [
            ((begun[key] - self._zero[key]) / factor).flatten()
            for key, factor in self._factors.items()
        ]
        return torch.cat(parts)

    def load(self, values: torch.Tensor) -> None:
        numbers = self._numbers(values)
        self._leaves = {key: number.requires_grad_() for key, number in numbers.items()}

    def made_of(self, values: torch.Tensor) -> Head:
        """The head with these values."""
        return Head(self._name, {**self._zero, **self._numbers(values)}, self._shots.text)

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        return self._kind.logits({**self._zero, **self._leaves}, features, self._shots.text)

    def gradient(self) -> torch.Tensor:
        """dL/dvalues since the last call."""
        parts = []
        for key, leaf in self._leaves.items():
            gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            parts.append(self._factors[key] * gradient.flatten())
            leaf.grad = None
        return torch.cat(parts)

    def _numbers(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        sizes = [self._zero[key].numel() for key in self._factors]
        pieces = values.detach().to(self._shots.text.device).split(sizes)
        return {
            key: self._zero[key] + factor * piece.view(self._zero[key].shape)
            for (key, factor), piece in zip(self._factors.items(), pieces, strict=True)
        }
