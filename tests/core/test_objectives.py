"""Losses and penalties, with numbers that can be checked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from atlas_cli.core.objectives import cross_entropy, logits_of, penalty

# Columns of length 5 and 0 in the second norm, 7 and 0 in the first.
TABLE = torch.tensor([[3.0, 0.0], [-4.0, 0.0]])


def random_table(seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(3, 5, generator=random, dtype=torch.float64)


def gradient_of(table: torch.Tensor, order: int) -> torch.Tensor:
    table = table.clone().requires_grad_()
    return torch.autograd.grad(penalty(table, order), table)[0]


def test_logits_do_not_depend_on_the_length_of_features():
    head = torch.tensor([[10.0, 0.0], [0.0, 10.0]])
    for features in ([3.0, 4.0], [0.3, 0.4]):
        logits = logits_of(torch.tensor([features]), head)
        torch.testing.assert_close(logits, torch.tensor([[6.0, 8.0]]))


def test_cross_entropy_of_equal_logits_is_the_logarithm_of_the_classes():
    loss = cross_entropy(torch.zeros(7, 4), torch.tensor([0, 1, 2, 3, 0, 1, 2]))
    assert loss.item() == pytest.approx(math.log(4))


def test_cross_entropy_is_the_mean_over_images():
    logits = torch.tensor([[0.0, math.log(3)], [0.0, 0.0]])  # 3/4 and 1/2 for the second class
    loss = cross_entropy(logits, torch.tensor([1, 1]))
    assert loss.item() == pytest.approx(-(math.log(3 / 4) + math.log(1 / 2)) / 2)


@pytest.mark.parametrize(("order", "value"), [(1, 7 / 2), (2, 5 / 2)])
def test_a_penalty_is_the_mean_over_columns_of_their_norm(order: int, value: float):
    assert penalty(TABLE, order).item() == value


@pytest.mark.parametrize(
    ("order", "gradient"),
    [(1, [[0.5, 0.0], [-0.5, 0.0]]), (2, [[0.3, 0.0], [-0.4, 0.0]])],
)
def test_the_gradient_of_a_penalty_is_the_direction_of_each_column(
    order: int, gradient: list[list[float]]
):
    torch.testing.assert_close(gradient_of(TABLE, order), torch.tensor(gradient))


@pytest.mark.parametrize("order", [1, 2])
def test_the_gradient_of_a_penalty_equals_finite_differences(order: int):
    table, step = random_table(), 1e-6
    found = gradient_of(table, order)
    for place in range(table.numel()):
        change = torch.zeros(table.numel(), dtype=torch.float64)
        change[place] = step
        change = change.view_as(table)
        slope = (penalty(table + change, order) - penalty(table - change, order)) / (2 * step)
        assert found.flatten()[place].item() == pytest.approx(slope.item(), rel=1e-6)


@pytest.mark.parametrize("order", [1, 2])
def test_a_penalty_equals_the_norm_of_torch(order: int):
    table = random_table(1)
    wanted = torch.linalg.vector_norm(table, ord=order, dim=0).mean()
    torch.testing.assert_close(penalty(table, order), wanted, rtol=1e-12, atol=0)


@pytest.mark.parametrize("order", [1, 2])
def test_at_zero_a_penalty_and_its_gradient_are_zero(order: int):
    zero = torch.zeros(2, 3)
    assert penalty(zero, order).item() == 0
    assert torch.equal(gradient_of(zero, order), zero)


@pytest.mark.parametrize("order", [1, 2])
def test_a_penalty_ignores_signs_and_grows_with_the_table(order: int):
    table = random_table(2)
    assert penalty(-table, order).item() == penalty(table, order).item()
    assert penalty(3 * table, order).item() == pytest.approx(3 * penalty(table, order).item())
