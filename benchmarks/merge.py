"""Time, CPU time and peak memory of `atlas merge` beside mergekit and beside the bytes alone.

    python benchmarks/merge.py [--parameters 1e9] [--runs 5] [--mergekit /path/to/bin/python]
                               [--methods linear ties ...] [--contestants atlas floor ...]
                               [--models 3] [--threads N] [--work DIR]

Makes a Llama-shaped model in bf16 and fine-tunes of it (small random steps), reads them all once
so that they are in the page cache, and runs each contestant in turn, several times over. Prints
one JSON object with the medians by method and contestant (`--contestants` names some of them):

`atlas_first` with its defaults and an empty cache of digests, so that all inputs are hashed for
the lock file as well; `atlas`, the same once the digests are known; `mergekit` with its defaults,
and `mergekit_fast` with --lazy-unpickle --low-cpu-memory --async-write and no model card; `floor`,
which imports torch, touches every byte of the same inputs and writes as many bytes as the result
has.

`--single SIZE` measures a checkpoint that is one tensor of so many bytes instead, and `--growth`
2, 4, 8 and 16 models. `--inputs DIR` keeps the models there, and takes them if they are there.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

METHODS = (
    *("linear", "task_arithmetic", "slerp", "model_stock"),
    *("ties", "dare_ties", "della", "breadcrumbs"),
)
FAST = ("--lazy-unpickle", "--low-cpu-memory", "--async-write", "--no-write-model-card")
PARAMETERS: dict[str, Any] = {
    "slerp": {"t": 0.4},
    "model_stock": {},
    "linear": {"weight": 0.5},
    "task_arithmetic": {"weight": 0.5},
}
MAKE = """
import json, sys, torch, zlib
from pathlib import Path
from safetensors.torch import save_file
folder, parameters = Path(sys.argv[1]), float(sys.argv[2])
count, single = int(sys.argv[3]), int(sys.argv[4])
hash_of = lambda name: zlib.crc32(name.encode())
hidden, vocabulary = 2048, 32000
if parameters < 3e8:
    hidden, vocabulary = 512, 8000
inner = 11 * hidden // 4
layer = {
    "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (hidden // 4, hidden),
    "self_attn.v_proj": (hidden // 4, hidden), "self_attn.o_proj": (hidden, hidden),
    "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
    "mlp.down_proj": (hidden, inner),
    "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
}
size = lambda shape: torch.Size(shape).numel()
layers = max(1, round((parameters - 2 * vocabulary * hidden) / sum(map(size, layer.values()))))
shapes = {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
shapes["lm_head.weight"] = (vocabulary, hidden)
for n in range(layers):
    shapes |= {f"model.layers.{n}.{name}.weight": shape for name, shape in layer.items()}
if single:
    shapes = {"weight": (single // 2 // 4096, 4096)}
config = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
    "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": hidden // 64,
    "num_key_value_heads": hidden // 256, "vocab_size": vocabulary, "torch_dtype": "bfloat16",
    "rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}
for number in range(count + 1):
    target = folder / ("base" if number == 0 else f"model{number}")
    target.mkdir(parents=True)
    (target / "config.json").write_text(json.dumps(config))
    tensors = {}
    for name, (rows, *rest) in shapes.items():
        shape = (4096 if single else rows, *rest)  # repeated, since all of it in float32 is large
        base = torch.randn(shape, generator=torch.Generator().manual_seed(hash_of(name)))
        step = torch.randn(shape, generator=torch.Generator().manual_seed(hash_of(name) + number))
        made = (0.02 * base + (0.002 * step if number else 0)).bfloat16()
        tensors[name] = made.repeat(rows // 4096, 1) if single else made
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
"""
FLOOR = """
import os, sys, torch
torch.set_num_threads(1)
*inputs, output = sys.argv[1:]
out = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
for number, path in enumerate(inputs):
    size = os.path.getsize(path)
    for start in range(0, size, 8 << 20):
        length = min(8 << 20, size - start) // 8 * 8
        piece = torch.from_file(path, shared=False, size=size // 8, dtype=torch.int64)
        piece = piece[start // 8 : (start + length) // 8]
        if number:
            piece.sum()
        else:
            os.pwrite(out, piece.numpy(), start)
"""


def recipe(method: str, folder: Path, models: int) -> str:
    """The same recipe for both, in mergekit's words."""
    own = PARAMETERS.get(method, {"weight": 0.5, "density": 0.5})
    count = 1 if method == "slerp" else models
    per_model = own if method not in ("slerp", "model_stock") else {}
    entries = [{"model": str(folder / f"model{n + 1}")} for n in range(count)]
    for entry in entries:
        if per_model:
            entry["parameters"] = per_model  # type: ignore[assignment]
    found: dict[str, Any] = {"merge_method": method, "models": entries}
    if method != "linear":
        found["base_model"] = str(folder / "base")
    if method == "slerp":
        found["models"] = [{"model": str(folder / "base")}, *entries]
        found["parameters"] = own
    return json.dumps(found)


def read_all(folder: Path) -> None:
    """Have all inputs in the page cache."""
    for path in folder.glob("*/model.safetensors"):
        with path.open("rb", buffering=0) as file:
            while file.read(8 << 20):
                pass


def measure(command: list[str], environment: dict[str, str]) -> dict[str, float]:
    """Wall seconds, CPU seconds and peak MB of a command."""
    start = time.monotonic()
    process = subprocess.Popen(command, env=environment, stdout=-3, stderr=subprocess.PIPE)
    assert process.stderr
    said = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{command}: {said.decode()[-2000:]}")
    return {
        "wall": time.monotonic() - start,
        "cpu": usage.ru_utime + usage.ru_stime,
        "peak_mb": usage.ru_maxrss / 1024,
    }


def contestants(method: str, folder: Path, options: argparse.Namespace) -> dict[str, list[str]]:
    """The command of each, writing to folder/out."""
    path, out = folder / f"{method}.yaml", str(folder / "out")
    path.write_text(recipe(method, folder, options.models))
    # The installed package, which has the loops in C, not the sources in the current folder.
    ours = [sys.executable, "-P", "-m", "atlas_cli", "merge", str(path), "-o", out]
    ours += ["--threads", str(options.threads)] if options.threads else []
    names = ["base", *(f"model{n + 1}" for n in range(1 if method == "slerp" else options.models))]
    files = [str(folder / name / "model.safetensors") for name in names[method == "linear" :]]
    found = {"floor": [sys.executable, "-c", FLOOR, *files, str(folder / "out.bin")]}
    found |= {"atlas_first": ours, "atlas": ours}
    if options.mergekit:
        theirs = [str(Path(options.mergekit).parent / "mergekit-yaml"), str(path), out]
        found |= {"mergekit": [*theirs, "--no-copy-tokenizer"]}
        found |= {"mergekit_fast": [*theirs, "--no-copy-tokenizer", *FAST]}
    return found


def compare(method: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Medians of every contestant, run in turn."""
    found: dict[str, list[dict[str, float]]] = {}
    cache = {"ATLAS_CACHE": str(folder / "cache")}
    # Modules are compiled once, as those of an installed program are.
    fixed = {"HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": ""}
    commands = contestants(method, folder, options)
    for _ in range(options.runs):
        for name, command in commands.items():
            if options.contestants and name not in options.contestants:
                continue
            shutil.rmtree(folder / "out", ignore_errors=True)
            if name == "atlas_first":
                shutil.rmtree(folder / "cache", ignore_errors=True)
            read_all(folder)
            one = measure(command, {**os.environ, **fixed, **cache})
            found.setdefault(name, []).append(one)
    return {
        name: {key: round(statistics.median(run[key] for run in runs), 2) for key in runs[0]}
        for name, runs in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parameters", type=float, default=1e9)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--models", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--mergekit", help="python of an environment with mergekit")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--contestants", nargs="+", help="only these")
    parser.add_argument("--single", type=int, default=0, metavar="BYTES")
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--inputs", type=Path, metavar="DIR")
    options = parser.parse_args()
    result: dict[str, Any] = {"parameters": options.parameters, "runs": options.runs}
    with tempfile.TemporaryDirectory(dir=options.work, prefix="atlas-merge-") as name:
        folder = options.inputs or Path(name)
        most = 16 if options.growth else options.models
        make = [sys.executable, "-c", MAKE, str(folder), str(options.parameters)]
        if not (folder / "base").exists():
            subprocess.run([*make, str(most), str(options.single)], check=True)
        for count in (2, 4, 8, 16) if options.growth else (options.models,):
            options.models = count
            for method in options.methods:
                measured = compare(method, folder, options)
                result.setdefault(f"{count} models", {})[method] = measured
                sys.stderr.write(f"{count} models, {method}: {json.dumps(measured)}\n")
    json.dump(result, sys.stdout, indent=2)


if __name__ == "__main__":
    main()
