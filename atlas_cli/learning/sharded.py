"""Task vectors shared out over ranks: each holds a part of the pool, and all the same model.

A rank composes what its own vectors add, and the ranks sum that block by block, while the next
blocks are composed. Each runs its share of the batch; the gradients of the composed tensors are
summed in the same way, and each rank makes the gradient of its own vectors' coefficients of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

import torch

from atlas_cli.core.compose import Composition
from atlas_cli.learning import ranks
from atlas_cli.models.composed import ComposedModel

_AT_ONCE = 8  # blocks that are composed before they are sent


def own_rows(count: int) -> Sequence[int]:
    """The vectors of a pool that this rank holds."""
    return range(ranks.number(), count, ranks.count())


def sharded(kind: type[ComposedModel]) -> type[ComposedModel]:
    """The same kind of model, whose composition has the vectors of this rank only."""

    class ShardedModel(kind):  # type: ignore[valid-type,misc]
        def compose(self, values: torch.Tensor) -> None:
            # The base is counted once: the others add to nothing.
            partial = self.composition if ranks.number() == 0 else _on_nothing(self.composition)
            sums = ranks.BlockSums()
            for names in _some(self._tensors):
                self.compose_blocks(partial, values, names)
                sums.add(self._tensors[name] for name in names)
            sums.wait()

        def gradients(self) -> dict[str, torch.Tensor]:
            found: dict[str, torch.Tensor] = super().gradients()
            whole = {
                name: found[name] if name in found else torch.zeros_like(tensor)
                for name, tensor in self._tensors.items()
            }
            sums = ranks.BlockSums()
            sums.add(whole.values())
            sums.wait()
            return whole

    return ShardedModel


def _on_nothing(composition: Composition) -> Composition:
    base = {
        name: torch.zeros(1, dtype=torch.float32, device=tensor.device).expand(tensor.shape)
        for name, tensor in composition.base.items()
    }
    return dataclasses.replace(composition, base=base)


def _some(names: Mapping[str, torch.Tensor]) -> Iterator[list[str]]:
    rest: Iterable[str] = iter(names)
    while some := list(islice(rest, _AT_ONCE)):
        yield some
