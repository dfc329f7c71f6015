"""Mistakes that no other test makes; a run of all tests lists what is missing."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import HALF, TINY_CONFIG
from faults import messages

from atlas_cli.core.compose import by_partition
from atlas_cli.datasets.dataset import open_dataset
from atlas_cli.errors import (
    AtlasError,
    CheckpointError,
    DataError,
    MismatchError,
    UsageError,
    install_hint,
)
from atlas_cli.io.tensors import LazyTensor
from atlas_cli.models.folders import check_config
from atlas_cli.models.heads import head_from_text
from atlas_cli.models.tensor_names import to_open_clip
from atlas_cli.registry import BASES, MERGE_METHODS, find_basis

TINY = ("--model", "builtin:tiny")
TTA = (*TINY, "--vectors", "builtin:letters", "--online", "--predictions", "p.csv")
COMMANDS = {
    "--prompts of which data?": ("data", "--prompts"),
    "no recipe given; name a file": ("merge", "-o", "out"),
    "pull: no set given": ("zoo", "pull"),
    "--push publishes files; name one with -o, not -": (
        *("extract", "builtin:tiny", "builtin:tiny", "-o", "-", "--push", "owner/name"),
    ),
    "--push publishes task vectors; atlas push publishes an adapter": (
        *("extract", "builtin:tiny", "builtin:tiny", "-o", "out", "--lora", "4"),
        *("--push", "owner/name"),
    ),
    "--vector and --vectors-dir both say where": (
        *("finetune", "builtin:digits", *TINY, "--vector", "a.safetensors", "--vectors-dir", "b"),
    ),
    "--online prints its predictions": ("tta", *TTA),
    "hf:one two: expected hf:OWNER/NAME": ("eval", "builtin:tiny", "--data", "hf:one two"),
}


def test_an_error_that_nothing_produces_is_listed(
    call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    notes, package = tmp_path / "notes", tmp_path / "package"
    monkeypatch.setenv(messages.LOG, str(notes))
    monkeypatch.setattr(messages, "_noted", set())
    assert call("merge", tmp_path / "none.yaml", "-o", tmp_path / "out").code == 2
    package.mkdir()
    (package / "a.py").write_text(
        'def f():\n    warn("no such recipe: x, sadly")\n    warn("no such recipe: ")\n'
        '    raise UsageError("never")\n'
    )
    errors, others = messages.missing(notes, package)
    assert errors == ["package/a.py:4: UsageError('never')"]
    assert others == ["package/a.py:2: 'no such recipe: x, sadly'"]
    (line,) = (s.line for s in messages.sites() if s.whole and "no such recipe" in s.words)
    never, _ = messages.missing(notes)
    assert len(never) > 100
    assert f"atlas_cli/cli/console.py:{line}: UsageError(f'no such recipe: {{name}}')" not in never
    with notes.open("a") as file:
        file.write(json.dumps([str(package / "a.py"), 4]) + "\n")
    assert messages.missing(notes, package)[0] == []


def test_commands_that_contradict_themselves_are_told_so(
    call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    for message, words in COMMANDS.items():
        result = call(*words)
        assert (result.code, result.out, len(result.error_lines)) == (2, "", 1), result.err
        assert message in result.err
    assert list(tmp_path.iterdir()) == []


def test_every_hint_names_packages_of_an_extra_that_there_is():
    """pip finds them anywhere, and atlas itself perhaps nowhere."""
    root = Path(__file__).parent.parent
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    used = {"tensorboard", "wandb"}  # by name of the tracker
    for path in (root / "atlas_cli").rglob("*.py"):
        used |= set(re.findall(r"install_hint\(['\"](\w+)['\"]\)", path.read_text("utf-8")))
    assert len(used) > 5
    assert used <= extras.keys()
    packages = [line.partition(">")[0] for line in extras["plot"]]
    assert packages == re.findall(r"'([\w-]+)[^']*'", install_hint("plot"))


def lazy(*shape: int) -> LazyTensor:
    return LazyTensor(shape, torch.float32, lambda: torch.zeros(shape))


def configured(model: dict, preprocess: dict) -> Callable[[], object]:
    return lambda: check_config(model, preprocess, "here", 1000)


def test_values_that_cannot_be_used_are_named(tmp_path: Path):
    table = tmp_path / "table.csv"
    table.write_text("path,label,split\na.png,cat,train\n")
    (tmp_path / "a.tar").touch()
    without_text = {key: value for key, value in TINY_CONFIG.items() if key != "text_cfg"}
    q, k, v = (f"vision_model.encoder.layers.0.self_attn.{one}_proj.weight" for one in "qkv")
    cases: dict[str, tuple[type[AtlasError], Callable[[], object]]] = {
        "needs at least one part, not 0": (UsageError, lambda: by_partition({}, 0, 0)),
        "here: model_cfg has no text_cfg": (CheckpointError, configured(without_text, HALF)),
        "a standard deviation of 0": (
            CheckpointError,
            configured(TINY_CONFIG, {**HALF, "std": [0.5, 0, 0.5]}),
        ),
        "here: model_cfg.embed_dim cannot be 'wide'": (
            CheckpointError,
            configured({**TINY_CONFIG, "embed_dim": "wide"}, HALF),
        ),
        "head.data: is no base64 of a head": (CheckpointError, lambda: head_from_text("?")),
        "basis: expected ": (UsageError, lambda: find_basis("svd:none")),
        "unknown basis 'svt'; did you mean 'svd'?": (UsageError, lambda: BASES.find("svt")),
        "unknown merge method 'linaer'; did you mean 'linear'?": (
            UsageError,
            lambda: MERGE_METHODS.find("linaer"),
        ),
        "no row has split 'test'": (
            DataError,
            lambda: open_dataset(f"csv:{table}", split="test"),
        ),
        "a.tar: has no splits; name the shards of val": (
            UsageError,
            lambda: open_dataset(f"wds:{tmp_path}/a.tar", split="val"),
        ),
        "other: not a tensor of a transformers CLIP model": (
            MismatchError,
            lambda: to_open_clip({"other": lazy(2)}),
        ),
        "the v projection is missing": (
            MismatchError,
            lambda: to_open_clip({q: lazy(2, 2), k: lazy(2, 2)}),
        ),
        "the q, k and v projections differ in shape or dtype": (
            MismatchError,
            lambda: to_open_clip({q: lazy(2, 2), k: lazy(2, 2), v: lazy(3, 2)}),
        ),
    }
    for message, (kind, act) in cases.items():
        with pytest.raises(kind) as raised:
            act()
        assert message in str(raised.value)
