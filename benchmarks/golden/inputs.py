"""Models, images and adapters, made by the standard library alone."""

from __future__ import annotations

import array
import importlib
import importlib.util
import itertools
import json
import math
import os
import random
import shutil
import struct
import time
import traceback
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
WEIGHTS, CONFIG = "open_clip_model.safetensors", "open_clip_config.json"

Stored = tuple[str, tuple[int, ...], bytes]  # dtype, shape, bytes
_CODES = {"F16": "e", "F32": "f"}
_NOISE = 8191  # numbers that repeat in large tensors


def read_tensors(path: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """The tensors of a safetensors file, and its metadata."""
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        start, stop = (8 + length + offset for offset in entry["data_offsets"])
        tensors[name] = (entry["dtype"], tuple(entry["shape"]), content[start:stop])
    return tensors, metadata


def write_tensors(
    path: Path, tensors: Mapping[str, Stored], metadata: Mapping[str, str] | None = None
) -> Path:
    """A safetensors file."""
    header: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
    place = 0
    for name, (dtype, shape, content) in tensors.items():
        offsets = [place, place := place + len(content)]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
    text = json.dumps(header).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(t[2] for t in tensors.values()))
    return path


def unpacked(stored: Stored) -> tuple[float, ...]:
    """The numbers of a tensor."""
    dtype, shape, content = stored
    return struct.unpack(f"<{math.prod(shape)}{_CODES[dtype]}", content)


def packed(dtype: str, shape: tuple[int, ...], values: Sequence[float]) -> Stored:
    """Numbers as a tensor; bfloat16 is cut off, not rounded."""
    if dtype == "BF16":
        halves = array.array("H", struct.pack(f"<{len(values)}f", *values))
        return dtype, shape, halves[1::2].tobytes()
    return dtype, shape, struct.pack(f"<{len(values)}{_CODES[dtype]}", *values)


def noise(seed: object, count: int) -> Iterator[float]:
    """Normal numbers, which repeat if there are very many."""
    dice = random.Random(str(seed))
    few = [dice.gauss(0, 1) for _ in range(min(count, _NOISE))]
    return itertools.islice(itertools.cycle(few), count)


def moved(
    tensors: Mapping[str, Stored], seed: int, size: float, prefix: str = "", dtype: str = ""
) -> dict[str, Stored]:
    """The tensors after a random step of that relative size."""
    found = dict(tensors)
    for name, (kind, shape, content) in tensors.items():
        if name.startswith(prefix):
            values = unpacked((kind, shape, content))
            steps = noise((seed, name), len(values))
            after = [value * (1 + size * step) for value, step in zip(values, steps, strict=True)]
            found[name] = packed(dtype or kind, shape, after)
    return found


def with_numbers(tensors: Mapping[str, Stored], name: str, *start: float) -> dict[str, Stored]:
    """The tensors with other numbers at the start of one."""
    dtype, shape, _ = tensors[name]
    values = [*start, *unpacked(tensors[name])[len(start) :]]
    return {**tensors, name: packed(dtype, shape, values)}


def write_png(path: Path, pixels: bytes, size: int) -> None:
    """A square image in colour."""
    rows = b"".join(b"\0" + pixels[n * size * 3 : (n + 1) * size * 3] for n in range(size))
    parts = (b"IHDR", struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)), (b"IDAT", rows)
    content = b"\x89PNG\r\n\x1a\n"
    for kind, data in (*parts, (b"IEND", b"")):
        body = kind + (zlib.compress(data) if kind == b"IDAT" else data)
        content += struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def write_photos(
    folder: Path, count: int = 3, classes: Sequence[str] = ("cat", "dog", "fish"), turn: int = 0
) -> Path:
    """Noise that is brighter in another channel for each class."""
    for channel, name in enumerate(classes):
        for number in range(count):
            dice = random.Random(f"{turn} {name} {number}")
            pixels = bytearray(value * 5 // 8 for value in dice.randbytes(36 * 36 * 3))
            for place in range((channel + turn) % 3, len(pixels), 3):
                pixels[place] += 90
            write_png(folder / name / f"{number}.png", bytes(pixels), 36)
    return folder


def write_files(folder: Path, texts: Mapping[str, str | bytes]) -> Path:
    """Files by their names."""
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def llama(seed: int, dtype: str = "F32", width: int = 8, layers: int = 3) -> dict[str, Stored]:
    """Small random tensors under Llama's names; those of other seeds are near those of seed 0."""
    shapes = {"model.embed_tokens.weight": (20, width), "model.norm.weight": (width,)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes[f"{prefix}self_attn.q_proj.weight"] = (width, width)
        shapes[f"{prefix}mlp.up_proj.weight"] = (2 * width, width)
        shapes[f"{prefix}input_layernorm.weight"] = (width,)
    shapes["lm_head.weight"] = (20, width)
    found = {}
    for name, shape in shapes.items():
        first, step = (noise((number, name), math.prod(shape)) for number in (0, seed))
        size = 0.1 * bool(seed)
        values = [a + size * b for a, b in zip(first, step, strict=True)]
        found[name] = packed(dtype, shape, values)
    return found


def write_llama(folder: Path, tensors: Mapping[str, Stored]) -> Path:
    """A folder as transformers writes it."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    write_files(folder, {"config.json": json.dumps({**config, "torch_dtype": "float32"})})
    vocabulary = {f"word{number}": number for number in range(20)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "word0"}
    write_files(folder, {"tokenizer.json": json.dumps({"version": "1.0", "model": model})})
    write_tensors(folder / "model.safetensors", tensors)
    return folder


def clip_shapes(width: int = 32, layers: int = 2) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a small CLIP model of transformers."""
    yield from {"logit_scale": (), "visual_projection.weight": (24, width)}.items()
    yield "text_projection.weight", (24, width)
    yield "text_model.embeddings.token_embedding.weight", (49408, width)
    yield "text_model.embeddings.position_embedding.weight", (16, width)
    yield "vision_model.embeddings.class_embedding", (width,)
    yield "vision_model.embeddings.patch_embedding.weight", (width, 3, 16, 16)
    yield "vision_model.embeddings.position_embedding.weight", (5, width)
    norms = ["text_model.final_layer_norm"]
    norms += [f"vision_model.{name}" for name in ("pre_layrnorm", "post_layernorm")]
    for tower, layer in itertools.product(("text", "vision"), range(layers)):
        prefix = f"{tower}_model.encoder.layers.{layer}."
        norms += [f"{prefix}layer_norm{number}" for number in (1, 2)]
        for module in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield f"{prefix}self_attn.{module}.weight", (width, width)
            yield f"{prefix}self_attn.{module}.bias", (width,)
        yield from {f"{prefix}mlp.fc1.weight": (2 * width, width)}.items()
        yield from {f"{prefix}mlp.fc1.bias": (2 * width,)}.items()
        yield from {f"{prefix}mlp.fc2.weight": (width, 2 * width)}.items()
        yield from {f"{prefix}mlp.fc2.bias": (width,)}.items()
    for norm in norms:
        yield from ((f"{norm}.{part}", (width,)) for part in ("weight", "bias"))


CLIP_TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
CLIP_TOWER |= {"num_attention_heads": 2, "hidden_act": "gelu"}  # type: ignore[dict-item]
CLIP_CONFIG = {
    "architectures": ["CLIPModel"],
    "model_type": "clip",
    "projection_dim": 24,
    "vision_config": {**CLIP_TOWER, "image_size": 32, "patch_size": 16},
    "text_config": {**CLIP_TOWER, "max_position_embeddings": 16, "vocab_size": 49408},
}


def write_clip(folder: Path, seed: int) -> Path:
    """A folder of a CLIP model as transformers writes it."""
    tensors = {}
    for name, shape in clip_shapes():
        one = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        first, step = (noise((number, name), math.prod(shape)) for number in ("clip", seed))
        values = [one + 0.05 * a + 0.004 * b for a, b in zip(first, step, strict=True)]
        tensors[name] = packed("F32", shape, values)
    half = {"size": 32, "crop_size": 32, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    texts = {"config.json": CLIP_CONFIG, "preprocessor_config.json": half}
    write_files(folder, {name: json.dumps(text) for name, text in texts.items()})
    write_tensors(folder / "model.safetensors", tensors)
    return folder


def tiny_folder() -> Path:
    """Where the built-in model is."""
    package = importlib.import_module("atlas_cli")
    for place in package.__path__:
        for path in sorted(Path(place).rglob(f"tiny/{WEIGHTS}")):
            return path.parent
    raise SystemExit("atlas has no built-in model")


@dataclass(frozen=True)
class World:
    """The built-in model's tensors, and the folder that every case runs in."""

    work: Path
    tensors: dict[str, Stored]
    metadata: dict[str, str]
    config: str

    def folder(self, name: str, tensors: Mapping[str, Stored], **metadata: str) -> Path:
        """A model as open_clip keeps it."""
        write_files(self.work / name, {CONFIG: self.config})
        write_tensors(self.work / name / WEIGHTS, tensors, {**self.metadata, **metadata})
        return self.work / name


def write_world(work: Path) -> World:
    """The inputs of cases that are meant to succeed."""
    tensors, metadata = read_tensors(tiny_folder() / WEIGHTS)
    world = World(work, tensors, metadata, (tiny_folder() / CONFIG).read_text())
    only = shutil.ignore_patterns("*.md")
    shutil.copytree(ROOT / "recipes", work / "recipes", ignore=only)
    write_files(work / "recipes", {"README.md": "# Recipes\n\n| key | type |\n| --- | - |\n"})
    (work / "out").mkdir()
    world.folder("in/base", tensors)
    world.folder("in/far", moved(tensors, 9, 1.5))
    for seed, name in enumerate(("cars", "signs"), start=1):
        world.folder(name, moved(tensors, seed, 0.05))
        tuned = moved(tensors, seed, 0.02, "visual.", "F32")
        write_tensors(work / "in" / "tuned" / f"{name}.safetensors", tuned)
    for seed in range(4):
        write_llama(work / "in" / f"m{seed}", llama(seed))
        write_llama(work / "in" / f"b{seed}", llama(seed, "BF16", 24))
    for seed in (1, 2):
        write_clip(work / "in" / f"clip{seed}", seed)
    write_photos(work / "in" / "shots", 4)
    write_photos(work / "in" / "control", 2, turn=1)
    write_photos(work / "in" / "pets" / "train", 4)
    write_photos(work / "in" / "pets" / "val", 2, turn=3)
    write_photos(work / "in" / "flat", 6, (".",))
    write_photos(work / "in" / "Cars", 4)
    _write_table(work / "in" / "shots.csv", work / "in" / "shots")
    write_adapter(work / "in" / "adapter", "visual.transformer.resblocks.1.mlp.c_fc", 384, 96)
    write_adapter(work / "in" / "lora", "model.layers.1.mlp.up_proj", 16, 8)
    write_pickles(world)
    return world


def _write_table(path: Path, folder: Path) -> None:
    images = sorted(folder.rglob("*.png"))
    rows = [f"{image.relative_to(path.parent)},{image.parent.name}" for image in images]
    path.write_text("path,label\n" + "\n".join(rows) + "\n")


def write_adapter(folder: Path, module: str, rows: int, columns: int, **changes: object) -> Path:
    """A LoRA adapter of one module, as peft writes it."""
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, **changes}
    write_files(folder, {"adapter_config.json": json.dumps(settings)})
    shapes = {"lora_A": (2, columns), "lora_B": (rows, 2)}
    factors = {
        f"base_model.model.{module}.{part}.weight": packed(
            "F32", shape, [0.05 * value for value in noise(part, math.prod(shape))]
        )
        for part, shape in shapes.items()
    }
    write_tensors(folder / "adapter_model.safetensors", factors)
    return folder


def write_pickles(world: World) -> None:
    """Checkpoints by torch.save, made by a child so that this process stays as it is."""
    child = os.fork()
    if not child:
        try:
            _save_pickles(world)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, "the checkpoints could not be written"


def _save_pickles(world: World) -> None:
    torch = importlib.import_module("torch")
    tuned, _ = read_tensors(world.work / "in" / "tuned" / "cars.safetensors")
    visual = {
        name: torch.tensor(unpacked(stored)).reshape(stored[1])
        for name, stored in tuned.items()
        if name.startswith("visual.")
    }
    folder = world.work / "in" / "pickled"
    folder.mkdir()
    torch.save({f"model.{name}": t for name, t in visual.items()}, folder / "state.pt")
    training = {"epoch": 3, "state_dict": {f"module.{name}": t for name, t in visual.items()}}
    torch.save(training, folder / "epoch.pt", _use_new_zipfile_serialization=False)
    when = {"state_dict": visual, "when": time.strptime("2024", "%Y")}
    torch.save(when, folder / "when.pt")
    torch.save(torch.nn.Linear(4, 2).state_dict() | {"weight": torch.ones(2, 4)}, folder / "h.pt")
    torch.save({"bias": torch.ones(2), "weight": torch.ones(2, 4)}, folder / "head.pt")
