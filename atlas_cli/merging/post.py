"""Steps after a merge method: the merged matrix is made whole, and then changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from atlas_cli.errors import UsageError
from atlas_cli.merging.plan import Output
from atlas_cli.merging.produce import ByMethod
from atlas_cli.merging.segments import Model
from atlas_cli.recipes.merge import Merge
from atlas_cli.registry import POST_STEPS

_COPIES = 40  # bytes for each element: the merged and the base matrix and their factors in float64


@dataclass(frozen=True)
class ByPostSteps:
    """What a method makes; matrices go through the recipe's steps in float32 and more."""

    inner: ByMethod
    base: Model
    steps: Sequence[tuple[str, Mapping[str, Any]]]

    @property
    def together(self) -> bool:
        """As the method has it."""
        return self.inner.together

    def whole(self, output: Output) -> bool:
        """Matrices are made in one go, and whatever the method wants whole."""
        return self._steps_apply(output) or self.inner.whole(output)

    def need(self, output: Output) -> int:
        """The method's need, and for a matrix also copies of all of it."""
        if not self._steps_apply(output):
            return self.inner.need(output)
        models = len(self.inner.segment.models)
        return self.inner.need(output) + output.size * (_COPIES + 8 * models)

    def statistics(self, outputs: Sequence[Output]) -> Any:
        """Those of the method."""
        return self.inner.statistics(outputs)

    def make(self, output: Output, span: tuple[int, int], statistics: Any) -> torch.Tensor:
        """The method's values, of a matrix with every step applied, in the dtype of the file."""
        if not self._steps_apply(output):
            return self.inner.make(output, span, statistics)
        wide = torch.float64 if output.compute == torch.float64 else torch.float32
        exact = replace(output, dtype=wide)
        tiles = output.tiles(whole=self.inner.whole(output))
        parts = [self.inner.make(exact, tile, statistics) for tile in tiles]
        merged = torch.cat(parts).view(output.shape)
        others = [m for m in self.inner.segment.models if m.reference != self.base.reference]
        base, *models = (one.tensors[output.name].read() for one in (self.base, *others))
        for name, parameters in self.steps:
            merged = POST_STEPS[name].apply(merged, base, models, parameters)
        return merged.reshape(-1).to(output.dtype)

    def check_inputs(self, output: Output, span: tuple[int, int]) -> None:
        """As the method has it."""
        self.inner.check_inputs(output, span)

    def _steps_apply(self, output: Output) -> bool:
        return output.merged and len(output.shape) == 2


def with_post_steps(merge: Merge, made: ByMethod) -> ByMethod | ByPostSteps:
    """The producer of a segment with the steps that the recipe names, if any."""
    if not merge.recipe.post:
        return made
    steps = [
        (name, {k: one.default for k, one in POST_STEPS[name].parameters.items()} | (given or {}))
        for name, given in merge.recipe.post.items()
    ]
    base = made.segment.base or made.segment.layout
    if base.reference != merge.recipe.base_model:
        raise UsageError(f"post: {made.segment.part.place} has another base than base_model")
    return ByPostSteps(made, base, steps)
