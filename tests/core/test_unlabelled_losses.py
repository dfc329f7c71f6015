"""Losses without labels, against what they say written out."""

from __future__ import annotations

import math

import pytest
import torch

from atlas_cli.core import losses


def test_contrast_is_the_loss_written_out_pair_by_pair():
    random = torch.Generator().manual_seed(0)
    strong, weak = torch.randn(2, 5, 7, generator=random, dtype=torch.float64)
    total = 0.0
    for i in range(5):
        like = [
            math.exp((strong[i] @ weak[j] / (strong[i].norm() * weak[j].norm())).item() / 0.2)
            for j in range(5)
        ]
        total += -math.log(like[i] / sum(like)) / 5
    assert losses.contrast(strong, weak, 0.2).item() == pytest.approx(total)


def test_balanced_entropy_adds_the_divergence_of_the_mean_prediction():
    logits = torch.tensor([[2.0, 0.0], [1.0, 0.5]])
    rows = logits.softmax(dim=1)
    mean = rows.mean(dim=0)
    entropy = -(rows * rows.log()).sum(dim=1).mean()
    prior = torch.tensor([0.5, 0.5])
    apart = (prior * (prior / mean).log()).sum()
    found = losses.balanced_entropy(logits, prior)
    assert found.item() == pytest.approx((entropy + apart).item())
    assert losses.entropies(logits).mean().item() == pytest.approx(entropy.item())


def test_soft_targets_of_one_class_are_labels():
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([0, 2, 1, 1])
    targets = torch.nn.functional.one_hot(labels, 3).float()
    found = losses.soft_cross_entropy(logits, targets, torch.tensor(4.0))
    assert found.item() == pytest.approx(losses.cross_entropy(logits, labels).item())
