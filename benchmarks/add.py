"""Time and memory of a step of `add` with eight tasks beside a step of `fit`.

    python benchmarks/add.py [--rounds 3] [--steps 4]

A ViT-B/32 image tower with random weights, eight random vectors in float32, sixteen images in each
step: of one task, or two of each of eight, every task with a head of its own. Everything else is
the same; `add` composes once and runs the tower once, however many tasks there are. Every
measurement is a process of its own, in random order. Memory is the peak of resident memory over the
interpreter with torch and open_clip loaded. Prints a markdown table, and the ratios.
"""

from __future__ import annotations

import logging
from pathlib import Path

from fit import random_block, resident, status, table
from measuring import between, clocks, measured

BATCH, VECTORS = 16, 8
TASKS = ("digits", "letters", "house_numbers", "signs")
TASKS += ("textures", "terrain", "counts", "silhouettes")


def measure(kind: str, steps: int) -> dict[str, float]:
    """The median time of a step after the first, and the peak of memory."""
    import torch

    from atlas_cli.core.compose import Composition, by_block, stack_blocks
    from atlas_cli.core.optimizers import CoefficientOptimizer, OptimizerConfig
    from atlas_cli.datasets.dataset import open_dataset
    from atlas_cli.datasets.pixels import Pixels, view_of
    from atlas_cli.learning.batches import LabelledData, TaskData, TrainingConfig
    from atlas_cli.learning.loop import descend
    from atlas_cli.models.composed import ComposedModel
    from atlas_cli.models.open_clip_import import import_open_clip

    open_clip = import_open_clip()
    before = resident()
    logging.disable(logging.WARNING)
    torch.manual_seed(0)
    model, _, preprocess = open_clip.create_model_and_transforms("ViT-B-32", force_quick_gelu=True)
    module = model.visual.eval().requires_grad_(False)
    base = {name: tensor.detach() for name, tensor in module.named_parameters()}
    shapes = {name: tuple(tensor.shape) for name, tensor in base.items()}
    stacks = {
        name: stack_blocks({i: random_block(shape, "fp32") for i in range(VECTORS)})
        for name, shape in shapes.items()
    }
    random_block.cache_clear()
    tower = ComposedModel(module, Composition(base, stacks, by_block(shapes), VECTORS))
    names = TASKS if kind == "add" else TASKS[:1]
    streams = []
    for name in names:
        dataset = open_dataset(f"builtin:{name}", split="val")
        pixels = Pixels(dataset, view_of(preprocess), 2**28)
        streams.append(
            TaskData(pixels, torch.randn(len(dataset.classes), 512), share=1 / len(names))
        )
    images = BATCH // len(names)
    training = TrainingConfig(epochs=steps + 1, batch_size=BATCH, min_steps=1)
    problem = LabelledData(streams, [range(images)] * len(names), training)
    optimizer = CoefficientOptimizer(
        torch.zeros(tower.composition.shape), problem.steps, OptimizerConfig()
    )
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of making random vectors
    marks = [clocks()]
    marks += [clocks() for _ in descend(tower, optimizer, problem)]
    return between(marks) | {"megabytes": (status("VmHWM") - before) / 1e6}


def main() -> None:
    middle = measured(__file__, __doc__ or "", ("fit", "add"), measure)
    if middle is None:
        return
    lines = [
        [kind, f"{row['seconds']:.2f}", f"{row['cpu']:.2f}", f"{row['megabytes']:.0f}"]
        for kind, row in middle.items()
    ]
    ratios = [middle["add"][key] / middle["fit"][key] for key in ("seconds", "cpu", "megabytes")]
    lines.append(["add / fit", *(f"{ratio:.2f}" for ratio in ratios)])
    print("\n".join(table(["step of", "s", "s of CPU", "MB"], lines)))


if __name__ == "__main__":
    main()
