"""Task arithmetic and its family: sparsify each task vector, elect signs, add up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from atlas_cli.merge_methods.election import Rules, elected_signs, merge_elected, weigh_
from atlas_cli.merge_methods.method import Parameter, Values, merge_method, one_of
from atlas_cli.merge_methods.sparsify import (
    AT_RANDOM,
    BY_RANK,
    LARGEST,
    MIDDLE,
    Sparsifier,
    delta_of,
    scales_by_density,
    scales_by_norm,
    sparsify_,
)
from atlas_cli.merge_methods.tiling import Tile, Tiles, add_up, all_pieces, sum_of, weights_of
from atlas_cli.native.operands import Sum
from atlas_cli.registry import late

if TYPE_CHECKING:
    import torch

    from atlas_cli.native import kernels
else:
    torch, kernels = late("torch"), late("atlas_cli.native.kernels")

_TINY = 1e-8  # a sum of weights that nothing is divided by


@dataclass(frozen=True)
class Kept:
    """Statistics of a tensor: which elements of each model are kept, and the sign of a zero sum."""

    kept: Sequence[Any]
    scales: Sequence[float]
    zero_sign: int = 1


@dataclass(frozen=True)
class Family:
    """theta_0 + lambda * sum_t w_t S(theta_t - theta_0).

    S is the sparsifier; with `elects`, only models whose sign is the elected one are added up.
    """

    sparsifier: Sparsifier
    elects: bool

    def statistics(self, tiles: Tiles, values: Values) -> Kept:
        """The cuts or chances of every model, what it is rescaled by, the majority of signs."""
        kept = self.sparsifier.statistics(tiles, values)
        scales = [1.0] * len(values.models)
        if values.merge["rescale"] and values.merge.get("rescale_by") == "density":
            scales = scales_by_density(values, kept)
        elif values.merge["rescale"]:
            scales = scales_by_norm(tiles, self.sparsifier, kept)
        found = Kept(kept, scales)
        if self.elects and values.merge.get("zero_sign") == "majority":
            return Kept(kept, scales, self._majority(tiles, values, found))
        return found

    def apply(self, tile: Tile, values: Values, found: Kept) -> torch.Tensor:
        """theta_0 + lambda * (sum_t w_t d_t) / (sum_t w_t), in the dtype of the tensors.

        Sums over models are kept in float32. Only where `normalize` is set is there a divisor.
        """
        assert tile.base is not None
        deltas = self._deltas(tile, found)
        weights = weights_of(values, tile.base.dtype)
        if self.elects:
            rules, normalize = _rules(values, found), values.merge["normalize"]
            merged = merge_elected(list(deltas), weights, rules, normalize)
            return _add_to(tile.base, merged, 1.0, values)
        merged = add_up(weigh_(deltas, weights))
        return _add_to(tile.base, merged, _divisor(weights, tile.base.dtype, values), values)

    def _deltas(self, tile: Tile, found: Kept) -> Iterator[torch.Tensor]:
        """S(theta_t - theta_0) of every model, one after another."""
        for model, (kept, scale) in enumerate(zip(found.kept, found.scales, strict=True)):
            delta = delta_of(tile, model)
            sparsify_(self.sparsifier, delta, tile, kept)
            yield delta if scale == 1 else delta.mul_(scale)

    def _majority(self, tiles: Tiles, values: Values, found: Kept) -> int:
        """The sign that most sums over models have; negative if there are as many of both."""
        balance = 0
        for piece in all_pieces(tiles):
            deltas = list(self._deltas(piece, found))
            if values.merge.get("weigh", "before") == "before":
                deltas = list(weigh_(deltas, weights_of(values, deltas[0].dtype)))
            rules = _rules(values, found)
            up = elected_signs(deltas, rules).count_nonzero()
            down = elected_signs([-delta for delta in deltas], rules).count_nonzero()
            balance += int(down) - int(up)
        return 1 if balance > 0 else -1


def task_arithmetic(tile: Tile, values: Values, found: Any) -> torch.Tensor:
    """theta_0 + lambda * sum_t w_t tau_t; divided by sum_t w_t with `normalize`."""
    total = arithmetic_sum(values, tile.dtype)
    if (merged := kernels.add(tile.inputs, total)) is not None:
        return merged
    assert tile.base is not None
    deltas = (delta_of(tile, model) for model in range(len(total.weights)))
    return _add_to(tile.base, add_up(weigh_(deltas, total.weights)), total.divisor, values)


def arithmetic_sum(values: Values, dtype: torch.dtype) -> Sum:
    """The sum that `task_arithmetic` is."""
    weights = weights_of(values, dtype)
    return Sum(weights, _divisor(weights, dtype, values), values.merge["lambda"])


def _add_to(
    base: torch.Tensor, merged: torch.Tensor, divisor: float, values: Values
) -> torch.Tensor:
    """base + lambda * merged / divisor, in place of `merged`."""
    if divisor != 1:
        merged /= divisor
    if values.merge["lambda"] != 1:
        merged *= values.merge["lambda"]
    return torch.add(base, merged, out=merged)


def _divisor(weights: tuple[float, ...], dtype: torch.dtype, values: Values) -> float:
    """sum_t w_t with `normalize`, but one if that is next to nothing."""
    divisor = sum_of(weights, dtype) if values.merge["normalize"] else 1.0
    return 1.0 if abs(divisor) < _TINY else divisor


def _rules(values: Values, found: Kept) -> Rules:
    merge = values.merge
    return Rules(
        merge.get("elect", "sum"),
        found.zero_sign,
        merge.get("weigh", "before"),
        merge.get("divisor", "weight"),
    )


# The methods ----------------------------------------------------------------------------------

_SCOPE = {"scope": one_of("tensor", "model")}
_ROUNDING = {"rounding": one_of("floor", "ceil", "above")}
_RESCALE_BY = {"rescale_by": one_of("norm", "density")}
_GAMMA = {"gamma": Parameter(0.01, 0.0, 1.0)}
_EPSILON = {"epsilon": Parameter(0.15, 0.0, 1.0)}
_ELECTION = {
    "elect": one_of("sum", "count"),
    "zero_sign": one_of("positive", "majority"),
    "weigh": one_of("before", "after"),
    "divisor": one_of("weight", "count"),
}
Parameters = Mapping[str, Parameter]


def _of_model(weight: float, density: float | None, *more: Parameters) -> Parameters:
    """Parameters of a model. The numbers are the usual ones; the defaults are mergekit's."""
    both = {"weight": Parameter(usual=weight), "density": Parameter(1.0, 0.0, 1.0, usual=density)}
    return {key: one for table in (both, *more) for key, one in table.items()}


def _of_merge(*more: Parameters, normalize: bool = False, rescale: bool = False) -> Parameters:
    """Parameters of the merge, those of the family first."""
    shared = {
        "normalize": Parameter(normalize),
        "rescale": Parameter(rescale),
        "lambda": Parameter(1.0),
        "int8_mask": Parameter(False),  # how mergekit stores its masks; changes no number
    }
    return {key: one for table in (shared, *more) for key, one in table.items()}


def _register(
    name: str, family: Family, per_model: Parameters, per_merge: Parameters, formula: str
) -> None:
    merge_method(
        name,
        per_model=per_model,
        per_merge=per_merge,
        statistics=family.statistics,
        formula=formula,
    )(family.apply)


merge_method(
    "task_arithmetic",
    per_model=_of_model(0.3, None),
    per_merge=_of_merge(),
    spreads=True,
)(task_arithmetic)
_register(
    "ties",
    Family(LARGEST, elects=True),
    _of_model(1.0, 0.2),
    _of_merge(_SCOPE, _ROUNDING, _ELECTION, normalize=True),
    "the largest elements of each task vector, averaged over those with the elected sign",
)
_register(
    "dare_linear",
    Family(AT_RANDOM, elects=False),
    _of_model(0.3, 0.1),
    _of_merge(_RESCALE_BY, rescale=True),
    "elements of each task vector kept at random and rescaled, added up",
)
_register(
    "dare_ties",
    Family(AT_RANDOM, elects=True),
    _of_model(0.3, 0.1),
    _of_merge(_RESCALE_BY, _ELECTION, rescale=True),
    "as `dare_linear`, added up over those with the elected sign",
)
_register(
    "della",
    Family(BY_RANK, elects=True),
    _of_model(1.0, 0.2, _EPSILON),
    _of_merge(_RESCALE_BY, _ELECTION, normalize=True, rescale=True),
    "as `della_linear`, averaged over those with the elected sign",
)
_register(
    "della_linear",
    Family(BY_RANK, elects=False),
    _of_model(0.3, 0.2, _EPSILON),
    _of_merge(_RESCALE_BY, rescale=True),
    "elements of each task vector kept at random, large ones more often, rescaled, added up",
)
_register(
    "breadcrumbs",
    Family(MIDDLE, elects=False),
    _of_model(0.3, 0.85, _GAMMA),
    _of_merge(_SCOPE),
    "each task vector without its largest and its smallest elements, added up",
)
_register(
    "breadcrumbs_ties",
    Family(MIDDLE, elects=True),
    _of_model(0.3, 0.85, _GAMMA),
    _of_merge(_SCOPE, _ELECTION),
    "as `breadcrumbs`, added up over those with the elected sign",
)
