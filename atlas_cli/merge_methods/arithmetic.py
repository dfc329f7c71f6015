"""Task arithmetic and its family: sparsify each task vector, elect signs, add up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from atlas_cli.merge_methods.election import Rules, elected_signs, merge_elected, weigh_
from atlas_cli.merge_methods.method import Method, Parameter, Tile, Tiles, Values
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
from atlas_cli.merge_methods.tiling import add_up, all_pieces, by_pieces, sum_of, weights_of
from atlas_cli.native import kernels
from atlas_cli.native.operands import Sum

_TINY = 1e-8  # a sum of weights that nothing is divided by


@dataclass(frozen=True)
class Found:
    """What the survey of a tensor keeps: one entry per model, and the sign of a zero sum."""

    kept: Sequence[Any]
    scales: Sequence[float]
    zero_sign: int = 1


@dataclass(frozen=True)
class Family:
    """theta_0 + lambda * sum_t w_t S(theta_t - theta_0): how S sparsifies, and who is heard."""

    sparsifier: Sparsifier
    elects: bool

    def statistics(self, tiles: Tiles, values: Values) -> Found:
        """The cuts or chances of every model, what it is rescaled by, the majority of signs."""
        kept = self.sparsifier.statistics(tiles, values)
        scales = [1.0] * len(values.models)
        if values.merge["rescale"] and values.merge.get("rescale_by") == "density":
            scales = scales_by_density(values, kept)
        elif values.merge["rescale"]:
            scales = scales_by_norm(tiles, self.sparsifier, kept)
        found = Found(kept, scales)
        if self.elects and values.merge.get("zero_sign") == "majority":
            return Found(kept, scales, self._majority(tiles, values, found))
        return found

    def apply(self, tile: Tile, values: Values, found: Found) -> torch.Tensor:
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

    def _deltas(self, tile: Tile, found: Found) -> Iterator[torch.Tensor]:
        """S(theta_t - theta_0) of every model, one after another."""
        for model, (kept, scale) in enumerate(zip(found.kept, found.scales, strict=True)):
            delta = delta_of(tile, model)
            sparsify_(self.sparsifier, delta, tile, kept)
            yield delta if scale == 1 else delta.mul_(scale)

    def _majority(self, tiles: Tiles, values: Values, found: Found) -> int:
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
    """theta_0 + lambda * (sum_t w_t (theta_t - theta_0)) / (sum_t w_t), as Family.apply has it."""
    total = arithmetic_sum(values, found, tile.dtype)
    if (merged := kernels.add(tile.inputs, total)) is not None:
        return merged
    assert tile.base is not None
    deltas = (delta_of(tile, model) for model in range(len(total.weights)))
    return _add_to(tile.base, add_up(weigh_(deltas, total.weights)), total.divisor, values)


def arithmetic_sum(values: Values, found: Any, dtype: torch.dtype) -> Sum:
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


def _rules(values: Values, found: Found) -> Rules:
    merge = values.merge
    return Rules(
        merge.get("elect", "sum"),
        found.zero_sign,
        merge.get("weigh", "before"),
        merge.get("divisor", "weight"),
    )


_ELECTION = (
    Parameter("elect", "sum", choices=("sum", "count")),
    Parameter("zero_sign", "positive", choices=("positive", "majority")),
    Parameter("weigh", "before", choices=("before", "after")),
    Parameter("divisor", "weight", choices=("weight", "count")),
)
_SCOPE = Parameter("scope", "tensor", choices=("tensor", "model"))
_ROUNDING = Parameter("rounding", "floor", choices=("floor", "ceil", "above"))
_RESCALE_BY = Parameter("rescale_by", "norm", choices=("norm", "density"))
_GAMMA = Parameter("gamma", 0.01, 0.0, 1.0)
_EPSILON = Parameter("epsilon", 0.15, 0.0, 1.0)


def _method(
    name: str,
    family: Family | None,
    normalize: bool = False,
    rescale: bool = False,
    own: Sequence[Parameter] = (),
    more: Sequence[Parameter] = (),
) -> Method:
    """A method of a family, or task arithmetic, with the defaults that mergekit gives it."""
    per_merge = [
        Parameter("normalize", normalize),
        Parameter("rescale", rescale),
        Parameter("lambda", 1.0),
        Parameter("int8_mask", False),  # how mergekit stores its masks; changes no number
        *more,
        *(_ELECTION if family and family.elects else ()),
    ]
    per_model = (Parameter("weight", None), Parameter("density", 1.0, 0.0, 1.0), *own)
    method = Method(
        name, by_pieces(task_arithmetic), per_model=per_model, per_merge=per_merge, needs_base=True
    )
    if family is None:
        return replace(method, total=arithmetic_sum, spreads=True)
    return replace(method, apply=by_pieces(family.apply), statistics=family.statistics)


METHODS = (
    _method("task_arithmetic", None),
    _method("ties", Family(LARGEST, True), normalize=True, more=(_SCOPE, _ROUNDING)),
    _method("dare_linear", Family(AT_RANDOM, False), rescale=True, more=(_RESCALE_BY,)),
    _method("dare_ties", Family(AT_RANDOM, True), rescale=True, more=(_RESCALE_BY,)),
    _method("della", Family(BY_RANK, True), True, True, (_EPSILON,), (_RESCALE_BY,)),
    _method("della_linear", Family(BY_RANK, False), False, True, (_EPSILON,), (_RESCALE_BY,)),
    _method("breadcrumbs", Family(MIDDLE, False), own=(_GAMMA,), more=(_SCOPE,)),
    _method("breadcrumbs_ties", Family(MIDDLE, True), own=(_GAMMA,), more=(_SCOPE,)),
)
