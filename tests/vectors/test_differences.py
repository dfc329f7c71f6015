"""How near base + tau comes to the fine-tuned model in float32, where every sum is rounded.

Of a base value y and a fine-tuned value x, tau = fl(x - y) is kept, so tau = x - y + e with
|e| <= ulp(tau) / 2, and fl(y + tau) = fl(x + e). Then:

1. If tau is exact (e = 0), the sum is x bit for bit. Sterbenz: this is so if y/2 <= x <= 2y.
2. If |tau| <= 2|x|, then |e| <= ulp(x), so the sum is within 1 ulp of x.
3. Otherwise |y| is within a factor of 2 of |tau|, so y + tau is exact by Sterbenz, and it is off by
   e itself, at most ulp(tau) / 2, which is at most 1 ulp of y. As y + t differs from x by as much
   as t from x - y, and tau is the float nearest to x - y, no other t comes nearer.
"""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from safetensors.torch import load_file

from atlas_cli.core.storage import Dense
from atlas_cli.io.tensors import LazyTensor
from atlas_cli.sources.locate import builtin_model
from atlas_cli.vectors.differences import minus

FLOATS = st.floats(-(2.0**125), 2.0**125, width=32)  # whose differences have neighbours
Number = float  # of float32, held exactly


def tau_of(finetuned: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    lazy = LazyTensor(tuple(finetuned.shape), finetuned.dtype, lambda: finetuned)
    block = minus(lazy)(base)
    assert isinstance(block, Dense)
    return block.values


def ulp(values: torch.Tensor) -> torch.Tensor:
    """The distance to the next larger magnitude, in float64."""
    return torch.nextafter(values.abs(), torch.tensor(torch.inf)).double() - values.abs().double()


def rebuilt(x: Number, y: Number) -> tuple[Number, Number]:
    """tau and base + tau of single numbers."""
    base = torch.tensor([y])
    tau = tau_of(torch.tensor([x]), base)
    assume(torch.isfinite(tau).all())
    return tau.item(), (base + tau).item()


def off(value: Number, x: Number) -> Fraction:
    return abs(Fraction(value) - Fraction(x))


def ulp_of(value: Number) -> Fraction:
    return Fraction(ulp(torch.tensor([value])).item())


@given(FLOATS, FLOATS)
def test_it_is_bit_for_bit_the_model_where_the_difference_is_exact(x: Number, y: Number):
    tau, found = rebuilt(x, y)
    if Fraction(tau) == Fraction(x) - Fraction(y):
        assert found == x


@given(FLOATS, st.floats(0.5, 2.0))
def test_the_difference_is_exact_from_half_to_twice_the_base(y: Number, factor: float):
    x = torch.tensor(factor * y).item()
    assume(math.isfinite(x) and abs(y) / 2 <= abs(x) <= 2 * abs(y))
    tau, found = rebuilt(x, y)
    assert Fraction(tau) == Fraction(x) - Fraction(y)
    assert found == x


@given(FLOATS, FLOATS)
def test_it_is_within_one_ulp_or_as_near_as_any_float_comes(x: Number, y: Number):
    tau, found = rebuilt(x, y)
    if abs(tau) <= 2 * abs(x):
        assert off(found, x) <= ulp_of(x)
        return
    assert off(found, x) == abs(Fraction(tau) - (Fraction(x) - Fraction(y)))
    assert off(found, x) <= min(ulp_of(tau) / 2, ulp_of(y))
    for towards in (-math.inf, math.inf):
        other = torch.nextafter(torch.tensor([tau]), torch.tensor(towards))
        if torch.isfinite(other).all():
            assert off((torch.tensor([y]) + other).item(), x) >= off(found, x)


def random_pairs(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of any sign and mantissa whose magnitudes differ by up to 2**20."""
    random = torch.Generator().manual_seed(seed)

    def draw(exponents: torch.Tensor) -> torch.Tensor:
        mantissas = 1 + torch.randint(0, 2**23, (count,), generator=random) / 2**23
        signs = 2 * torch.randint(0, 2, (count,), generator=random) - 1
        return (signs * mantissas.double() * 2.0 ** exponents.double()).float()

    exponents = torch.randint(-40, 41, (count,), generator=random)
    return draw(exponents + torch.randint(-20, 21, (count,), generator=random)), draw(exponents)


def test_a_million_pairs_of_any_size_keep_to_it():
    x, y = random_pairs(1_000_000, seed=1)
    tau = tau_of(x, y)
    away = ((y + tau).double() - x.double()).abs()
    exact = tau.double() == x.double() - y.double()
    near = tau.abs() <= 2 * x.abs()
    assert (away[exact] == 0).all()
    assert (away[near] <= ulp(x)[near]).all()
    assert (away[~near] <= ulp(tau)[~near] / 2).all()
    assert (away <= ulp(torch.maximum(x.abs(), y.abs()))).all()
    beyond = away > ulp(x)  # of numbers that have nothing to do with each other, so many shrink
    assert 0.2 < beyond.double().mean() < 0.6
    assert not (beyond & near).any()


@pytest.mark.parametrize(("size", "same", "close"), [(0.01, 0.996, 0.998), (0.03, 0.99, 0.995)])
def test_of_a_model_after_many_steps_nearly_all_is_bit_for_bit(
    size: float, same: float, close: float
):
    """Steps that move each block of the built-in model by 1 % or 3 % of its norm altogether."""
    random = torch.Generator().manual_seed(0)
    total = equal = within = 0
    for name, tensor in load_file(builtin_model("tiny") / "open_clip_model.safetensors").items():
        if not name.startswith("visual."):
            continue
        base = tensor.float()
        step = size * base.square().mean().sqrt() / 10
        tuned = base.clone()
        for _ in range(100):
            tuned += step * torch.randn(base.shape, generator=random)
        found = base + tau_of(tuned, base)
        away = (found.double() - tuned.double()).abs()
        assert (away <= ulp(torch.maximum(tuned.abs(), base.abs()))).all(), name
        total += base.numel()
        equal += int((found == tuned).sum())
        within += int((away <= ulp(tuned)).sum())
    assert total == 585_888
    assert equal / total > same
    assert within / total > close
