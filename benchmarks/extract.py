"""Memory and time of `atlas extract` on two random ViT-B/32 image towers in fp32 safetensors.

    python benchmarks/extract.py [--runs 7] [--work DIR]

Prints one JSON object. `peak_mb` is what the first extraction adds to an interpreter with torch
loaded, mapped pages of the inputs included; the goal is at most 400. Times are taken in turn:
`floor` reads both files and writes one of the vector's size, `hashed` takes the sha256 of both
files, which a vector must name, in two threads beside that writing; `first` extracts with an empty
cache, `next` after another model of the same base was extracted. `ratio` is the median over that of
the floor, `best` the same of the quickest runs; the goal is at most 1.5. `cpu_seconds` are those of
all threads, in the run that took the fewest: they mean more than the others on a busy machine.

With the inputs in memory the floor is little more than a copy of memory, and sha256 is most of
the rest: at first of both files, later of the fine-tuned one. One core hashes
`sha256_gb_per_second`. On two cores `hashed` bounds what `first` can come to.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

WIDTH, LAYERS, PATCH, GRID, EMBED = 768, 12, 32, 7, 512
CONFIG = {
    "model_cfg": {
        "embed_dim": EMBED,
        "quick_gelu": True,
        "vision_cfg": {"image_size": 224, "layers": LAYERS, "width": WIDTH, "patch_size": PATCH},
        "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 512, "layers": 12},
    },
    "preprocess_cfg": {"size": 224},
}
PIECE = 8 << 20


def shapes() -> dict[str, tuple[int, ...]]:
    """The 152 blocks of the image tower of ViT-B/32."""
    found: dict[str, tuple[int, ...]] = {
        "visual.class_embedding": (WIDTH,),
        "visual.positional_embedding": (GRID * GRID + 1, WIDTH),
        "visual.proj": (WIDTH, EMBED),
        "visual.conv1.weight": (WIDTH, 3, PATCH, PATCH),
    }
    matrices = {"attn.in_proj_": (3, 1), "attn.out_proj.": (1, 1)}
    matrices |= {"mlp.c_fc.": (4, 1), "mlp.c_proj.": (1, 4)}
    for layer in range(LAYERS):
        prefix = f"visual.transformer.resblocks.{layer}."
        for name, (rows, columns) in matrices.items():
            found[f"{prefix}{name}weight"] = (rows * WIDTH, columns * WIDTH)
            found[f"{prefix}{name}bias"] = (rows * WIDTH,)
    norms = [f"transformer.resblocks.{n}.ln_{k}" for n in range(LAYERS) for k in (1, 2)]
    for name in (*norms, "ln_pre", "ln_post"):
        found |= {f"visual.{name}.{kind}": (WIDTH,) for kind in ("weight", "bias")}
    return found


def make(folder: Path) -> None:
    """Three models: one random, one a small step away from it, and one a step further."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    tensors = {name: 0.02 * torch.randn(shape) for name, shape in shapes().items()}
    for name in ("base", "finetuned", "another"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "open_clip_config.json").write_text(json.dumps(CONFIG))
        save_file(tensors, folder / name / "open_clip_model.safetensors")
        tensors = {n: tensor + 1e-3 * torch.randn(tensor.shape) for n, tensor in tensors.items()}


def floor(folder: Path, output: Path, size: int) -> None:
    """Read both models and write as many bytes as the vector has."""
    buffer = memoryview(bytearray(PIECE))
    for name in ("base", "finetuned"):
        with (folder / name / "open_clip_model.safetensors").open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    write(output, size)


def write(output: Path, size: int) -> None:
    """Write that many bytes, as a file that appears at once."""
    buffer = memoryview(bytearray(PIECE))
    part = output.with_suffix(".part")
    with part.open("wb", buffering=0) as file:
        for start in range(0, size, PIECE):
            file.write(buffer[: min(PIECE, size - start)])
    part.replace(output)


def hashed(folder: Path, output: Path, size: int) -> None:
    """Hash both models, one in a thread each, and write as many bytes as the vector has."""
    from atlas_cli.io.files import sha256_of

    with ThreadPoolExecutor(2) as pool:
        for name in ("base", "finetuned"):
            pool.submit(sha256_of, folder / name / "open_clip_model.safetensors")
        write(output, size)


def memory(field: str) -> int:
    """A line of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def extract(folder: Path, output: Path, name: str = "finetuned") -> None:
    from atlas_cli.sources.locate import locate, parse_reference
    from atlas_cli.vectors.bases import open_base
    from atlas_cli.vectors.extract import Options, extract_to

    base, finetuned = (locate(parse_reference(str(folder / n))) for n in ("base", name))
    extract_to(output, "random", open_base(base, "visual"), finetuned, Options())


def evict(folder: Path) -> None:
    """Have the models read from the disk again, rather than from memory."""
    for name in ("base", "finetuned"):
        with (folder / name / "open_clip_model.safetensors").open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def prepare(folder: Path, name: str, *, cached: bool) -> None:
    """The cache as a run of that name finds it, and no output, whose removal would take time."""
    shutil.rmtree(folder / "cache", ignore_errors=True)
    if name == "next":
        shutil.copytree(folder / "cache-of-another", folder / "cache")
    if not cached:
        evict(folder)
    (folder / "out.safetensors").unlink()


Clocks = tuple[float, float]  # seconds of the wall and of all threads


def clocked(work: Callable[[], object]) -> Clocks:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def measure_times(folder: Path, runs: int, *, cached: bool) -> dict[str, dict[str, float]]:
    """Seconds of the floor and of extracting, taken in turn after one round that is not counted."""
    output = folder / "out.safetensors"
    size = output.stat().st_size
    work: dict[str, Callable[[], object]] = {
        "floor": lambda: floor(folder, output, size),
        "hashed": lambda: hashed(folder, output, size),
        "first": lambda: extract(folder, output),
        "next": lambda: extract(folder, output),
    }
    times: dict[str, list[Clocks]] = {name: [] for name in work}
    for _ in range(runs + 1):
        for name, found in times.items():
            prepare(folder, name, cached=cached)
            found.append(clocked(work[name]))
    return {name: summary(found[1:], times["floor"][1:]) for name, found in times.items()}


def summary(found: list[Clocks], floors: list[Clocks]) -> dict[str, float]:
    """Medians and bests of some runs, and what they are of those of the floor."""
    (seconds, least), (cost, bare) = (
        (statistics.median(wall for wall, _ in runs), min(wall for wall, _ in runs))
        for runs in (found, floors)
    )
    row = {"seconds": round(seconds, 3), "cpu_seconds": round(min(cpu for _, cpu in found), 3)}
    return row | {"ratio": round(seconds / cost, 2), "best": round(least / bare, 2)}


def hashing() -> float:
    """How many GB of sha256 one core takes in a second."""
    content = bytes(64 << 20)
    start = time.perf_counter()
    hashlib.sha256(content).digest()
    return round(len(content) / (time.perf_counter() - start) / 1e9, 2)


def measure(folder: Path, runs: int) -> dict[str, object]:
    """In a process of its own: the peak of the first run, then times."""
    import atlas_cli.vectors.extract  # noqa: F401

    output = folder / "out.safetensors"
    os.environ["ATLAS_CACHE"] = str(folder / "cache")
    shutil.rmtree(folder / "cache", ignore_errors=True)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of the imports
    before = memory("VmRSS")
    extract(folder, output)
    peak = memory("VmHWM") - before
    os.environ["ATLAS_CACHE"] = str(folder / "cache-of-another")
    extract(folder, output, "another")
    os.environ["ATLAS_CACHE"] = str(folder / "cache")
    found: dict[str, object] = {
        "parameters": sum(math.prod(shape) for shape in shapes().values()),
        "vector_mb": round(output.stat().st_size / 1e6, 1),
        "peak_mb": round(peak / 1e6, 1),
    }
    for name, cached in (("disk", False), ("memory", True)):
        found[f"from_{name}"] = measure_times(folder, runs, cached=cached)
    found |= {"sha256_gb_per_second": hashing(), "cores": os.cpu_count()}
    return found | {"load": os.getloadavg()[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--work", type=Path, help="keep the models here")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.runs), indent=2))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.work or Path(temporary)
        if not (folder / "another").exists():
            make(folder)
            time.sleep(3)  # younger files are not remembered
        command = [sys.executable, __file__, "--measure", str(folder), "--runs", str(options.runs)]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
