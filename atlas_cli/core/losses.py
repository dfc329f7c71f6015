"""Losses of predictions, and statistics of predictions that need no labels.

A loss that recipes know by a name is registered as an objective: a function of the logits of a
batch, (images, classes), and of what it needs, by name. Recipes are checked before torch is
imported, so nothing here imports it at the top.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atlas_cli.registry import late, objective

if TYPE_CHECKING:
    import torch
    import torch.nn.functional as F
else:
    torch, F = late("torch"), late("torch.nn.functional")

Loss = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]


@objective("labels", commands=("add",), needs=("labels",))
def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean over images of -log p[label], where p = softmax(logits)."""
    return F.cross_entropy(logits, labels)


# Without labels: a batch's own predictions, or those of another view, take their place -----------


@objective("ufm", needs=("targets",))
def soft_cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, total: torch.Tensor
) -> torch.Tensor:
    """-sum over images and classes of target[c] log p[c], over the total weight of a batch."""
    return -(targets * logits.log_softmax(dim=1)).sum() / total


@objective("entropy", commands=("tta", "add"))
def entropy(logits: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
    """The mean over images of -sum_c p[c] log p[c]. Labels are not looked at.

    This is TENT's loss, and AdaMerging's where there are several tasks.
    """
    return entropies(logits).mean()


@objective("balanced-entropy", needs=("prior",))
def balanced_entropy(logits: torch.Tensor, prior: torch.Tensor) -> torch.Tensor:
    """The mean entropy + KL(prior | mean prediction): confident, but not of one class only."""
    return entropies(logits).mean() + divergence(prior, logits.softmax(dim=1).mean(dim=0))


@objective("sar", needs=("reliable",))
def entropies(logits: torch.Tensor) -> torch.Tensor:
    """-sum_c p[c] log p[c] of every image."""
    logarithms = logits.log_softmax(dim=1)
    return -(logarithms.exp() * logarithms).sum(dim=1)


@objective("simclr", needs=("weak",))
def contrast(strong: torch.Tensor, weak: torch.Tensor, temperature: float = 0.2) -> torch.Tensor:
    """InfoNCE: the mean over images i of -log softmax_j(strong_i . weak_j / temperature)[i].

    Both are scaled to length 1. The weak views are what the strong ones are to find.
    """
    likeness = F.normalize(strong, dim=1) @ F.normalize(weak, dim=1).T / temperature
    return F.cross_entropy(likeness, torch.arange(len(strong), device=strong.device))


# Forgetting: each is small when the images are no longer recognised -------------------------------


@objective("unlikelihood", commands=("negate",), needs=("labels",))
def unlikelihood(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean over images of -log(1 - p[label]): 0 once no image gets its class.

    log(1 - p[y]) is taken as the log of the sum of all other probabilities, which stays exact where
    p[y] rounds to 1.
    """
    logarithms = logits.log_softmax(dim=1)
    own = F.one_hot(labels, logits.shape[1]).bool()
    return -logarithms.masked_fill(own, -math.inf).logsumexp(dim=1).mean()


@objective("ascent", commands=("negate",), needs=("labels",))
def ascent(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean over images of log p[label], which has no lower bound (the paper's eq. 9)."""
    return -cross_entropy(logits, labels)


@objective("uniform", commands=("negate",), needs=("labels",))
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


_TINY = 1e-12


@dataclass(frozen=True)
class Trusted:
    """Images whose predicted class is taken for their label: numbers of images, and classes."""

    images: torch.Tensor
    labels: torch.Tensor


def trusted_count(images: int, classes: int, most: int = 100, divisor: int = 4) -> int:
    """How many images of a class are trusted: images / classes / divisor, 1 at least."""
    return max(1, min(images // (classes * divisor), most))


def trust(probabilities: torch.Tensor, per_class: int) -> Trusted:
    """Of the images predicted to be of a class, the `per_class` most confident; (images, classes).

    An image is ranked for the class it is predicted to be of, and for no other. There is at least
    one, and never all of several: then the least confident is left out.
    """
    if per_class < 1:
        raise ValueError(f"cannot trust {per_class} images of a class")
    confidence, predicted = probabilities.max(dim=1)
    order = confidence.argsort(descending=True, stable=True)
    ranked = predicted[order]
    seen = F.one_hot(ranked, probabilities.shape[1]).cumsum(dim=0)
    rank = seen.gather(1, ranked[:, None]).squeeze(1)  # 1 for the most confident of a class
    chosen = order[rank <= per_class]
    if len(chosen) == len(probabilities) > 1:
        chosen = chosen[:-1]
    chosen = chosen.sort().values
    return Trusted(chosen, predicted[chosen])


def sharpen(probabilities: torch.Tensor, power: float) -> torch.Tensor:
    """p^power / sum_c p^power: nearer to one class above 1, nearer to all classes below 1."""
    return (power * probabilities.clamp_min(torch.finfo(probabilities.dtype).tiny).log()).softmax(1)


def threshold_at(schedule: tuple[float, float], epoch: int, epochs: int) -> float:
    """The confidence that a target needs, from the first of a schedule towards the second."""
    start, end = schedule
    return start + (end - start) * epoch / epochs


def divergence(prior: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """KL(prior | mean) = sum_c prior[c] log(prior[c] / mean[c]); a class of no prior counts 0."""
    ratio = prior.clamp_min(_TINY).log() - mean.clamp_min(_TINY).log()
    return (prior * ratio).sum()


# What may speak against a model, the gravest first, and why. The names are shown to users.
OBJECTIONS = {
    "collapse": "predictions crowd into fewer classes than before",
    "disagreement": "views of the same image are told apart more often than before",
    "doubt": "adapted predictions are not clearly better than zero-shot",
}
_MORE_IMBALANCE = 0.1  # nats
_LESS_AGREEMENT = 0.1  # of all images
_MORE_INFORMATION = 0.03


@dataclass(frozen=True)
class PredictionStatistics:
    """Statistics of predictions for images and for other views of them, all without labels.

    `agreement` is the share of images whose two views are classified alike, `entropy` the mean
    entropy of the predictions, `imbalance` the divergence of their mean from a prior, and
    `information` grows as predictions become confident and yet remain spread as the prior says.
    """

    agreement: float
    entropy: float
    imbalance: float
    information: float

    def values(self) -> dict[str, float]:
        """The numbers by the names that results and saved runs know them by."""
        return {
            "agreement": self.agreement,
            "entropy": self.entropy,
            "skew": self.imbalance,
            "merit": self.information,
        }


def prediction_statistics(
    weak: torch.Tensor, strong: torch.Tensor, prior: torch.Tensor
) -> PredictionStatistics:
    """The statistics of probabilities, (images, classes), for images and for other views of them.

    information = 1 - (mean entropy + KL(mean prediction | prior)) / log(classes). With a uniform
    prior this is the mutual information of images and predictions, as a share of the most there
    can be.
    """
    mean = weak.double().mean(dim=0)
    entropy = torch.special.entr(weak.double()).sum(dim=1).mean().item()
    imbalance = divergence(mean, prior.to(mean)).item()
    return PredictionStatistics(
        agreement=(weak.argmax(dim=1) == strong.argmax(dim=1)).double().mean().item(),
        entropy=entropy,
        imbalance=imbalance,
        information=1 - (entropy + imbalance) / math.log(weak.shape[1]),
    )


def objection(before: PredictionStatistics, after: PredictionStatistics) -> str | None:
    """What speaks against a model that came after another: a key of OBJECTIONS, or None."""
    if after.imbalance > before.imbalance + _MORE_IMBALANCE:
        return "collapse"
    if after.agreement < before.agreement - _LESS_AGREEMENT:
        return "disagreement"
    if after.information < before.information + _MORE_INFORMATION:
        return "doubt"
    return None
