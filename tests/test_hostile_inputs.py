"""Files of strangers are refused in one line: no program is started, no address is asked for, and
nothing is written but the output. An audit hook watches."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import write_images, write_open_clip
from faults import messages
from hostile import HOSTILE

_watched: list[list[tuple[str, str]]] = []
STARTED = (
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "os.forkpty",
    "socket.bind",
    "socket.connect",
    "socket.getaddrinfo",
    "socket.sendto",
)
CHANGED = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "os.symlink")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watched:
        return
    if event in (*STARTED, *CHANGED):
        _watched[-1].append(
            (event, os.fsdecode(arguments[0]) if event in CHANGED else str(arguments))
        )
    elif event == "open" and isinstance(arguments[0], str | bytes) and arguments[2] & WRITING:
        _watched[-1].append((event, os.fsdecode(arguments[0])))


@pytest.fixture(scope="module", autouse=True)
def hook() -> None:
    sys.addaudithook(_hook)


@contextlib.contextmanager
def watched() -> Iterator[list[tuple[str, str]]]:
    events: list[tuple[str, str]] = []
    _watched.append(events)
    try:
        yield events
    finally:
        _watched.clear()


@pytest.fixture
def refused(call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run a command that must refuse its input, and look at all that it did."""
    own = tmp_path / "own"
    own.mkdir()
    monkeypatch.setenv("TMPDIR", str(own))
    monkeypatch.setattr("tempfile.tempdir", str(own))
    # A folder is removed by the names in it, relative to a descriptor.
    places = (
        "open_clip_config.json",
        str(own),
        os.environ["ATLAS_CACHE"],
        str(tmp_path / "out"),
        os.devnull,
        os.environ[messages.LOG],  # where the tests themselves note what is refused
    )

    def check(*given: str | Path) -> str:
        with watched() as events:
            result = call(*given)
        outside = [e for e in events if e[0] in STARTED or not e[1].startswith(places)]
        outside = [e for e in outside if not e[1].endswith((".pyc", "__pycache__"))]
        outside = [e for e in outside if f"{tmp_path}/." not in e[1] and "__pycache__" not in e[1]]
        assert not outside, (given, outside)
        assert result.code in (1, 2, 3), (given, result)
        lines = [line for line in result.error_lines if not line.startswith("atlas: warning: ")]
        assert len(lines) == 1, (given, result.err)
        assert lines[0].startswith("atlas: error: "), (given, result.err)
        assert not (tmp_path / "out").exists()
        return lines[0]

    return check


# Configurations -------------------------------------------------------------------------------

CONFIGS: dict[str, tuple[tuple[str, ...], Any]] = {
    "a model of timm on the Hub": (("vision_cfg", "timm_model_name"), "hf_hub:evil/model"),
    "a model of timm in a folder": (("vision_cfg", "timm_model_name"), "local-dir:/etc"),
    "weights of timm": (("vision_cfg", "timm_model_pretrained"), True),
    "any file as vocabulary": (("text_cfg", "tokenizer_kwargs"), {"bpe_path": "/etc/passwd"}),
    "code of a tokenizer": (("text_cfg", "tokenizer_kwargs"), {"trust_remote_code": True}),
    "a tokenizer above": (("text_cfg", "hf_tokenizer_name"), "../../../.ssh"),
    "a tokenizer at the root": (("text_cfg", "hf_tokenizer_name"), "/etc"),
    "a text tower above": (("text_cfg", "hf_model_name"), "../.."),
    "an address as text tower": (("text_cfg", "hf_model_name"), "https://evil.example/x"),
    "no vision": (("vision_cfg",), None),
    "no text": (("text_cfg",), None),
    "a list for vision": (("vision_cfg",), [1]),
    "no width": (("vision_cfg", "width"), 0),
    "half a width": (("vision_cfg", "width"), 64.5),
    "a negative width": (("text_cfg", "width"), -8),
    "endless layers": (("vision_cfg", "layers"), 10_000_000),
    "layers as a float": (("vision_cfg", "layers"), 1e7),
    "a wide tower": (("text_cfg", "width"), 1_000_000),
    "a large vocabulary": (("text_cfg", "vocab_size"), 9_999_999),
    "an image of a million": (("vision_cfg", "image_size"), 1_000_000),
    "no patches": (("vision_cfg", "patch_size"), 0),
    "no embedding": (("embed_dim",), 0),
    "a word as embedding": (("embed_dim",), "many"),
    "an unknown key": (("weights_url",), "http://evil.example"),
    "an unknown key of vision": (("vision_cfg", "exec"), "id"),
    "a word as pooling": (("text_cfg", "pool_type"), "x" * 5000),
    "heads that do not divide": (("text_cfg", "heads"), 7),
}


def test_configurations(refused, tmp_path: Path):
    folder = write_open_clip(tmp_path / "model")
    whole = json.loads((folder / "open_clip_config.json").read_text())
    for what, (path, value) in CONFIGS.items():
        config = copy.deepcopy(whole)
        place = config["model_cfg"]
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        (folder / "open_clip_config.json").write_text(json.dumps(config))
        line = refused("eval", folder, "--data", "builtin:digits", "--shots", "1")
        assert len(line) < 400, what
    for text in (
        "null",
        "[]",
        "{",
        "{}",
        '{"model_cfg": null}',
        '{"model_cfg": {}}',
        "\udcff",
        "[" * 9999,
    ):
        content = text.encode("utf-8", "surrogateescape")
        (folder / "open_clip_config.json").write_bytes(content)
        refused("eval", folder, "--data", "builtin:digits", "--shots", "1")
    for preprocess in ({"std": [0, 0, 0]}, {"mean": ["x"] * 3}, {"size": -1}, {"mode": {}}):
        config = {**whole, "preprocess_cfg": preprocess}
        (folder / "open_clip_config.json").write_text(json.dumps(config))
        refused("eval", folder, "--data", "builtin:digits", "--shots", "1")


TRANSFORMERS = (
    *({"vision_config": None}, {"vision_config": {"hidden_size": 0}}, {"projection_dim": "x"}),
    *({"vision_config": {"num_attention_heads": 0}}, {"text_config": {"hidden_size": []}}),
    {"text_config": 5},
)


def test_configurations_of_transformers(refused, tmp_path: Path):
    folder = write_open_clip(tmp_path / "model")
    (folder / "open_clip_config.json").unlink()
    (folder / "preprocessor_config.json").write_text('{"image_mean": [0, 0, 0]}')
    for change in TRANSFORMERS:
        (folder / "config.json").write_text(json.dumps({"model_type": "clip", **change}))
        refused("eval", folder, "--data", "builtin:digits", "--shots", "1")


# Files ----------------------------------------------------------------------------------------


def _index(folder: Path, name: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))


def test_indexes_and_links(refused, tmp_path: Path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "out").symlink_to("/etc/passwd")
    os.mkfifo(folder / "pipe.safetensors")
    names = (
        "../x",
        "/etc/passwd",
        "a\0b",
        "\ud800",
        "loop",
        "out",
        "pipe.safetensors",
        "missing",
        "",
    )
    for name in names:
        _index(folder, name)
        refused("inspect", folder)
    for text in ("[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}', "{", "9" * 10_000):
        (folder / "model.safetensors.index.json").write_text(text)
        refused("inspect", folder)


def test_weights(refused, tmp_path: Path):
    path = tmp_path / "w.safetensors"
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    for header in (
        {"a": {**entry, "shape": [10**12]}},
        {"a": {**entry, "data_offsets": [0, 10**12]}},
        {"a": {**entry, "data_offsets": [4, 0]}},
        {"a": {**entry, "dtype": "F4096"}},
        {"a": {**entry, "shape": "x"}},
        {"a": entry, "__metadata__": {"x": 1}},
        {"a": None},
        [],
    ):
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
        refused("inspect", path)
    for content in (b"", b"\xff" * 8, struct.pack("<Q", 2**63), struct.pack("<Q", 10) + b"[" * 10):
        path.write_bytes(content)
        refused("inspect", path)


def test_pickles(refused, tmp_path: Path):
    for number, one in enumerate(list(HOSTILE.values())[:12]):
        folder = tmp_path / f"pickle{number}"
        folder.mkdir()
        refused("extract", "builtin:tiny", one.make(folder), "-o", tmp_path / "out")


RECIPES = (
    *("models: !!python/object/apply:os.system [id]", "models: &a [*a]", "models: " + "[" * 3000),
    *("a: b: c", "\0", "models: *x", "!!binary x", "- 1", "models: 2024-99-99", "{" * 100),
)


def test_recipes(refused, tmp_path: Path):
    recipe = tmp_path / "r.yaml"
    for command in ("eval", "merge"):
        more = ("-o", tmp_path / "out") if command == "merge" else ()
        for text in RECIPES:
            recipe.write_text(text)
            refused(command, recipe, *more)
        for content in (b"\xff\xfe", b"\x80abc"):
            recipe.write_bytes(content)
            refused(command, recipe, *more)


def test_images_and_tables(refused, tmp_path: Path):
    photos = write_images(tmp_path / "photos", count=2)
    whole = (photos / "cat" / "0.png").read_bytes()
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(%pipe%id) (w) file\n"
    for content in (
        eps,
        b"",
        whole[:60],
        b"\x89PNG\r\n\x1a\n" + b"\xff" * 99,
        b"P6 99999999 99999999 255\n",
    ):
        (photos / "cat" / "0.png").write_bytes(content)
        refused("eval", "builtin:tiny", "--data", photos, "--workers", "0")
    (photos / "cat" / "0.png").write_bytes(whole)
    table = tmp_path / "t.csv"
    for text in (
        "",
        "path\n",
        "path,label\n/dev/zero,a\n../x,b\n",
        'path,label\n"x,a\n',
        "label\na\n",
        "path,label\nx\0y,a\n",
    ):
        table.write_text(text)
        refused("eval", "builtin:tiny", "--data", f"csv:{table}")
    for text in ("{} {}", "{}{", "none", "{0.__class__}"):
        (photos / "templates.txt").write_text(text)
        refused("eval", "builtin:tiny", "--data", photos)
