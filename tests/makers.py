"""Task-vector files made by hand, through the format and nothing else."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from atlas_cli.core.storage import (
    Block,
    BlockPart,
    Dense,
    Factors,
    Quantised,
    decode,
    factorise,
    quantise,
    relative_error,
)
from atlas_cli.vectors.format import BlockInfo, Header, to_metadata
from atlas_cli.vectors.writer import stored_tensors

LAYER = "visual.transformer.resblocks.{}.{}"
ATTENTION, MLP, BIAS = "attn.in_proj_weight", "mlp.c_fc.weight", "mlp.c_fc.bias"
_STORAGE = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}

FORMS: dict[str, Callable[[torch.Tensor], Block]] = {
    "fp32": Dense,
    "fp16": lambda values: Dense(values.half()),
    "int8": quantise,
    "factors": lambda values: factorise(values, rank=2),
}


def random_values(seed: int = 0, *, layers: int = 2, width: int = 8) -> dict[str, torch.Tensor]:
    """Small random blocks under the names of an image tower."""
    random = torch.Generator().manual_seed(seed)
    shapes = {"visual.class_embedding": (width,), "visual.proj": (width, 4)}
    for layer in range(layers):
        shapes[LAYER.format(layer, ATTENTION)] = (3 * width, width)
        shapes[LAYER.format(layer, MLP)] = (4 * width, width)
        shapes[LAYER.format(layer, BIAS)] = (4 * width,)
    return {name: 0.01 * torch.randn(shape, generator=random) for name, shape in shapes.items()}


def lora(seed: int, shape: tuple[int, int] = (24, 8), rank: int = 2) -> Factors:
    """Three low-rank parts in the thirds of the rows, as q, k and v of an adapter."""
    random = torch.Generator().manual_seed(seed)
    rows = shape[0] // 3
    parts = [
        BlockPart(
            third * rows,
            torch.randn(rows, rank, generator=random),
            torch.randn(rank, shape[1], generator=random),
        )
        for third in range(3)
    ]
    return Factors(shape, tuple(parts))


def write_vector(
    path: Path,
    blocks: Mapping[str, Block | torch.Tensor],
    *,
    exact: Mapping[str, torch.Tensor] | None = None,
    base_norm: float = 2.0,
    **changes: Any,
) -> Path:
    """A task-vector file; `changes` are fields of the header."""
    kept = {n: Dense(b) if isinstance(b, torch.Tensor) else b for n, b in blocks.items()}
    infos = tuple(
        _info(name, block, (exact or {}).get(name), base_norm) for name, block in kept.items()
    )
    header = dataclasses.replace(_header(path.stem, infos), **changes)
    tensors = {n: t.contiguous() for b in kept for n, t in stored_tensors(b, kept[b]).items()}
    save_file(tensors, path, to_metadata(header))
    return path


def _info(name: str, block: Block, exact: torch.Tensor | None, base_norm: float) -> BlockInfo:
    exact = decode(block) if exact is None else exact
    starts: tuple[int, ...] = ()
    match block:
        case Dense(values):
            storage = _STORAGE[values.dtype]
        case Quantised():
            storage = "int8"
        case Factors(_, parts):
            storage, starts = "factors", tuple(part.start for part in parts)
    length, error = exact.double().norm().item(), relative_error(exact, block)
    return BlockInfo(name, tuple(exact.shape), storage, length, base_norm, error, starts)


def _header(name: str, blocks: tuple[BlockInfo, ...]) -> Header:
    source = {
        "reference": "builtin:tiny",
        "commit": None,
        "sha256": {"model.safetensors": "ab" * 32},
    }
    return Header(
        name=name,
        base=source,
        finetuned={**source, "reference": f"./{name}", "sha256": {"m.safetensors": "cd" * 32}},
        architecture={
            "embed_dim": 32,
            "vision_cfg": {"layers": 2, "width": 8, "patch_size": 16, "image_size": 32},
        },
        activation="gelu",
        scope="visual",
        scale=1.0,
        fingerprint="f0" * 32,
        blocks=blocks,
        dropped=("visual.ln_post.bias",),
        atlas="0.1.0",
    )


def rewrite_header(path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Change the header of a file in place and leave its tensors alone."""
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["atlas"])
    change(header)
    save_file(load_file(path), path, {"format": "pt", "atlas": json.dumps(header)})
    return path


def write_moved_tiny(path: Path, *, seed: int = 0, size: float = 0.02) -> Path:
    """The task vector of the built-in model after a random step of that relative size."""
    from atlas_cli.sources.locate import builtin_model, locate, parse_reference
    from atlas_cli.vectors.bases import open_base
    from atlas_cli.vectors.extract import Options, extract_to

    random = torch.Generator().manual_seed(seed)
    weights = load_file(builtin_model("tiny") / "open_clip_model.safetensors")
    moved = {
        name: tensor.float() * (1 + size * torch.randn(tensor.shape, generator=random))
        if name.startswith("visual.")
        else tensor
        for name, tensor in weights.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    tuned = path.with_suffix(".tuned.safetensors")
    save_file(moved, tuned, {"format": "pt"})
    base = open_base(locate(parse_reference("builtin:tiny")), "visual")
    extract_to(path, path.stem, base, locate(parse_reference(str(tuned))), Options())
    tuned.unlink()
    return path
