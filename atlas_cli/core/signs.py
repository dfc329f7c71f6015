"""What predictions tell of a model without labels, and what in them speaks against it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from atlas_cli.core.trust import divergence

# What may speak against a model, the gravest first, and why.
OBJECTIONS = {
    "collapse": "predictions crowd into fewer classes than before",
    "disagreement": "views of the same image are told apart more often than before",
    "doubt": "predictions are hardly better ordered than before",
}
_MORE_SKEW = 0.1  # nats
_LESS_AGREEMENT = 0.1  # of all images
_MORE_MERIT = 0.03


@dataclass(frozen=True)
class Signs:
    """Of predictions for images and for other views of them, all without labels.

    `agreement` is the share of images that both views are classified alike in, `entropy` the mean
    of the predictions' entropies, `skew` the divergence of their mean from a prior, and `merit`
    what grows as predictions become sure and yet remain spread as the prior says.
    """

    agreement: float
    entropy: float
    skew: float
    merit: float


def read_signs(weak: torch.Tensor, strong: torch.Tensor, prior: torch.Tensor) -> Signs:
    """The signs of probabilities, (images, classes), for the images and for other views of them.

    merit = 1 - (mean entropy + KL(mean prediction | prior)) / log(classes). With a uniform prior
    this is the information that predictions hold of images, as a share of the most there can be.
    """
    mean = weak.double().mean(dim=0)
    entropy = torch.special.entr(weak.double()).sum(dim=1).mean().item()
    skew = divergence(mean, prior.to(mean)).item()
    return Signs(
        agreement=(weak.argmax(dim=1) == strong.argmax(dim=1)).double().mean().item(),
        entropy=entropy,
        skew=skew,
        merit=1 - (entropy + skew) / math.log(weak.shape[1]),
    )


def objection(before: Signs, after: Signs) -> str | None:
    """What speaks against a model that came after another: a key of OBJECTIONS, or None."""
    if after.skew > before.skew + _MORE_SKEW:
        return "collapse"
    if after.agreement < before.agreement - _LESS_AGREEMENT:
        return "disagreement"
    if after.merit < before.merit + _MORE_MERIT:
        return "doubt"
    return None
