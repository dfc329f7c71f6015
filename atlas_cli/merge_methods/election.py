"""Sign election: where models disagree, only those with the winning sign are added up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atlas_cli.merge_methods.order_statistics import bits_of, negative_, nonzero, where_
from atlas_cli.merge_methods.tiling import add_up

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Rules:
    """Choices that other libraries make differently; the defaults are mergekit's."""

    by: str = "sum"  # elect by the sum of the values, or by the `count` of signs
    zero_sign: int = 1  # the sign that a sum of zero has
    weigh: str = "before"  # apply weights before or `after` the election
    divisor: str = "weight"  # divide by the weights of the elected models, or by their `count`
    least: float | None = None  # the smallest divisor


def elected_signs(deltas: list[torch.Tensor], rules: Rules) -> torch.Tensor:
    """-1 where the sum over models is negative, else 0; as integers of the size of the values."""
    votes = [delta.sign() for delta in deltas] if rules.by == "count" else deltas
    sums = add_up(votes)
    zeros = nonzero(sums).bitwise_not_() if rules.zero_sign < 0 else None
    signs = negative_(bits_of(sums))
    return signs if zeros is None else signs.bitwise_or_(zeros)


def silence_(delta: torch.Tensor, signs: torch.Tensor) -> None:
    """delta * [sign(delta) = sign], in place."""
    bits = bits_of(delta)
    against = negative_(bits ^ signs)
    bits &= against.bitwise_not_()


def merge_elected(
    deltas: list[torch.Tensor], weights: Sequence[float], rules: Rules, normalize: bool
) -> torch.Tensor:
    """sum of w_t d_t / sum of w_t over the models t whose sign is the elected one.

    Overwrites the deltas. Nothing is divided without `normalize`.
    """
    if rules.weigh == "before":
        deltas = list(weigh_(deltas, weights))
    signs = elected_signs(deltas, rules)
    for delta in deltas:
        silence_(delta, signs)
    shares = weights if rules.divisor == "weight" else [1.0] * len(weights)
    divisor = _shares(deltas, shares) if normalize else None
    merged = add_up(weigh_(deltas, weights) if rules.weigh == "after" else deltas)
    if divisor is None:
        return merged
    return merged.div_(divisor if rules.least is None else divisor.clamp_(min=rules.least))


def weigh_(deltas: Iterable[torch.Tensor], weights: Sequence[float]) -> Iterator[torch.Tensor]:
    """w_t d_t, in place, one after another."""
    for delta, weight in zip(deltas, weights, strict=True):
        yield delta if weight == 1 else delta.mul_(weight)


def _shares(deltas: list[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """sum of w_t over the models t that are not zero (a zero has no sign); one if that is zero."""
    dtype = deltas[0].dtype
    terms = [where_(nonzero(d), w, dtype) for d, w in zip(deltas, weights, strict=True)]
    shares = add_up(terms)
    bits = bits_of(shares)
    bits |= bits_of(where_(nonzero(shares).bitwise_not_(), 1.0, dtype))
    return shares
