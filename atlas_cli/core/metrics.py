"""Accuracy, its uncertainty, and the difference between two models on the same images."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

_Z95 = 1.959963984540054  # the 97.5th percentile of the normal distribution


def top_k(logits: torch.Tensor, k: int) -> torch.Tensor:
    """The k best classes of each row, best first; of equal logits the lower class comes first.

    Shapes: (images, classes) -> (images, k).
    """
    return torch.sort(logits, dim=1, descending=True, stable=True).indices[:, :k]


def mean_class_accuracy(correct: Sequence[bool], labels: Sequence[int]) -> float:
    """(1/C) sum over classes c of the accuracy on the images of c; absent classes do not count."""
    hits: dict[int, int] = {}
    counts: dict[int, int] = {}
    for right, label in zip(correct, labels, strict=True):
        hits[label] = hits.get(label, 0) + right
        counts[label] = counts.get(label, 0) + 1
    return math.fsum(hits[label] / counts[label] for label in counts) / len(counts)


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """The Wilson 95 % interval of a proportion.

    (p + z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n), with p = successes/trials.
    """
    p, z2 = successes / trials, _Z95**2
    centre = p + z2 / (2 * trials)
    spread = _Z95 * math.sqrt(p * (1 - p) / trials + z2 / (4 * trials**2))
    scale = 1 + z2 / trials
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def mcnemar(ours: Sequence[bool], theirs: Sequence[bool]) -> float:
    """The exact two-sided p-value of McNemar's test for two models on the same images.

    Of n images that only one model gets right, b are ours: min(1, 2 P(X <= min(b, n-b))) for X
    binomial with n trials and probability 1/2.
    """
    pairs = list(zip(ours, theirs, strict=True))
    only_ours = sum(a and not b for a, b in pairs)
    only_theirs = sum(b and not a for a, b in pairs)
    n, fewer = only_ours + only_theirs, min(only_ours, only_theirs)
    if n == 0:
        return 1.0
    log_terms = [
        math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) - n * math.log(2)
        for i in range(fewer + 1)
    ]
    return min(1.0, 2 * math.fsum(map(math.exp, log_terms)))
