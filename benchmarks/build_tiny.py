"""Rebuild the built-in model `tiny` from a seed, and show what it can do.

python benchmarks/build_tiny.py build            about ten minutes on two cores
python benchmarks/build_tiny.py table            a quarter of an hour: fine-tunes on every task
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save

from atlas_cli.datasets.builtin import TASKS, draw, label_of
from atlas_cli.datasets.builtin.captions import any_concept, say
from atlas_cli.datasets.builtin.concepts import Concept
from atlas_cli.datasets.builtin.scenes import picture
from atlas_cli.datasets.builtin.styles import CLEAN
from atlas_cli.datasets.dataset import open_dataset
from atlas_cli.learning.run import RunInputs
from atlas_cli.learning.weights import prepared_trainer
from atlas_cli.models.clip import Opening
from atlas_cli.models.open_clip_import import import_open_clip
from atlas_cli.recipes.finetune import FinetuneRecipe
from atlas_cli.sources.locate import builtin_model, locate, parse_reference

Tokenizer = Callable[[list[str]], torch.Tensor]
Data = tuple[torch.Tensor, torch.Tensor]

SEED, THREADS = 0, 2
POOL, BATCH, STEPS, RATE = 60_000, 256, 2000, 2e-3
CONFIG: dict[str, Any] = {
    "model_cfg": {
        "embed_dim": 64,
        "quick_gelu": False,
        "vision_cfg": {
            "image_size": 32,
            "layers": 5,
            "width": 96,
            "head_width": 32,
            "patch_size": 8,
        },
        "text_cfg": {
            "context_length": 32,
            "vocab_size": 49408,
            "width": 48,
            "heads": 3,
            "layers": 2,
        },
    },
    "preprocess_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3, "size": 32},
}


@dataclass(frozen=True)
class Pool:
    """Pictures for pre-training (N, 3, 32, 32) and what they show."""

    images: torch.Tensor
    concepts: list[Concept]


def _draw_some(start: int, stop: int) -> tuple[np.ndarray, list[Concept]]:
    images, concepts = [], []
    for index in range(start, stop):
        rng = np.random.default_rng(np.random.SeedSequence((SEED, index)))
        concepts.append(any_concept(rng))
        images.append(picture(concepts[-1], CLEAN, rng))
    return np.stack(images), concepts


def draw_pool(count: int) -> Pool:
    """The pictures of pre-training, drawn by two processes."""
    bounds = range(0, count, 1000)
    with ProcessPoolExecutor(THREADS) as workers:
        parts = list(workers.map(_draw_some, bounds, [min(b + 1000, count) for b in bounds]))
    images = torch.from_numpy(np.concatenate([part[0] for part in parts]))
    return Pool(images.permute(0, 3, 1, 2), [c for part in parts for c in part[1]])


def to_input(images: torch.Tensor) -> torch.Tensor:
    """Bytes as the model wants them, in [-1, 1]."""
    return images.float() / 127.5 - 1.0


def agreement(shown: Sequence[Concept], told: Sequence[Concept]) -> torch.Tensor:
    """1 where a caption is true of a picture (pictures, captions), as its own always is."""
    truth = _content(shown)[:, None] == _content(told)
    colours = np.array([concept.colour for concept in told])
    truth &= (np.array([concept.colour for concept in shown])[:, None] == colours) | (colours == "")
    return torch.from_numpy(truth).float()


def _content(concepts: Sequence[Concept]) -> np.ndarray:
    return np.array([f"{each.kind} {each.name} {each.symbol}" for each in concepts])


def contrast(logits: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """The CLIP loss, with all true pairs of the batch as targets."""
    rows = truth / truth.sum(1, keepdim=True)
    columns = (truth / truth.sum(0, keepdim=True)).T
    return 0.5 * (F.cross_entropy(logits, rows) + F.cross_entropy(logits.T, columns))


def cosine(step: int, steps: int, warmup: int) -> float:
    """The share of the learning rate at a step: a short rise, then a cosine to zero."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def optimizer_of(model: torch.nn.Module, rate: float, decay: float) -> torch.optim.AdamW:
    """AdamW that decays matrices only, and not the embedding of words."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    decayed = [p for n, p in named if p.ndim >= 2 and "embedding" not in n]
    others = [p for n, p in named if p.ndim < 2 or "embedding" in n]
    groups = [{"params": decayed, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98))


def batches(count: int, size: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Positions in shuffled passes over `count` items, for ever."""
    while True:
        order = rng.permutation(count)
        for start in range(0, count - size + 1, size):
            yield order[start : start + size]


def pretrain(model: Any, tokenizer: Tokenizer, pool: Pool) -> None:
    """Train both towers on the pool, in place."""
    rng = np.random.default_rng(SEED)
    optimizer = optimizer_of(model, RATE, 0.1)
    stream = batches(len(pool.concepts), BATCH, rng)
    started = time.time()
    for step in range(STEPS):
        rows = next(stream)
        shown = [pool.concepts[row] for row in rows]
        captions, told = zip(*(say(concept, rng) for concept in shown), strict=True)
        logits = scores(model, pool.images[rows], tokenizer(list(captions)))
        loss = contrast(logits, agreement(shown, told))
        advance(optimizer, loss, RATE * cosine(step, STEPS, 100))
        with torch.no_grad():
            model.logit_scale.clamp_(0.0, math.log(100.0))
        if step % 100 == 99:
            note(f"step {step + 1}  loss {loss.item():.3f}  {time.time() - started:.0f} s")


def scores(model: Any, images: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The scaled cosine of every picture and every caption."""
    left = F.normalize(model.encode_image(to_input(images)), dim=-1)
    right = F.normalize(model.encode_text(tokens), dim=-1)
    return model.logit_scale.exp() * left @ right.T


def advance(optimizer: torch.optim.AdamW, loss: torch.Tensor, rate: float) -> None:
    """Take one step down the loss, with the gradient no longer than 1."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad()
    loss.backward()
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()


def note(text: str) -> None:
    """Tell whoever is waiting."""
    print(text, file=sys.stderr, flush=True)


def build(folder: Path) -> None:
    """Draw, train and write the model."""
    open_clip = import_open_clip()
    torch.manual_seed(SEED)
    model = open_clip.CLIP(**CONFIG["model_cfg"])
    started = time.time()
    pool = draw_pool(POOL)
    note(f"{POOL} pictures in {time.time() - started:.0f} s")
    pretrain(model, open_clip.SimpleTokenizer(context_length=32), pool)
    write(model, folder)
    note(f"{folder} in {time.time() - started:.0f} s")


def write(model: Any, folder: Path) -> None:
    """Write a folder that open_clip opens with `local-dir:`, in half precision."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: each.half().contiguous() for name, each in model.state_dict().items()}
    metadata = {"format": "pt", "activation": "gelu"}
    (folder / "open_clip_model.safetensors").write_bytes(save(tensors, metadata))
    (folder / "open_clip_config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")


def open_model(folder: Path) -> tuple[Any, Tokenizer]:
    """The model and its tokenizer, by open_clip's own door."""
    open_clip = import_open_clip()
    model, _, _ = open_clip.create_model_and_transforms(f"local-dir:{folder.resolve()}")
    return model, open_clip.get_tokenizer(f"local-dir:{folder.resolve()}")


def head_of(model: Any, tokenizer: Tokenizer, task: str) -> torch.Tensor:
    """The zero-shot head (classes, width), scaled."""
    rows = []
    with torch.no_grad():
        for name in TASKS[task].classes:
            prompts = [template.format(name) for template in TASKS[task].templates]
            mean = F.normalize(model.encode_text(tokenizer(prompts)), dim=-1).mean(0)
            rows.append(F.normalize(mean, dim=-1))
        return model.logit_scale.exp() * torch.stack(rows)


def split_of(task: str, split: str) -> Data:
    """All images of a split and their labels."""
    count = TASKS[task].sizes[split]
    images = np.stack([draw(task, split, index) for index in range(count)])
    labels = torch.tensor([label_of(task, split, index) for index in range(count)])
    return torch.from_numpy(images).permute(0, 3, 1, 2), labels


def logits_of(model: Any, head: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    """Scores (images, classes)."""
    return F.normalize(model.encode_image(to_input(images)), dim=-1) @ head.T


@torch.no_grad()
def accuracy(model: Any, head: torch.Tensor, data: Data) -> float:
    """Percent of images whose best score is their label."""
    return 100.0 * float((logits_of(model, head, data[0]).argmax(1) == data[1]).float().mean())


def finetune(folder: Path, task: str, steps: int, rate: float) -> dict[str, torch.Tensor]:
    """The weights that `atlas finetune` comes to on a task, without augmentation."""
    recipe = FinetuneRecipe(
        data=[f"builtin:{task}"], model=str(folder), steps=steps, lr=rate, augment="none", seed=SEED
    )
    train, val = (open_dataset(recipe.data[0], split=split) for split in ("train", "val"))
    source, opening = locate(parse_reference(recipe.model)), Opening(device="cpu")
    inputs = RunInputs("finetune", recipe, source, (), (train,), (val,), opening, THREADS)
    with prepared_trainer(inputs, note) as ready:
        *_, checkpoint = ready.learn(ready.begin())
        return {**ready.clip.module.state_dict(), **ready.model.load(checkpoint.kept)}


def table(folder: Path, steps: int, rate: float) -> None:
    """Print a markdown table: every task before and after fine-tuning."""
    print("| task | classes | chance | zero-shot | fine-tuned | seconds |")
    print("| --- | --- | --- | --- | --- | --- |")
    for task in TASKS:
        print(row_of(folder, task, steps, rate), flush=True)


def row_of(folder: Path, task: str, steps: int, rate: float) -> str:
    """One task before and after fine-tuning, on its test split."""
    torch.manual_seed(SEED)
    model, tokenizer = open_model(folder)
    head, test = head_of(model, tokenizer, task), split_of(task, "test")
    before, started = accuracy(model, head, test), time.time()
    if steps:
        model.load_state_dict(finetune(folder, task, steps, rate))
    after, classes = accuracy(model, head, test), len(TASKS[task].classes)
    cells = [task, classes, f"{100 / classes:.1f}", f"{before:.1f}", f"{after:.1f}"]
    return f"| {' | '.join(map(str, cells))} | {time.time() - started:.0f} |"


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("verb", choices=["build", "table"])
    parser.add_argument("-o", "--output", type=Path, default=builtin_model("tiny"))
    parser.add_argument("--steps", type=int, default=400, help="fine-tuning steps; 0 for none")
    parser.add_argument("--rate", type=float, default=1e-3, help="fine-tuning rate")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    if options.verb == "build":
        build(options.output)
    else:
        table(options.output, options.steps, options.rate)


if __name__ == "__main__":
    main()
