"""The losses that coefficients are learned with, and penalties on coefficients."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def logits_of(features: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """head @ norm(features), (images, classes). The head holds the model's logit scale."""
    return F.normalize(features, dim=-1) @ head.T


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean over images of -log softmax(logits)[label]."""
    return F.cross_entropy(logits, labels)


def penalty(coefficients: torch.Tensor, order: int) -> torch.Tensor:
    """The mean over columns j of |lambda_(., j)|_p, the norm being over task vectors; p is 1 or 2.

    The norm of a zero column has no derivative; zero is taken.
    """
    if order == 1:
        return coefficients.abs().sum(dim=0).mean()
    squares = coefficients.square().sum(dim=0)
    safe = torch.where(squares > 0, squares, torch.ones_like(squares))
    return torch.where(squares > 0, safe.sqrt(), torch.zeros_like(squares)).mean()
