"""Time and memory of a step of `atlas finetune`, beside a loop written by hand in PyTorch.

    python benchmarks/finetune.py [--rounds 3] [--steps 4]

A ViT-B/32 image tower with random weights, batch 16, random images, all weights trained. Every
measurement is a process of its own, in random order; memory is the peak of resident memory over
the interpreter with torch and open_clip loaded. Prints a markdown table with ratios to the loop
by hand; the goal is at most 1.1 in time and in memory. The last rows are ways to take less of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from fit import scene, status, table
from measuring import between, clocks, measured

OURS: dict[str, dict[str, Any]] = {
    "ours": {},
    "ours, activations computed twice": {"checkpoint": True},
    "ours, in 4 parts": {"parts": 4},
    "ours, LayerNorms only": {"tune": "layernorm"},
}
KINDS = ("by hand", *OURS)
FORMS = {"seconds": ".2f", "cpu": ".2f", "megabytes": ".0f"}


def measure(kind: str, steps: int) -> dict[str, float]:
    """The median time of a step after the first, and the peak of memory."""
    before, *scenery = scene()
    makers = {name: partial(ours, steps=steps + 1, **more) for name, more in OURS.items()}
    moments = makers.get(kind, by_hand)(*scenery)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of making the model
    marks = [clocks()]
    for _ in range(steps + 1):
        next(moments)
        marks.append(clocks())
    return between(marks) | {"megabytes": (status("VmHWM") - before) / 1e6}


def by_hand(tower: Any, images: Any, labels: Any, head: Any) -> Iterator[None]:
    import torch
    import torch.nn.functional as F

    optimizer = torch.optim.AdamW(tower.parameters(), lr=1e-5, weight_decay=0.1)
    while True:
        logits = F.normalize(tower(images), dim=-1) @ head.T
        loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(tower.parameters(), 1.0)
        optimizer.step()
        loss.item()
        yield


def ours(
    tower: Any,
    images: Any,
    labels: Any,
    head: Any,
    steps: int,
    *,
    tune: str = "all",
    checkpoint: bool = False,
    parts: int = 1,
) -> Iterator[object]:
    from atlas_cli.core.losses import cross_entropy
    from atlas_cli.core.optimizers import OptimizerConfig, WeightOptimizer
    from atlas_cli.learning.batches import StatelessData
    from atlas_cli.learning.loop import descend
    from atlas_cli.models.clip import logits_of
    from atlas_cli.models.trainable import TrainableModel, checkpoint_activations, names_of

    class Batch(StatelessData):
        """The same images again and again."""

        epoch_steps = steps

        def __init__(self) -> None:
            self.steps = steps

        def batches(self, step: int) -> Iterator[tuple[Any, Any]]:
            for some, own in zip(images.chunk(parts), labels.chunk(parts), strict=True):

                def loss_of(features: Any, own: Any = own) -> Any:
                    return cross_entropy(logits_of(features, head), own) / parts

                yield some, loss_of

        def accuracy(self) -> float:
            return 0.0

    tower.requires_grad_(False)
    if checkpoint:
        checkpoint_activations(tower)
    engine = TrainableModel(tower, names_of(tower, tune))
    optimizer = WeightOptimizer(engine.values, steps, OptimizerConfig(rate=1e-5))
    return descend(engine, optimizer, Batch())


def main() -> None:
    found = measured(__file__, __doc__ or "", KINDS, measure)
    if found is None:
        return
    plain, rows = found["by hand"], []
    for kind, row in found.items():
        cells = [f"{row[key]:{form}}" for key, form in FORMS.items()]
        ratios = [f"{row[key] / plain[key]:.2f}" for key in FORMS]
        rows.append([kind, *cells, *ratios])
    print("\n".join(table(["step", "s", "s of cores", "MB", *(["ratio"] * 3)], rows)))


if __name__ == "__main__":
    main()
