"""wudi, cart, pcb and negmerge against their formulas, written out in float64."""

from __future__ import annotations

import torch
from tiles import merge

BASE = torch.randn(12, 9, generator=torch.Generator().manual_seed(0))
MODELS = [
    BASE + 0.3 * torch.randn(12, 9, generator=torch.Generator().manual_seed(seed))
    for seed in (1, 2, 3)
]
VECTORS = [model.double() - BASE.double() for model in MODELS]


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)


def test_wudi_is_the_least_squares_solution():
    """min over X of sum_t |(X - tau_t) tau_t^T|^2 / |tau_t|^2 + 1e-8 |X|^2, by lstsq."""
    left = [tau / tau.norm() for tau in VECTORS]
    right = [tau @ tau.T / tau.norm() for tau in VECTORS]
    ridge = 1e-4 * torch.eye(9).double()
    system, wanted = torch.cat([*left, ridge]), torch.cat([*right, torch.zeros(9, 12)])
    solved = torch.linalg.lstsq(system, wanted.double()).solution.T
    close(merge("wudi", BASE, MODELS, {"lambda": 0.7}), BASE.double() + 0.7 * solved)


def test_wudi_of_one_model_is_that_model_and_of_none_that_changed_the_base():
    close(merge("wudi", BASE, MODELS[:1]), MODELS[0].double())
    assert torch.equal(merge("wudi", BASE, [BASE, BASE]), BASE)
    close(merge("wudi", BASE, [MODELS[0], BASE]), MODELS[0].double())


def test_wudi_of_few_rows_changes_nothing_beside_them():
    """Ten columns and two rows: the matrix to be inverted has rank four."""
    base = torch.zeros(2, 10)
    models = [torch.randn(2, 10, generator=torch.Generator().manual_seed(n)) for n in (1, 2)]
    merged = merge("wudi", base, models).double()
    rows = torch.cat(models).double()
    beside = torch.eye(10).double() - torch.linalg.pinv(rows) @ rows
    assert (merged @ beside).abs().max() < 1e-5
    for model in models:  # what neither row space shares is kept of each
        assert merged.isfinite().all()
        assert (merged @ model.double().T - model.double() @ model.double().T).norm() < 10


def test_cart_adds_the_first_directions_around_the_mean():
    mean = torch.stack(MODELS).double().mean(0)
    wanted = mean.clone()
    for model in MODELS:
        left, sizes, right = torch.linalg.svd(model.double() - mean, full_matrices=False)
        wanted += 0.5 * sum(sizes[i] * left[:, i : i + 1] @ right[i : i + 1] for i in range(3))
    asked = {"lambda": 0.5, "rank_fraction": 0.3}  # of 9: 2.7, rounded up
    close(merge("cart", None, MODELS, asked), wanted)
    assert torch.equal(merge("cart", BASE, MODELS, asked), merge("cart", None, MODELS, asked))
    close(merge("cart", None, MODELS, {"rank_fraction": 0.0}), mean)


def test_negmerge_subtracts_what_all_models_agree_on():
    stacked = torch.stack(VECTORS)
    agree = (stacked > 0).all(0) | (stacked < 0).all(0)
    assert 0 < agree.float().mean() < 1
    wanted = BASE.double() - 0.4 * stacked.mean(0) * agree
    close(merge("negmerge", BASE, MODELS, {"lambda": 0.4}), wanted)


def scaled(values: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Each row clamped to its elements of two shares of its length, then from 0 to 1."""
    ordered = values.sort(1).values
    count = values.shape[1]
    first = ordered[:, int(count * low)].unsqueeze(1)
    last = ordered[:, max(0, int(count * (1 - high) - 1))].unsqueeze(1)
    kept = values.clamp(first, last)
    smallest, largest = kept.min(1, keepdim=True).values, kept.max(1, keepdim=True).values
    return (kept - smallest) / (largest - smallest)


def test_pcb_is_the_published_formula():
    """Ends clipped, exp(T a^2) tanh(tau sum tau), of which the highest tenth is rescaled."""
    flat = torch.stack(VECTORS).flatten(1)
    sizes = scaled(flat.abs(), 1e-4, 1e-4)
    scores = (len(flat) * sizes.square()).exp() * (flat * flat.sum(0)).tanh()
    shares = scaled(scores, 1 - 0.1, 0)
    ordered = flat.abs().sort(1).values
    clipped = flat.sign() * flat.abs().clamp(ordered[:, :1], ordered[:, -2:-1])
    wanted = (clipped * shares).sum(0) / shares.sum(0).clamp(min=1e-12)
    found = merge("pcb", BASE, MODELS, {"lambda": 1.2, "density": 0.1}, rows=5)
    close(found, BASE.double() + 1.2 * wanted.view(BASE.shape))
    assert 0 < (found != BASE).float().mean() < 0.35
