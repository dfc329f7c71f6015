"""Descent takes the steps of torch's own AdamW and cosine, and can stop between any two."""

from __future__ import annotations

import math

import pytest
import torch

from atlas_cli.core.losses import penalty
from atlas_cli.core.optimizers import CoefficientOptimizer, OptimizerConfig

STEPS = 20
TARGET = torch.tensor([[1.0, -2.0, 0.5], [30.0, 0.0, -0.25]])  # far enough that clipping acts
START = torch.zeros_like(TARGET)


def slope(coefficients: torch.Tensor) -> torch.Tensor:
    """The gradient of |coefficients - TARGET|^2."""
    return 2 * (coefficients.detach() - TARGET)


def take_steps(optimizer: CoefficientOptimizer, count: int) -> list[torch.Tensor]:
    """Steps on the quadratic; a scaled descender is given the gradient of the scaled loss."""
    found = []
    for _ in range(count):
        scale = optimizer.scaler.scale(torch.ones(()))
        optimizer.step(slope(optimizer.coefficients) * scale)
        found.append(optimizer.coefficients.detach().clone())
    return found


def with_torch(optimizer_config: OptimizerConfig, count: int) -> list[torch.Tensor]:
    """The same, written out with the optimizer and the schedule of torch."""
    table = START.clone().requires_grad_()
    optimizer = torch.optim.AdamW(
        [table], lr=optimizer_config.rate, weight_decay=optimizer_config.decay
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    found = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = (table - TARGET).square().sum()
        if optimizer_config.penalty_weight:
            loss = loss + optimizer_config.penalty_weight * penalty(
                table, optimizer_config.penalty_order
            )
        loss.backward()
        torch.nn.utils.clip_grad_norm_([table], optimizer_config.clip)
        optimizer.step()
        schedule.step()
        found.append(table.detach().clone())
    return found


@pytest.mark.parametrize(
    "optimizer_config",
    [
        OptimizerConfig(),
        OptimizerConfig(rate=0.5, decay=0.0),
        OptimizerConfig(clip=math.inf),
        OptimizerConfig(penalty_order=1, penalty_weight=0.3),
        OptimizerConfig(penalty_order=2, penalty_weight=0.3),
    ],
    ids=["paper", "no decay", "no clipping", "l1", "l2"],
)
def test_steps_are_those_of_adamw_with_a_cosine_bit_for_bit(optimizer_config: OptimizerConfig):
    found = take_steps(CoefficientOptimizer(START, STEPS, optimizer_config), STEPS)
    wanted = with_torch(optimizer_config, STEPS)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_descent_approaches_what_minimises_the_loss():
    near = torch.tensor([[0.5, -0.25]])
    optimizer = CoefficientOptimizer(torch.zeros(1, 2), 200, OptimizerConfig(decay=0.0))
    for _ in range(200):
        optimizer.step(2 * (optimizer.coefficients.detach() - near))
    torch.testing.assert_close(optimizer.coefficients.detach(), near, atol=1e-3, rtol=0)


def test_the_rate_falls_along_half_a_cosine_to_zero():
    optimizer, rates = CoefficientOptimizer(START, 4, OptimizerConfig(rate=0.8)), []
    for _ in range(4):
        rates.append(optimizer.rate)
        optimizer.step(slope(optimizer.coefficients))
    half = math.sqrt(0.5)
    assert rates == pytest.approx([0.8, 0.4 * (1 + half), 0.4, 0.4 * (1 - half)])
    assert optimizer.rate == pytest.approx(0)


def test_the_first_step_has_the_length_of_the_rate_whatever_the_gradient():
    for size in (1e-3, 1.0, 1e6):
        optimizer = CoefficientOptimizer(torch.zeros(1, 2), STEPS, OptimizerConfig())
        optimizer.step(torch.tensor([[size, -size]]))
        wanted = torch.tensor([[-0.1, 0.1]])
        torch.testing.assert_close(optimizer.coefficients.detach(), wanted, rtol=1e-4, atol=0)


def test_the_start_is_left_alone():
    start = torch.ones(2, 2)
    CoefficientOptimizer(start, STEPS, OptimizerConfig()).step(torch.ones(2, 2))
    assert torch.equal(start, torch.ones(2, 2))


def test_a_penalty_alone_leaves_zero_where_it_is():
    for order in (1, 2):
        optimizer_config = OptimizerConfig(penalty_order=order, penalty_weight=1.0)
        optimizer = CoefficientOptimizer(torch.zeros(2, 3), STEPS, optimizer_config)
        optimizer.step(torch.zeros(2, 3))
        assert torch.equal(optimizer.coefficients.detach(), torch.zeros(2, 3))


# A scaled loss --------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [1, 2])
def test_clipping_and_penalty_act_after_unscaling(order: int):
    optimizer_config = OptimizerConfig(penalty_order=order, penalty_weight=0.3)
    plain = take_steps(CoefficientOptimizer(START, STEPS, optimizer_config), STEPS)
    scaled = take_steps(CoefficientOptimizer(START, STEPS, optimizer_config, scaled=True), STEPS)
    assert all(torch.equal(a, b) for a, b in zip(plain, scaled, strict=True))


def test_a_gradient_that_overflowed_moves_nothing_and_lowers_the_scale():
    optimizer = CoefficientOptimizer(START, STEPS, OptimizerConfig(), scaled=True)
    before = optimizer.scaler.scale(torch.ones(())).item()
    optimizer.step(torch.full_like(TARGET, math.inf))
    assert torch.equal(optimizer.coefficients.detach(), START)
    assert optimizer.scaler.get_scale() == before / 2
    assert optimizer.number == 1


# Stopping and going on ------------------------------------------------------------------------


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("stop", [0, 1, 7, 19])
def test_going_on_from_a_state_gives_the_same_bits(stop: int, scaled: bool):
    optimizer_config = OptimizerConfig(penalty_weight=0.1)
    whole = take_steps(CoefficientOptimizer(START, STEPS, optimizer_config, scaled=scaled), STEPS)
    first = CoefficientOptimizer(START, STEPS, optimizer_config, scaled=scaled)
    take_steps(first, stop)
    state = first.state()
    take_steps(first, 1)  # a state is a copy: what comes after does not change it
    second = CoefficientOptimizer(START, STEPS, optimizer_config, scaled=scaled)
    second.restore(state)
    assert second.number == stop
    rest = take_steps(second, STEPS - stop)
    assert all(torch.equal(a, b) for a, b in zip(whole[stop:], rest, strict=True))


def test_one_goes_on_also_after_an_overflow_in_the_very_first_step():
    first = CoefficientOptimizer(START, STEPS, OptimizerConfig(), scaled=True)
    first.scaler.scale(torch.ones(()))
    first.step(torch.full_like(TARGET, math.inf))
    second = CoefficientOptimizer(START, STEPS, OptimizerConfig(), scaled=True)
    second.restore(first.state())
    wanted, found = take_steps(first, 5), take_steps(second, 5)
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
    assert second.scaler.get_scale() == first.scaler.get_scale()


def run_away(optimizer: CoefficientOptimizer, count: int) -> list[tuple[float, int | None]]:
    """Steps on a quadratic that is no number beyond 100, as `descend` takes them."""
    found = []
    for _ in range(count):
        values = optimizer.coefficients.detach()
        loss = (values - 1).square().mean().item() if values.abs().max() < 100 else math.nan
        if not optimizer.goes_back(loss):
            optimizer.step(2 * (values - 1) / values.numel())
        found.append((loss, optimizer.back_to))
    return found


@pytest.mark.parametrize("rate", [20.0, 500.0])  # far above the first loss; no number at all
def test_a_loss_that_runs_away_is_sent_back_at_half_the_rate_until_it_falls(rate):
    config = OptimizerConfig(rate=rate, decay=0.0, schedule="constant", backs_off=True)
    start = torch.zeros(2, 3)
    whole = CoefficientOptimizer(start, 80, config)
    found = run_away(whole, 80)
    back = [number for number, (_, to) in enumerate(found) if to is not None]
    assert 1 <= len(back) < 20
    assert all(found[n + 1][0] == found[to][0] for n in back if (to := found[n][1]) is not None)
    assert whole.rate == rate / 2 ** len(back)
    assert whole.number == 80
    assert found[-1][0] < found[0][0]
    assert not whole.is_lost
    for stop in (back[0], back[0] + 1, back[-1] + 1, 70):  # it goes on as if it had not stopped
        first = CoefficientOptimizer(start, 80, config)
        run_away(first, stop)
        second = CoefficientOptimizer(start, 80, config)
        second.restore(first.state())
        assert repr(run_away(second, 80 - stop)) == repr(found[stop:])
        assert torch.equal(second.values, whole.values)


def test_a_loss_that_stays_high_is_sent_back_and_one_that_overshoots_is_not():
    config = OptimizerConfig(backs_off=True)
    for losses, wanted in (([1.0] + 8 * [3.5], 8), ([1.0, *7 * [3.5], 2.9, *7 * [3.5]], None)):
        optimizer = CoefficientOptimizer(torch.zeros(1, 1), 20, config)
        went = [optimizer.goes_back(loss) for loss in losses]
        assert went == [number == wanted for number in range(len(losses))]


def test_nothing_is_sent_back_unless_it_is_asked_for_or_where_there_is_nothing_good():
    assert not CoefficientOptimizer(START, 5, OptimizerConfig()).goes_back(math.nan)
    optimizer = CoefficientOptimizer(START, 5, OptimizerConfig(backs_off=True))
    assert not optimizer.goes_back(math.nan)  # of the first step: the caller stops
    lost = CoefficientOptimizer(torch.zeros(1, 1), 90, OptimizerConfig(1e30, backs_off=True))
    assert [to for _, to in run_away(lost, 41)].count(0) == 20
    assert lost.is_lost
