"""The losses that coefficients are learned with, and penalties on coefficients."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from atlas_cli.core.unlabelled import divergence

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def logits_of(features: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """head @ norm(features), (images, classes). The head holds the model's logit scale."""
    return F.normalize(features, dim=-1) @ head.T


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean over images of -log p[label], where p = softmax(logits)."""
    return F.cross_entropy(logits, labels)


def entropy(logits: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
    """The mean over images of -sum_c p[c] log p[c]. Labels are not looked at."""
    return entropies(logits).mean()


# Without labels: a batch's own predictions, or those of another view, take their place -----------


def entropies(logits: torch.Tensor) -> torch.Tensor:
    """-sum_c p[c] log p[c] of every image."""
    logarithms = logits.log_softmax(dim=1)
    return -(logarithms.exp() * logarithms).sum(dim=1)


def soft_cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, total: torch.Tensor
) -> torch.Tensor:
    """-sum over images and classes of target[c] log p[c], over the total weight of a batch."""
    return -(targets * logits.log_softmax(dim=1)).sum() / total


def balanced_entropy(logits: torch.Tensor, prior: torch.Tensor) -> torch.Tensor:
    """The mean entropy + KL(prior | mean prediction): confident, but not of one class only."""
    return entropies(logits).mean() + divergence(prior, logits.softmax(dim=1).mean(dim=0))


def contrast(strong: torch.Tensor, weak: torch.Tensor, temperature: float) -> torch.Tensor:
    """InfoNCE: the mean over images i of -log softmax_j(strong_i . weak_j / temperature)[i].

    Both are scaled to length 1. The weak views are what the strong ones are to find.
    """
    likeness = F.normalize(strong, dim=1) @ F.normalize(weak, dim=1).T / temperature
    return F.cross_entropy(likeness, torch.arange(len(strong), device=strong.device))


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


def penalty(coefficients: torch.Tensor, order: int) -> torch.Tensor:
    """The mean over columns j of |lambda_(., j)|_p, the norm being over task vectors; p is 1 or 2.

    The norm of a zero column has no derivative; zero is taken.
    """
    if order == 1:
        return coefficients.abs().sum(dim=0).mean()
    squares = coefficients.square().sum(dim=0)
    safe = torch.where(squares > 0, squares, torch.ones_like(squares))
    return torch.where(squares > 0, safe.sqrt(), torch.zeros_like(squares)).mean()
