"""Floating point numbers as integers: magnitudes in order, and masks without branches.

The bits of |x| grow with |x|. A mask is -1 (all ones) where something holds and 0 elsewhere, so
that `bits & mask` keeps a number or makes it zero; these are the cheapest operations there are.
"""

from __future__ import annotations

import torch

_INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(values: torch.Tensor) -> torch.Tensor:
    """A view of floating point numbers as integers of the same size."""
    return values.view(_INTEGER[values.element_size()])


def largest(bits: torch.Tensor) -> int:
    """The greatest integer, which is also every bit but the sign."""
    return torch.iinfo(bits.dtype).max


def magnitudes(values: torch.Tensor) -> torch.Tensor:
    """The bits of |values|, in order of magnitude."""
    bits = bits_of(values)
    return bits & largest(bits)


def negative_(bits: torch.Tensor) -> torch.Tensor:
    """-1 where bits < 0, else 0; in place."""
    return bits.bitwise_right_shift_(8 * bits.element_size() - 1)


def nonzero(values: torch.Tensor) -> torch.Tensor:
    """-1 where a value is not zero, else 0."""
    return negative_(magnitudes(values).neg_())


def at_least(magnitude: torch.Tensor, least: int) -> torch.Tensor:
    """-1 where magnitude >= least, else 0."""
    return negative_(torch.rsub(magnitude, least - 1))


def below(magnitude: torch.Tensor, limit: int) -> torch.Tensor:
    """-1 where magnitude < limit, else 0."""
    return negative_(magnitude - limit)


def where_(mask: torch.Tensor, value: float, dtype: torch.dtype) -> torch.Tensor:
    """`value` where the mask is -1, zero elsewhere; in place of the mask."""
    bits = bits_of(torch.tensor(value, dtype=dtype))
    return mask.bitwise_and_(int(bits)).view(dtype)
