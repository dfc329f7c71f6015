"""Learning without labels: which predictions are trusted, how far, and what betrays a collapse."""

from __future__ import annotations

from dataclasses import dataclass

import torch

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
    seen = torch.nn.functional.one_hot(ranked, probabilities.shape[1]).cumsum(dim=0)
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
