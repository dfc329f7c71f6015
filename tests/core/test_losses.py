"""Losses and penalties, with numbers that can be checked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from atlas_cli.core.losses import ascent, cross_entropy, entropy, penalty, to_uniform, unlikelihood

FORGET = {"ascent": ascent, "unlikelihood": unlikelihood, "uniform": to_uniform}

# Columns of length 5 and 0 in the second norm, 7 and 0 in the first.
TABLE = torch.tensor([[3.0, 0.0], [-4.0, 0.0]])


def random_table(seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(3, 5, generator=random, dtype=torch.float64)


def gradient_of(table: torch.Tensor, order: int) -> torch.Tensor:
    table = table.clone().requires_grad_()
    return torch.autograd.grad(penalty(table, order), table)[0]


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


# Entropy and forgetting ------------------------------------------------------------------------

LOGITS = torch.tensor([[2.0, -1.0, 0.5], [0.0, 3.0, 1.0], [1.0, 1.0, 1.0]], dtype=torch.float64)
LABELS = torch.tensor([0, 2, 1])


def by_hand(name: str, logits: list[list[float]], labels: list[int]) -> float:
    """The objectives, one image and one class after the other."""
    total = 0.0
    for row, label in zip(logits, labels, strict=True):
        weights = [math.exp(value) for value in row]
        chances = [weight / sum(weights) for weight in weights]
        total += {
            "entropy": -sum(p * math.log(p) for p in chances),
            "ascent": math.log(chances[label]),
            "unlikelihood": -math.log(1 - chances[label]),
            "uniform": sum(math.log(1 / len(row) / p) for p in chances) / len(row),
        }[name]
    return total / len(logits)


@pytest.mark.parametrize("name", ["entropy", *FORGET])
def test_an_objective_and_its_gradient_are_those_of_a_loop(name: str):
    objective = {"entropy": entropy, **FORGET}[name]
    logits = LOGITS.clone().requires_grad_()
    loss = objective(logits, LABELS)
    assert loss.item() == pytest.approx(by_hand(name, LOGITS.tolist(), LABELS.tolist()), rel=1e-12)
    (gradient,) = torch.autograd.grad(loss, logits)
    step = 1e-6
    for image in range(3):
        for label in range(3):
            moved = [LOGITS.tolist(), LOGITS.tolist()]
            moved[0][image][label] += step
            moved[1][image][label] -= step
            up, down = (by_hand(name, some, LABELS.tolist()) for some in moved)
            found = gradient[image, label].item()
            assert found == pytest.approx((up - down) / (2 * step), abs=1e-8)


@pytest.mark.parametrize("name", ["unlikelihood", "uniform"])
def test_a_bounded_objective_of_forgetting_is_never_below_zero(name: str):
    random = torch.Generator().manual_seed(0)
    logits = 30 * torch.randn(200, 4, generator=random)
    labels = torch.randint(4, (200,), generator=random)
    assert FORGET[name](logits, labels).item() >= 0
    assert FORGET[name](torch.zeros(2, 4), torch.tensor([0, 1])).item() >= 0


def test_what_is_certainly_right_is_forgotten_with_a_finite_gradient():
    """Where the chance of the right class rounds to one, one minus it would be zero."""
    logits = torch.tensor([[200.0, 0.0, 0.0]], requires_grad=True)
    loss = FORGET["unlikelihood"](logits, torch.tensor([0]))
    loss.backward()
    assert loss.item() == pytest.approx(200 - math.log(2))
    assert logits.grad.isfinite().all()
    assert logits.grad[0, 0] > 0.9
