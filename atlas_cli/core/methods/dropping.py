"""Sparsifying by chance: every element alike, or large ones more often than small ones."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from atlas_cli.core import kernels
from atlas_cli.core.methods.bits import below, bits_of, largest, magnitudes, negative_
from atlas_cli.core.methods.chance import LEVELS, Dice, draw, offset
from atlas_cli.core.methods.method import Tile, Tiles, Values
from atlas_cli.core.methods.sparsify import EVERYTHING, NOTHING, Sparsifier, delta_of
from atlas_cli.core.methods.tiling import all_pieces
from atlas_cli.errors import UsageError


@dataclass(frozen=True)
class Chance:
    """Keep an element with a probability between `low` (the smallest of its row) and `high`."""

    dice: Dice
    offset: float
    low: float
    high: float
    row: torch.Tensor | None = None  # the sorted magnitudes of a vector, which is one row


def survey_chances(tiles: Tiles, values: Values) -> list[Any]:
    """The same probability for every element: the density, rounded as the tensors are."""
    tile = next(tiles())
    work = tile.dtype if tile.dtype == torch.bfloat16 else torch.float32
    shares = [float(torch.tensor(own["density"], dtype=work)) for own in values.models]
    return [
        EVERYTHING if values.models[model]["density"] >= 1 else _chance(tile, values, model, p, p)
        for model, p in enumerate(shares)
    ]


def _chance(tile: Tile, values: Values, model: int, low: float, high: float) -> Chance:
    dice = Dice(values.seed, tile.name, model)
    return Chance(dice, offset(dice), low, high)


def keep_by_chance_(delta: torch.Tensor, tile: Tile, chance: Chance) -> None:
    """delta * [u < p], u uniform, in place."""
    draws = draw(chance.dice, tile.start, delta.numel()).bitwise_and_(LEVELS - 1)
    share = (chance.low + chance.high) / 2
    limit = math.ceil(share * LEVELS - chance.offset)  # u < p where the draw is below it
    mask = below(draws, limit) if limit < LEVELS else draws.fill_(-1)
    bits_of(delta).view(-1).bitwise_and_(mask.to(delta.device))


def survey_ranks(tiles: Tiles, values: Values) -> list[Any]:
    """Probabilities from density - epsilon to density + epsilon; both must lie in (0, 1)."""
    first = next(tiles())
    found: list[Any] = []
    for model, own in enumerate(values.models):
        density, epsilon = own["density"], own["epsilon"]
        if not 0 < density < 1:
            found.append(EVERYTHING if density >= 1 else NOTHING)
            continue
        if not 0 < density - epsilon <= density + epsilon < 1:
            raise UsageError(f"density {density} ± epsilon {epsilon} must stay between 0 and 1")
        chance = _chance(first, values, model, density - epsilon, density + epsilon)
        if len(first.shape) < 2:
            parts = [magnitudes(delta_of(tile, model)).view(-1) for tile in all_pieces(tiles)]
            chance = replace(chance, row=_ladder(torch.cat(parts)[None]))
        found.append(chance)
    return found


def _ladder(sizes: torch.Tensor) -> torch.Tensor:
    """Every row (dimension 1) in order, between something below and something above all of it."""
    shape = list(sizes.shape)
    shape[1] += 2
    ladder = sizes.new_full(shape, largest(sizes))
    ladder[:, 0] = -1
    inner = ladder[:, 1:-1]
    if sizes.is_cpu and sizes.dtype == torch.int16 and sizes.ndim == 2 and kernels.library():
        kernels.sort_rows(sizes.contiguous(), inner)
    elif sizes.is_cpu:
        # numpy's sort is twenty times faster than torch's, and that of four bytes eight times
        # faster than that of two where the processor has no instructions for the latter.
        wide = sizes.to(torch.int32 if sizes.element_size() == 2 else sizes.dtype, copy=True)
        wide.numpy().sort(axis=1)
        inner.copy_(wide)
    else:
        inner.copy_(sizes.sort(dim=1).values)
    return ladder


def keep_by_rank_(delta: torch.Tensor, tile: Tile, chance: Chance) -> None:
    """delta * [u < low + (high - low) (rank - 1) / (n - 1)], u uniform, ranks within a row.

    The rank is not computed: u is turned into the rank it takes to be kept, and |delta| compared
    with the element of that rank. Equal elements share the mean of their probabilities: one more
    random bit says whether they count as the first or as the last of them.
    """
    sizes = magnitudes(delta)
    if sizes.ndim < 2:
        sizes = sizes.view(1, -1)
    ladder = _ladder(sizes) if chance.row is None else chance.row
    count = ladder.shape[1] - 2
    if count == 1:
        keep_by_chance_(delta, tile, chance)
        return
    draws = draw(chance.dice, tile.start, delta.numel()).view(sizes.shape).to(delta.device)
    step = (count - 1) / (chance.high - chance.low)
    rungs = (draws & (LEVELS - 1)).float()  # how many elements must be smaller, plus one
    rungs.mul_(step / LEVELS).add_((chance.offset / LEVELS - chance.low) * step + 1)
    as_first = negative_(draws)
    rung = rungs.clamp_(0, count).long().add_(as_first).add_(1)
    lack = sizes.add_(as_first).sub_(ladder.gather(1, rung))
    bits_of(delta).view(sizes.shape).bitwise_and_(negative_(lack).bitwise_not_())


AT_RANDOM = Sparsifier(survey_chances, keep_by_chance_, by_chance=True)
BY_RANK = Sparsifier(survey_ranks, keep_by_rank_, by_chance=True)
