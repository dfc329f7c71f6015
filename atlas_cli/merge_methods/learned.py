"""Learned coefficients: the method whose inputs are task vectors and a table, not models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atlas_cli.merge_methods.method import Values, merge_method

if TYPE_CHECKING:
    import torch

    from atlas_cli.merge_methods.tiling import Tile


@merge_method("atlas", models=(0, 0))
def atlas(tile: Tile, values: Values, statistics: Any) -> torch.Tensor:
    """theta_0 + sum_t c_t tau_t, with a learned coefficient for every vector and block."""
    raise NotImplementedError("merging.learned composes the vectors; there are no tiles of models")
