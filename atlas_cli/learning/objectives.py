"""The objectives that come with atlas, by the names that recipes use. Nothing here imports torch.

An objective with `needs` is a function of the logits of a batch, (images, classes), and of what it
needs, by name: `labels`, the `prior` of the classes, or the logits of the `weak` views, in which
case its own logits are of strong views. One that is `stateful` makes training data of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from atlas_cli.registry import late, objective

if TYPE_CHECKING:
    import torch

    from atlas_cli.learning.unlabelled import UnlabelledData, UnlabelledObjective

losses = late("atlas_cli.core.losses")
unlabelled = late("atlas_cli.learning.unlabelled")

_TEMPERATURE = 0.2


# add ------------------------------------------------------------------------------------------


@objective("labels", commands=("add",), needs=("labels",))
def labels(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy."""
    found: torch.Tensor = losses.cross_entropy(logits, labels)
    return found


# tta ------------------------------------------------------------------------------------------


@objective("ufm", stateful=True)
def ufm(adapted: UnlabelledObjective) -> UnlabelledData:
    """Strong views learn what weak views are predicted to be, where that can be relied on."""
    found: UnlabelledData = unlabelled.SelfTraining(adapted)
    return found


@objective("entropy", commands=("tta", "add"))
def entropy(logits: torch.Tensor) -> torch.Tensor:
    """The mean entropy of predictions: TENT, and AdaMerging where there are several tasks."""
    found: torch.Tensor = losses.entropy(logits)
    return found


@objective("balanced-entropy", needs=("prior",))
def balanced_entropy(logits: torch.Tensor, prior: torch.Tensor) -> torch.Tensor:
    """The mean entropy, and how far the mean prediction is from the prior."""
    found: torch.Tensor = losses.balanced_entropy(logits, prior)
    return found


@objective("sar", stateful=True, two_gradients=True)
def sar(adapted: UnlabelledObjective) -> UnlabelledData:
    """The entropy of images that are predicted with confidence, by sharpness-aware steps."""
    found: UnlabelledData = unlabelled.ReliableEntropy(adapted)
    return found


@objective("simclr", needs=("weak",))
def simclr(logits: torch.Tensor, weak: torch.Tensor) -> torch.Tensor:
    """The strong view of an image finds its weak view among those of the batch."""
    found: torch.Tensor = losses.contrast(logits, weak, _TEMPERATURE)
    return found


# negate: each is small when the images are no longer recognised -------------------------------


@objective("unlikelihood", commands=("negate",), needs=("labels",))
def unlikelihood(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """-log(1 - p[label])."""
    found: torch.Tensor = losses.unlikelihood(logits, labels)
    return found


@objective("ascent", commands=("negate",), needs=("labels",))
def ascent(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy with the opposite sign."""
    found: torch.Tensor = losses.ascent(logits, labels)
    return found


@objective("uniform", commands=("negate",), needs=("labels",))
def uniform(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """KL(uniform | prediction)."""
    found: torch.Tensor = losses.to_uniform(logits, labels)
    return found
