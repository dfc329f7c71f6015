"""Images, models, vectors, runs and pickles, each wrong in its own way."""

from __future__ import annotations

import json
import math
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from inputs import (
    CONFIG,
    WEIGHTS,
    World,
    llama,
    packed,
    read_tensors,
    tiny_folder,
    with_numbers,
    write_adapter,
    write_files,
    write_llama,
    write_photos,
    write_tensors,
)


def write_bad(world: World) -> None:
    """Everything that is wrong in its own way."""
    bad = world.work / "bad"
    _write_bad_images(bad)
    _write_bad_models(world, bad)
    _write_bad_vectors(world, bad)
    _write_bad_runs(bad)
    _write_bad_pickles(world, bad)


def _write_bad_images(bad: Path) -> None:
    extra: dict[str, dict[str, str | bytes]] = {
        "names": {"classnames.txt": "cat\ndog\n"},
        "utf8": {"classnames.txt": b"\xff"},
        "templates": {"templates.txt": "a\n"},
        "broken": {"cat/0.png": b"no image"},
        "truncated": {"cat/a.png": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"},
        "notes": {"cat/notes.txt": "x"},
    }
    for name, files in extra.items():
        write_files(write_photos(bad / name), files)
    write_photos(write_photos(bad / "loose"), 1, (".",))
    (write_photos(bad / "emu") / "emu").mkdir()
    (bad / "nothing").mkdir()
    write_photos(bad / "onlytrain" / "train")
    write_photos(bad / "classes" / "train")
    write_photos(bad / "classes" / "val", 2, ("cat", "dog", "bird"))
    write_photos(bad / "missing" / "train", 2)
    write_photos(bad / "missing" / "test", 2, ("cat",))
    write_photos(bad / "one", 3, ("cat",))
    whole = (bad / "one" / "cat" / "0.png").read_bytes()
    (bad / "truncated" / "cat" / "0.png").write_bytes(whole[: len(whole) // 2])
    tables = {
        "column": "file,label\na,b\n",
        "rows": "path,label\n",
        "short": "path,label\na.png\n",
        "long": "path,label\na.png,cat,more\n",
        "blank": "path,label\n,cat\n",
        "quote": 'path,label\n"a',
        "split": "path,label,split\na.png,cat,train\nb.png,dog,train\n",
        "gone": "path,label\na.png,cat\nb.png,dog\n",
    }
    write_files(bad, {f"{name}.csv": text for name, text in tables.items()})


def _write_bad_models(world: World, bad: Path) -> None:
    tensors, proj = world.tensors, "visual.proj"
    short = {n: t for n, t in tensors.items() if not n.startswith("visual.ln_p")}
    world.folder("bad/shape", {**tensors, "visual.ln_post.weight": packed("F32", (9,), [1.0] * 9)})
    world.folder("bad/nan", with_numbers(tensors, proj, math.nan))
    world.folder("bad/lacks", short)
    world.folder("bad/more", {**tensors, "visual.more": packed("F32", (1,), [1.0])})
    world.folder("bad/activation", tensors, activation="quick_gelu")
    world.folder("bad/textonly", {n: t for n, t in tensors.items() if "visual" not in n})
    for name, content in {"empty": b"", "short": b"12345678", "ones": b"\xff" * 64}.items():
        write_files(bad / name, {CONFIG: world.config, WEIGHTS: content})
    cut = (tiny_folder() / WEIGHTS).read_bytes()[:-9]
    write_files(bad / "cut", {CONFIG: world.config, WEIGHTS: cut})
    configs = {"json": "{", "list": "[]", "nocfg": "{}", "huge": world.config}
    for name, text in configs.items():
        changed = text.replace('"size": 32', '"size": 64')
        write_files(bad / f"config-{name}", {CONFIG: changed})
        shutil.copy(tiny_folder() / WEIGHTS, bad / f"config-{name}" / WEIGHTS)
    write_files(bad / "two", {"a.safetensors": b"", "b.safetensors": b""})
    write_files(bad / "notclip", {"config.json": '{"model_type": "bert"}', "m.safetensors": b""})
    indexes = {"outside": "../x.safetensors", "absolute": "/etc/passwd", "gone": "gone.safetensors"}
    for name, shard in indexes.items():
        text = json.dumps({"weight_map": {"visual.a": shard}})
        write_files(bad / f"index-{name}", {"model.safetensors.index.json": text})
    write_files(bad / "index-empty", {"model.safetensors.index.json": '{"weight_map": {}}'})
    for seed in (1, 2):
        tensors = llama(seed)
        lacking = {n: t for n, t in tensors.items() if n != "lm_head.weight"}
        more = {"extra.weight": packed("F32", (2,), [1.0, 2.0])}
        more["model.norm.weight"] = packed("F32", (9,), [1.0] * 9)
        write_llama(bad / f"misfit{seed}", {**lacking, **more})
        write_llama(bad / f"nan{seed}", with_numbers(tensors, "lm_head.weight", math.nan))
        write_llama(bad / f"inf{seed}", with_numbers(tensors, "lm_head.weight", math.inf))
        write_llama(bad / f"half{seed}", llama(seed, "F16"))
    module = "visual.transformer.resblocks.1.mlp.c_fc"
    adapters: dict[str, dict[str, object]] = {
        "dora": {"use_dora": True},
        "bias": {"bias": "all"},
        "rank": {"r": 5},
        "surprise": {"surprise": True},
        "alpha": {"lora_alpha": None},
        "pattern": {"rank_pattern": {"(": 3}},
        "kind": {"peft_type": "LOKR"},
    }
    for name, changes in adapters.items():
        write_adapter(bad / f"adapter-{name}", module, 384, 96, **changes)
    write_adapter(bad / "adapter-shape", module, 383, 96)
    write_adapter(bad / "adapter-place", "visual.nowhere", 384, 96)
    (write_adapter(bad / "adapter-alone", module, 384, 96) / "adapter_config.json").unlink()


def _write_bad_vectors(world: World, bad: Path) -> None:
    path = world.work / "vectors" / "cars.safetensors"
    if not path.exists():
        return
    tensors, metadata = read_tensors(path)
    ill = with_numbers(tensors, "visual.proj", math.nan)
    write_tensors(bad / "vectors" / "nan.safetensors", ill, metadata)
    other = with_numbers(tensors, "visual.proj", 99.0)
    write_tensors(bad / "vectors" / "norm.safetensors", other, metadata)
    lacking = {name: tensor for name, tensor in tensors.items() if name != "visual.proj"}
    write_tensors(bad / "vectors" / "lacks.safetensors", lacking, metadata)
    changes: dict[str, Callable[[dict[str, Any]], Any]] = {
        "base": lambda header: header.update(fingerprint="0f" * 32),
        "damaged": lambda header: header["blocks"][0].update(norm=math.nan),
        "format": lambda header: header.update(version=99),
        "scope": lambda header: header.update(scope="text"),
        "empty": lambda header: header.clear(),
    }
    for name, change in changes.items():
        header = json.loads(metadata["atlas"])
        change(header)
        path = bad / "vectors" / f"{name}.safetensors"
        write_tensors(path, tensors, {"format": "pt", "atlas": json.dumps(header)})


def _write_bad_runs(bad: Path) -> None:
    config = '{"command": "fit", "recipe": {"seed": 0}, "data": [{"name": "photos"}]}'
    row = {"stage": "all", "number": 1, "epoch": 1, "loss": 0.25, "accuracy": 0.5, "rate": 0.1}
    recipe = "merge_method: atlas\nbase_model: m\nvectors: [{name: cars, file: f, sha256: a}]\n"
    whole = {
        "config.json": config,
        "metrics.jsonl": json.dumps(row) + "\n",
        "recipe.yaml": f"# Learned.\n{recipe}coefficients: {{cars: {{visual.proj: 0.5}}}}\n",
        "result.json": '{"zero_shot": 0.5, "learned": 1.0}',
    }
    changes = {
        "whole": {},
        "json": {"config.json": "{"},
        "list": {"config.json": "[]"},
        "config": {"config.json": '{"command": "fit", "recipe": {}}'},
        "metrics": {"metrics.jsonl": "nonsense\n"},
        "row": {"metrics.jsonl": '{"loss": 1}\n'},
        "result": {"result.json": '{"accuracy": 3, "tasks": []}'},
        "classes": {"result.json": '{"classes": [1]}'},
        "recipe": {"recipe.yaml": f"{recipe}coefficients: {{cars: {{visual.proj: big}}}}\n"},
        "linear": {"recipe.yaml": "merge_method: linear\nmodels: []\n"},
    }
    for name, files in changes.items():
        write_files(bad / "runs" / name, {**whole, **files})
    begun = {name: whole[name] for name in ("config.json", "metrics.jsonl")}
    write_files(bad / "runs" / "begun", begun)
    tables = {
        "none": "{}",
        "number": '{"a": 1}',
        "text": '{"a": {"b": "c"}}',
        "nothing": '{"a": {}}',
        "nonsense": "{nonsense",
        "infinite": '{"a": {"b": Infinity}}',
    }
    write_files(bad / "tables", {f"{name}.json": text for name, text in tables.items()})
    scores = {
        "words": "top-1: 90 %",
        "list": "[]",
        "row": '{"atlas": "0", "models": [], "results": [{"model": "m"}]}',
        "none": '{"atlas": "0", "models": [], "results": []}',
    }
    write_files(bad / "scores", {f"{name}.json": text for name, text in scores.items()})


class _Hostile:
    """What would run a program if it was unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch marker",)


def _write_bad_pickles(world: World, bad: Path) -> None:
    whole = (world.work / "in" / "pickled" / "state.pt").read_bytes()
    write_files(
        bad / "pickles",
        {
            "hostile.pt": pickle.dumps({"state_dict": _Hostile()}),
            "numbers.pt": pickle.dumps({"a": 1}),
            "cut.pt": whole[: len(whole) // 2],
            "garbage.pt": bytes(range(256)),
            "page.pt": "<!doctype html><html></html>",
            "pointer.pt": "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
            "empty.pt": b"",
            "empty.safetensors": b"",
        },
    )
