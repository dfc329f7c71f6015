"""Descent takes the steps of torch's own AdamW and cosine, and can stop between any two."""

from __future__ import annotations

import math

import pytest
import torch

from atlas_cli.core.losses import penalty
from atlas_cli.core.optimizers import Descender, Descent

STEPS = 20
TARGET = torch.tensor([[1.0, -2.0, 0.5], [30.0, 0.0, -0.25]])  # far enough that clipping acts
START = torch.zeros_like(TARGET)


def slope(coefficients: torch.Tensor) -> torch.Tensor:
    """The gradient of |coefficients - TARGET|^2."""
    return 2 * (coefficients.detach() - TARGET)


def take_steps(descender: Descender, count: int) -> list[torch.Tensor]:
    """Steps on the quadratic; a scaled descender is given the gradient of the scaled loss."""
    found = []
    for _ in range(count):
        scale = descender.scaler.scale(torch.ones(()))
        descender.step(slope(descender.coefficients) * scale)
        found.append(descender.coefficients.detach().clone())
    return found


def with_torch(descent: Descent, count: int) -> list[torch.Tensor]:
    """The same, written out with the optimizer and the schedule of torch."""
    table = START.clone().requires_grad_()
    optimizer = torch.optim.AdamW([table], lr=descent.rate, weight_decay=descent.decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    found = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = (table - TARGET).square().sum()
        if descent.penalty_weight:
            loss = loss + descent.penalty_weight * penalty(table, descent.penalty_order)
        loss.backward()
        torch.nn.utils.clip_grad_norm_([table], descent.clip)
        optimizer.step()
        schedule.step()
        found.append(table.detach().clone())
    return found


@pytest.mark.parametrize(
    "descent",
    [
        Descent(),
        Descent(rate=0.5, decay=0.0),
        Descent(clip=math.inf),
        Descent(penalty_order=1, penalty_weight=0.3),
        Descent(penalty_order=2, penalty_weight=0.3),
    ],
    ids=["paper", "no decay", "no clipping", "l1", "l2"],
)
def test_steps_are_those_of_adamw_with_a_cosine_bit_for_bit(descent: Descent):
    found = take_steps(Descender(START, STEPS, descent), STEPS)
    wanted = with_torch(descent, STEPS)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_descent_approaches_what_minimises_the_loss():
    near = torch.tensor([[0.5, -0.25]])
    descender = Descender(torch.zeros(1, 2), 200, Descent(decay=0.0))
    for _ in range(200):
        descender.step(2 * (descender.coefficients.detach() - near))
    torch.testing.assert_close(descender.coefficients.detach(), near, atol=1e-3, rtol=0)


def test_the_rate_falls_along_half_a_cosine_to_zero():
    descender, rates = Descender(START, 4, Descent(rate=0.8)), []
    for _ in range(4):
        rates.append(descender.rate)
        descender.step(slope(descender.coefficients))
    half = math.sqrt(0.5)
    assert rates == pytest.approx([0.8, 0.4 * (1 + half), 0.4, 0.4 * (1 - half)])
    assert descender.rate == pytest.approx(0)


def test_the_first_step_has_the_length_of_the_rate_whatever_the_gradient():
    for size in (1e-3, 1.0, 1e6):
        descender = Descender(torch.zeros(1, 2), STEPS, Descent())
        descender.step(torch.tensor([[size, -size]]))
        wanted = torch.tensor([[-0.1, 0.1]])
        torch.testing.assert_close(descender.coefficients.detach(), wanted, rtol=1e-4, atol=0)


def test_the_start_is_left_alone():
    start = torch.ones(2, 2)
    Descender(start, STEPS, Descent()).step(torch.ones(2, 2))
    assert torch.equal(start, torch.ones(2, 2))


def test_a_penalty_alone_leaves_zero_where_it_is():
    for order in (1, 2):
        descent = Descent(penalty_order=order, penalty_weight=1.0)
        descender = Descender(torch.zeros(2, 3), STEPS, descent)
        descender.step(torch.zeros(2, 3))
        assert torch.equal(descender.coefficients.detach(), torch.zeros(2, 3))


# A scaled loss --------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [1, 2])
def test_clipping_and_penalty_act_after_unscaling(order: int):
    descent = Descent(penalty_order=order, penalty_weight=0.3)
    plain = take_steps(Descender(START, STEPS, descent), STEPS)
    scaled = take_steps(Descender(START, STEPS, descent, scaled=True), STEPS)
    assert all(torch.equal(a, b) for a, b in zip(plain, scaled, strict=True))


def test_a_gradient_that_overflowed_moves_nothing_and_lowers_the_scale():
    descender = Descender(START, STEPS, Descent(), scaled=True)
    before = descender.scaler.scale(torch.ones(())).item()
    descender.step(torch.full_like(TARGET, math.inf))
    assert torch.equal(descender.coefficients.detach(), START)
    assert descender.scaler.get_scale() == before / 2
    assert descender.number == 1


# Stopping and going on ------------------------------------------------------------------------


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("stop", [0, 1, 7, 19])
def test_going_on_from_a_state_gives_the_same_bits(stop: int, scaled: bool):
    descent = Descent(penalty_weight=0.1)
    whole = take_steps(Descender(START, STEPS, descent, scaled=scaled), STEPS)
    first = Descender(START, STEPS, descent, scaled=scaled)
    take_steps(first, stop)
    state = first.state()
    take_steps(first, 1)  # a state is a copy: what comes after does not change it
    second = Descender(START, STEPS, descent, scaled=scaled)
    second.restore(state)
    assert second.number == stop
    rest = take_steps(second, STEPS - stop)
    assert all(torch.equal(a, b) for a, b in zip(whole[stop:], rest, strict=True))


def test_one_goes_on_also_after_an_overflow_in_the_very_first_step():
    first = Descender(START, STEPS, Descent(), scaled=True)
    first.scaler.scale(torch.ones(()))
    first.step(torch.full_like(TARGET, math.inf))
    second = Descender(START, STEPS, Descent(), scaled=True)
    second.restore(first.state())
    wanted, found = take_steps(first, 5), take_steps(second, 5)
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
    assert second.scaler.get_scale() == first.scaler.get_scale()
