"""Which elements of a task vector are kept: the largest, the middle, or some at random."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from atlas_cli.errors import UsageError
from atlas_cli.merge_methods.order_statistics import (
    Cut,
    at_least,
    below,
    bits_of,
    find_cuts,
    largest,
    magnitudes,
    negative_,
)
from atlas_cli.merge_methods.tiling import Tile, Tiles, all_pieces, rounded, sum_over
from atlas_cli.registry import late

if TYPE_CHECKING:
    import numpy as np
    import torch

    from atlas_cli.merge_methods.method import Values
    from atlas_cli.native import kernels
else:
    np, torch, kernels = late("numpy"), late("torch"), late("atlas_cli.native.kernels")

NOTHING, EVERYTHING = object(), object()  # statistics of a model that loses all, or none
_TINY = 1e-7  # a norm below this is not matched


@dataclass(frozen=True)
class Sparsifier:
    """`statistics` finds, for every model, what `keep_` needs to zero other elements in place."""

    statistics: Callable[[Tiles, Values], list[Any]]
    keep_: Callable[[torch.Tensor, Tile, Any], None]
    by_chance: bool = False


def delta_of(tile: Tile, model: int) -> torch.Tensor:
    """theta_t - theta_0, in the dtype of the tensors."""
    assert tile.base is not None
    return tile.models[model] - tile.base


def sparsify_(sparsifier: Sparsifier, delta: torch.Tensor, tile: Tile, found: Any) -> None:
    """delta * mask, in place."""
    if found is NOTHING:
        delta.zero_()
    elif found is not EVERYTHING:
        sparsifier.keep_(delta, tile, found)


def scales_by_norm(tiles: Tiles, sparsifier: Sparsifier, found: list[Any]) -> list[float]:
    """sum |delta| / sum |delta * mask| of each model, rounded as the tensors are."""
    some = [i for i, kept in enumerate(found) if kept is not EVERYTHING and kept is not NOTHING]
    if not some:
        return [1.0] * len(found)

    def sizes(tile: Tile) -> Iterator[torch.Tensor]:
        for model in some:
            delta = delta_of(tile, model)
            yield delta.abs()
            sparsify_(sparsifier, delta, tile, found[model])
            yield delta.abs_()

    dtype = next(tiles()).dtype
    if sparsifier.by_chance and dtype == torch.float16:
        dtype = torch.float32
    before, after = rounded(sum_over(tiles, sizes), dtype).view(-1, 2).unbind(1)
    matched = (before >= _TINY) & (after >= _TINY)
    scales = torch.where(matched, before / after, torch.ones_like(after)).tolist()
    return [scales[some.index(i)] if i in some else 1.0 for i in range(len(found))]


def scales_by_density(values: Values, found: list[Any]) -> list[float]:
    """1 / density of each model, as DARE was published."""
    kept = [
        found[i] is not EVERYTHING and own["density"] > 0 for i, own in enumerate(values.models)
    ]
    return [1 / own["density"] if k else 1.0 for k, own in zip(kept, values.models, strict=True)]


Ranks = tuple[int, int]


@dataclass(frozen=True)
class Band:
    """Keep what lies between two cuts; `high` None has no end."""

    low: Cut
    high: Cut | None


def top_ranks(size: int, density: float, rounding: str = "floor") -> Ranks:
    """[n - k, n) with k = density * n rounded: `floor` (at least 1), `ceil`, or `above` (+ 1)."""
    exact = density * size
    count = {"ceil": math.ceil(exact), "above": int(exact) + 1}.get(rounding, int(exact))
    return size - min(max(1, count), size), size


def middle_ranks(size: int, density: float, gamma: float) -> Ranks:
    """[b, b + k) with k = floor(density n), b = max(0, n - k - floor(gamma n))."""
    count = int(density * size)
    first = max(0, size - count - int(gamma * size))
    return first, first + count


def _top(size: int, own: Mapping[str, Any], values: Values) -> Ranks:
    return top_ranks(size, own["density"], values.merge.get("rounding", "floor"))


def _middle(size: int, own: Mapping[str, Any], values: Values) -> Ranks:
    return middle_ranks(size, own["density"], own["gamma"])


def find_bands(
    tiles: Tiles, values: Values, ranks_of: Callable[[int, Mapping[str, Any], Values], Ranks]
) -> list[Any]:
    """The band of every model, from the k-th largest magnitudes of the whole tensor."""
    size = math.prod(next(tiles()).shape)
    found: list[Any] = []
    ranks: list[list[int]] = []
    for own in values.models:
        first, last = ranks_of(size, own, values) if 0 < own["density"] < 1 else (0, 0)
        found.append(EVERYTHING if own["density"] >= 1 else NOTHING)
        ranks.append([rank for rank in (first, last) if rank < size] if first < last else [])

    def passes() -> Iterator[tuple[int, Callable[[int], torch.Tensor]]]:
        for piece in all_pieces(tiles):
            yield piece.start, lambda model, piece=piece: delta_of(piece, model)  # type: ignore[misc]

    cuts = find_cuts(passes, ranks)
    return [
        _band(cut) if cut else all_or_none for cut, all_or_none in zip(cuts, found, strict=True)
    ]


def _band(cuts: list[Cut]) -> Band:
    return Band(cuts[0], cuts[1] if len(cuts) > 1 else None)


def band_mask(values: torch.Tensor, start: int, band: Band) -> torch.Tensor:
    """-1 where low <= (|value|, position) < high, else 0; the first value is at `start`."""
    sizes = magnitudes(values)
    flat, ends = sizes.view(-1), {0, sizes.numel()}
    for cut in (band.low, band.high):
        if cut is not None and 0 < cut.position - start < len(flat):
            ends.add(cut.position - start)
    for first, last in pairwise(sorted(ends)):
        _mask_(flat[first:last], start + first, band)
    return sizes


def _mask_(sizes: torch.Tensor, start: int, band: Band) -> None:
    """As band_mask, in place, for elements all on one side of the positions of the cuts."""
    mask = at_least(sizes, band.low.value + (start < band.low.position))
    if band.high is not None:
        mask &= below(sizes, band.high.value + (start < band.high.position))
    sizes.copy_(mask)


def keep_band_(delta: torch.Tensor, tile: Tile, band: Band) -> None:
    """delta * [low <= (|delta|, position) < high], in place."""
    bits_of(delta).bitwise_and_(band_mask(delta, tile.start, band))


LARGEST = Sparsifier(lambda tiles, values: find_bands(tiles, values, _top), keep_band_)
MIDDLE = Sparsifier(lambda tiles, values: find_bands(tiles, values, _middle), keep_band_)


LEVELS = 1 << 15  # a draw has 15 bits, and one more that is independent of them
_DRAWS = 4  # in a word of the generator


@dataclass(frozen=True)
class Dice:
    """What the random numbers of one tensor of one model depend on."""

    seed: int
    name: str
    model: int

    def words(self, start: int, count: int) -> np.ndarray:
        """`count` words of 64 random bits, from the word `start` of an endless row on."""
        text = f"{self.seed}/{self.model}/{self.name}"
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        generator = np.random.PCG64(int.from_bytes(digest, "little"))
        found: np.ndarray = generator.advance(start).random_raw(count)
        return found.astype("<u8", copy=False)


def draw(dice: Dice, start: int, count: int) -> torch.Tensor:
    """16 random bits for each of `count` elements from position `start` on, as int16."""
    word, skipped = divmod(start + _DRAWS, _DRAWS)
    words = dice.words(word, -(-(skipped + count) // _DRAWS))
    return torch.from_numpy(words.view(np.int16))[skipped : skipped + count]


def offset(dice: Dice) -> float:
    """A number in [0, 1) for the whole tensor: the first word, which no element has.

    A draw r of 15 bits stands for u = (r + offset) / LEVELS. The offset makes the probability of
    u < p exactly p for every element, whatever p is.
    """
    return int(dice.words(0, 1)[0] >> np.uint64(11)) / (1 << 53)


@dataclass(frozen=True)
class Chance:
    """Keep an element with a probability between `low` (the smallest of its row) and `high`."""

    dice: Dice
    offset: float
    low: float
    high: float
    row: torch.Tensor | None = None  # the sorted magnitudes of a vector, which is one row


def equal_chances(tiles: Tiles, values: Values) -> list[Any]:
    """The same probability for every element: the density, in the dtype of the tensors."""
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


def chances_by_rank(tiles: Tiles, values: Values) -> list[Any]:
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


AT_RANDOM = Sparsifier(equal_chances, keep_by_chance_, by_chance=True)
BY_RANK = Sparsifier(chances_by_rank, keep_by_rank_, by_chance=True)
