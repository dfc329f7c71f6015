"""The losses that coefficients are learned with, and penalties on coefficients."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def logits_of(features: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """head @ norm(features), (images, classes). The head holds the model's logit scale."""
    return F.normalize(features, dim=-1) @ head.T


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean over images of -log p[label], where p = softmax(logits)."""
    return F.cross_entropy(logits, labels)


def entropy(logits: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
    """The mean over images of -sum_c p[c] log p[c]. Labels are not looked at."""
    logarithms = logits.log_softmax(dim=1)
    return -(logarithms.exp() * logarithms).sum(dim=1).mean()


# Forgetting: each is small when the images are no longer recognised -------------------------------


def ascent(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean over images of log p[label], which has no lower bound (the paper's eq. 9)."""
    return -cross_entropy(logits, labels)


def unlikelihood(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean over images of -log(1 - p[label]): 0 once no image gets its class.

    log(1 - p[y]) is taken as the log of the sum of all other probabilities, which stays exact where
    p[y] rounds to 1.
    """
    logarithms = logits.log_softmax(dim=1)
    own = F.one_hot(labels, logits.shape[1]).bool()
    return -logarithms.masked_fill(own, -math.inf).logsumexp(dim=1).mean()


def to_uniform(logits: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
    """KL(uniform | p), the mean over images: 0 once all classes are equally likely."""
    return -logits.log_softmax(dim=1).mean(dim=1).mean() - math.log(logits.shape[1])


FORGET: dict[str, Loss] = {
    "ascent": ascent,
    "unlikelihood": unlikelihood,
    "uniform": to_uniform,
}


def penalty(coefficients: torch.Tensor, order: int) -> torch.Tensor:
    """The mean over columns j of |lambda_(., j)|_p, the norm being over task vectors; p is 1 or 2.

    The norm of a zero column has no derivative; zero is taken.
    """
    if order == 1:
        return coefficients.abs().sum(dim=0).mean()
    squares = coefficients.square().sum(dim=0)
    safe = torch.where(squares > 0, squares, torch.ones_like(squares))
    return torch.where(squares > 0, safe.sqrt(), torch.zeros_like(squares)).mean()
