"""What each way to keep a task vector costs: size, error, and accuracy on the built-in tasks.

    python benchmarks/storage.py [--work DIR] [--steps 400]

Fine-tunes the built-in model on every built-in task (a few minutes; kept in DIR), extracts each
vector in every form, adds it to the base again and tests that. Prints a markdown table of means
over the tasks, in points of accuracy; the goal is that int8 loses less than 0.5.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import build_tiny
import torch
from safetensors.torch import save_file

from atlas_cli.core.storage import Form, decode
from atlas_cli.datasets.builtin import TASKS
from atlas_cli.io.files import sha256_of
from atlas_cli.sources.locate import builtin_model, locate, parse_reference
from atlas_cli.vectors.bases import Base, open_base
from atlas_cli.vectors.extract import Extracted, Options, extract_to
from atlas_cli.vectors.format import open_vector

FORMS = {
    "fp32": Form(),
    "fp16": Form("fp16"),
    "bf16": Form("bf16"),
    "int8": Form("int8"),
    "int4": Form("int4"),
    "int3": Form("int3"),
    "int2": Form("int2"),
    "rank 64, fp16": Form("fp16", rank=64),
    "rank 16, fp16": Form("fp16", rank=16),
    "rank 4, fp16": Form("fp16", rank=4),
    "energy 0.99, fp16": Form("fp16", energy=0.99),
}
WEIGHTS = "open_clip_model.safetensors"


@dataclass(frozen=True)
class Row:
    """One task's vector in one form."""

    made: Extracted
    accuracy: float


def tuned_file(folder: Path, task: str, steps: int, rate: float) -> Path:
    """The weights of the built-in model fine-tuned on a task, from the folder if they are there."""
    base = sha256_of(builtin_model("tiny") / WEIGHTS)[:12]
    path = folder / f"{task}-{base}-{steps}-{rate:g}.safetensors"
    if not path.exists():
        weights = build_tiny.finetune(builtin_model("tiny"), task, steps, rate)
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path)
        print(f"fine-tuned on {task}", file=sys.stderr, flush=True)
    return path


def rows_of(base: Base, task: str, path: Path, output: Path) -> dict[str, Row]:
    """The test accuracy of base + vector, for every form of the vector."""
    model, tokenizer = build_tiny.open_model(builtin_model("tiny"))
    head = build_tiny.head_of(model, tokenizer, task)
    test = build_tiny.split_of(task, "test")
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rows = {"none": Row(Extracted("-", "", 0, 0, 0, 0, 0, 0, 0), score(model, head, test))}
    for name, form in FORMS.items():
        source = locate(parse_reference(str(path)))
        made = extract_to(output, task, base, source, Options(form=form))
        vector = open_vector(output)
        added = {n: start[n] + decode(vector.read(n)) for n in vector.names}
        model.load_state_dict(start | added)
        rows[name] = Row(made, score(model, head, test))
    return rows


def score(model: Any, head: torch.Tensor, test: build_tiny.Data) -> float:
    return build_tiny.accuracy(model.eval(), head, test)


def show(found: dict[str, dict[str, Row]]) -> None:
    """A line for each form: means over the tasks."""
    print("| form | kB | mean error | worst error | accuracy | against fp32 | worst task |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name in ("none", *FORMS):
        rows = [rows[name] for rows in found.values()]
        gaps = [rows[name].accuracy - rows["fp32"].accuracy for rows in found.values()]
        size = statistics.mean(row.made.bytes for row in rows) / 1e3
        errors = statistics.mean(row.made.mean_error for row in rows)
        worst = max(row.made.worst_error for row in rows)
        mean = statistics.mean(row.accuracy for row in rows)
        cells = [f"{size:.0f}", f"{errors:.2g}", f"{worst:.2g}", f"{mean:.2f}"]
        cells += [f"{statistics.mean(gaps):+.2f}", f"{min(gaps):+.2f}"]
        print(f"| {name} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", type=Path, help="keep the fine-tuned weights here")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--threads", type=int, default=build_tiny.THREADS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.work or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        base = open_base(locate(parse_reference("builtin:tiny")), "visual")
        found = {}
        for task in TASKS:
            path = tuned_file(folder, task, options.steps, options.rate)
            found[task] = rows_of(base, task, path, Path(temporary) / "vector.safetensors")
        show(found)


if __name__ == "__main__":
    main()
