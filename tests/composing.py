"""All blocks of a composition under autograd: `compose_block` forwards, its gradient backwards."""

from __future__ import annotations

from typing import Any

import torch

from atlas_cli.core.compose import Composition, Spread, coefficient_gradient, compose_block


def compose(
    composition: Composition, coefficients: torch.Tensor, spread: Spread = map
) -> dict[str, torch.Tensor]:
    """The composed tensors by name, differentiable in `coefficients`, (vectors, columns)."""
    composed = _Compose.apply(coefficients, composition, spread)
    return dict(zip(composition.stacks, composed, strict=True))


class _Compose(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, coefficients: torch.Tensor, composition: Composition, spread: Spread
    ) -> tuple[torch.Tensor, ...]:
        ctx.composition, ctx.spread, ctx.like = composition, spread, coefficients
        values = coefficients.detach().float()
        return tuple(spread(lambda n: compose_block(composition, n, values), composition.stacks))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor, None, None]:
        given = dict(zip(ctx.composition.stacks, gradients, strict=True))
        found = {name: gradient for name, gradient in given.items() if gradient is not None}
        table = coefficient_gradient(ctx.composition, found, ctx.spread)
        return table.to(ctx.like.dtype), None, None
