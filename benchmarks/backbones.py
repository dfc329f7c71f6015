"""Time and memory of learning and merging at the true sizes of CLIP's three usual backbones.

    python benchmarks/backbones.py ViT-B-32 [ViT-B-16] [ViT-L-14] [--vectors 4] [--work DIR]

The architectures are open_clip's, the weights random: figures say what a step costs, nothing of
accuracy. Task vectors are int8 files of the whole image tower, as the zoo's are kept. Prints one
JSON object for each backbone: `step` are the median seconds of a step of `fit` on --batch images
of 224 pixels, without the first, `step_cpu` those of all cores; `fit_mb` and `merge_mb` are the
peaks of the processes, `merge` the seconds of merging what was learned, from start to end.
A process's peak holds the vectors and, in a merge, pages of files that are mapped.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measuring import between, clocks

CLASSES = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("backbones", nargs="+", metavar="ARCHITECTURE")
    parser.add_argument("--vectors", type=int, default=4)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--work", type=Path, help="where models are made and kept")
    parser.add_argument("--child", choices=("make", "fit"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        for name in options.backbones:
            folder = (options.work or Path(temporary)) / name
            if options.child == "make":
                make(name, folder, options.vectors, options.batch)
            elif options.child == "fit":
                print(json.dumps(fit(folder, options)))
            else:
                print(json.dumps({"backbone": name, **measure(folder, options)}), flush=True)


def measure(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Make a model and its vectors, learn a few steps from them, and merge."""
    again = [sys.executable, __file__, folder.name, "--work", str(folder.parent)]
    for key in ("vectors", "batch", "accumulate", "steps"):
        again += [f"--{key}", str(getattr(options, key))]
    if not (folder / "base").is_dir():
        _peak([*again, "--child", "make"])
    learned, fit_mb, _ = _peak([*again, "--child", "fit"])
    merge = [sys.executable, "-m", "atlas_cli", "merge", str(folder / "run")]
    _, merge_mb, seconds = _peak([*merge, "-o", str(folder / "merged"), "--force", "-q"])
    found = {"vectors": options.vectors, "batch": options.batch, "accumulate": options.accumulate}
    row = {**json.loads(learned), "fit_mb": fit_mb, "merge": seconds, "merge_mb": merge_mb}
    return found | {key: round(value, 2) for key, value in row.items()}


def _peak(command: list[str]) -> tuple[str, float, float]:
    """What a process prints, its peak of memory in MB, and its seconds."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: failed")
    return said, used.ru_maxrss * 1024 / 1e6, time.perf_counter() - start


def make(name: str, folder: Path, vectors: int, images: int) -> None:
    """A model of open_clip with random weights, int8 vectors of it, and noisy images."""
    import numpy as np
    import torch
    from PIL import Image
    from safetensors.torch import save_file

    from atlas_cli import extract
    from atlas_cli.models.open_clip_import import architecture_named, open_clip

    torch.manual_seed(0)
    (folder / "base").mkdir(parents=True)
    weights = {n: t.contiguous() for n, t in open_clip.create_model(name).state_dict().items()}
    config = {"model_cfg": architecture_named(name), "preprocess_cfg": {"size": 224}}
    (folder / "base/open_clip_config.json").write_text(json.dumps(config))
    save_file(weights, folder / "base/open_clip_model.safetensors")
    (folder / "vectors").mkdir()
    tower = {n: t for n, t in weights.items() if n.startswith("visual.") and t.is_floating_point()}
    for number in range(vectors):
        moved = {n: t + 0.01 * t.std() * torch.randn_like(t) for n, t in tower.items()}
        save_file(moved, folder / "tuned.safetensors")
        target = folder / f"vectors/task{number}.safetensors"
        extract(
            folder / "base", folder / "tuned.safetensors", target, dtype="int8", name=target.stem
        )
    (folder / "tuned.safetensors").unlink()
    random = np.random.default_rng(0)
    for number in range(images):
        place = folder / f"photos/class {number % CLASSES}"
        place.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 256, (224, 224, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / f"{number}.png")


def fit(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """A few steps of fit; the first is left out of the median."""
    import atlas_cli as atlas

    marks = []

    def listen(event: object) -> None:
        if getattr(event, "step", None):
            marks.append(clocks())

    atlas.fit(
        folder / "photos",
        model=folder / "base",
        vectors=[folder / "vectors"],
        epochs=options.steps,
        min_steps=1,
        batch_size=options.batch,
        accumulate=options.accumulate,
        memory="8GiB",
        output=folder / "run",
        force=True,
        on_event=listen,
    )
    found = between(marks)
    return {"step": found["seconds"], "step_cpu": found["cpu"]}


if __name__ == "__main__":
    main()
