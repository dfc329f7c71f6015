"""A stack of 44 layers of a 7 B model: how long its plan takes, and within which memory it streams.

    python benchmarks/stack.py [--work DIR] [--write]

The inputs are two Llamas of 7 B shape in bf16 whose values are a hole in the file: nothing but the
header is on disk. Prints one JSON object with the CPU seconds, wall seconds and peak MB of
`atlas merge --dry-run`, and with `--write` of the merge itself, which writes 18 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from merge import measure

HIDDEN, INNER, LAYERS, TOKENS = 4096, 11008, 32, 32000
LAYER = {
    **{f"self_attn.{which}_proj": (HIDDEN, HIDDEN) for which in "qkvo"},
    **{f"mlp.{which}_proj": (INNER, HIDDEN) for which in ("gate", "up")},
    "mlp.down_proj": (HIDDEN, INNER),
    "input_layernorm": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
}


def write_hollow(folder: Path) -> None:
    """A model of which only the header is written."""
    shapes = {"model.embed_tokens": (TOKENS, HIDDEN), "model.norm": (HIDDEN,)}
    shapes["lm_head"] = (TOKENS, HIDDEN)
    for number in range(LAYERS):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in LAYER.items()}
    entries, end = {}, 0
    for name, shape in shapes.items():
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        place = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        entries[f"{name}.weight"] = place
        end += size
    text = json.dumps(entries).encode()
    folder.mkdir()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    config |= {"num_hidden_layers": LAYERS, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--work", type=Path)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.work, prefix="atlas-stack-") as name:
        folder = Path(name)
        for model in ("a", "b"):
            write_hollow(folder / model)
        ends = {"a": [0, 24], "b": [12, 32]}
        sources = [{"model": str(folder / who), "layer_range": ends[who]} for who in ends]
        recipe = {"merge_method": "passthrough", "slices": [{"sources": [s]} for s in sources]}
        (folder / "r.yaml").write_text(json.dumps(recipe))
        out = str(folder / "out")
        command = [
            sys.executable,
            "-P",
            "-m",
            "atlas_cli",
            "merge",
            str(folder / "r.yaml"),
            "-o",
            out,
        ]
        environment = {**os.environ, "ATLAS_CACHE": str(folder / "cache")}
        result = {"plan": measure([*command, "--dry-run"], environment)}
        if options.write:
            result["write"] = measure(command, environment)
    json.dump(result, sys.stdout, indent=2)


if __name__ == "__main__":
    main()
