"""Runs that cannot begin or go on: what each of them is told."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import write_images
from refusals import check, check_commands
from safetensors.torch import load_file, save_file
from shards import write_tar

import atlas_cli as atlas
from atlas_cli.io.checkpoint import read_metadata
from atlas_cli.learning import ranks
from atlas_cli.registry import OBJECTIVES
from atlas_cli.sources.locate import vector_file

TINY = ("--model", "builtin:tiny", "--vectors", "builtin:letters")
QUICK = ("--batch-size", "4", "--epochs", "1", "--quiet")


@pytest.fixture
def odd_objectives() -> Iterator[None]:
    """Objectives of somebody else, which need what their command does not have."""

    @atlas.objective("looks-twice", commands=("add",), needs=("targets",))
    def looks_twice(logits: torch.Tensor, targets: torch.Tensor, total: float) -> torch.Tensor:
        return logits.sum()

    @atlas.objective("labelled", commands=("tta",), needs=("labels",))
    def labelled(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return logits.sum()

    yield
    for name in ("looks-twice", "labelled"):
        OBJECTIVES._entries.pop(name)
        OBJECTIVES._origins.pop(name)


def test_options_that_fit_no_run(
    call, odd_objectives: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    image = (write_images(tmp_path / "photos", count=2) / "cat" / "0.png").read_bytes()
    for split, names in (("train", "cat\ndog\n"), ("val", "cat\nfox\n")):
        (tmp_path / "split" / split).mkdir(parents=True)
        (tmp_path / "split" / split / "nshards.txt").write_text("1")
        (tmp_path / "split" / split / "classnames.txt").write_text(names)
        members = {"a.png": image, "a.cls": b"0", "b.png": image, "b.cls": b"1"}
        write_tar(tmp_path / "split" / split / "0.tar", members)
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "coefficients.json").write_text('{"birds": {"visual.proj": 0.5}}')
    usage = {
        "objective 'looks-twice' needs more than add has: logits and labels": (
            *("add", "photos", *TINY, *QUICK, "--objective", "looks-twice"),
        ),
        "objective 'labelled' needs labels; tta has none": (
            *("tta", "photos", *TINY, *QUICK, "--objective", "labelled"),
        ),
        "--init empty: has no coefficients.json of a run: [Errno 2]": (
            *("fit", "photos", *TINY, *QUICK, "--init", "empty"),
        ),
        "--init other: has no coefficient of these vectors": (
            *("fit", "photos", *TINY, *QUICK, "--init", "other"),
        ),
    }
    check_commands(call, usage, 2)
    finetune = ("--model", "builtin:tiny", "-o", "out", "--steps", "2", "--batch-size", "4", "-q")
    failures = {
        "split: the classes of its val split are not those of the other": (
            *("finetune", "wds:split", *finetune),
        ),
        "the weights are no longer finite; a lower learning rate may help": (
            *("finetune", "photos", *finetune, "--lr", "1e5", "--warmup", "0"),
        ),
        "the coefficients are no longer finite; a lower learning rate may help": (
            *("tta", "photos", *TINY, *QUICK, "--lr", "1e5", "--select", "last"),
        ),
    }
    check_commands(call, failures, 1)


def test_data_that_cannot_be_scored(call, tmp_path: Path):
    write_images(tmp_path / "loose", ("",), count=1)
    for path in write_images(tmp_path / "broken", count=1).rglob("*.png"):
        path.write_bytes(b"no image")
    scored = ("eval", "builtin:tiny", "--skip-broken", "--quiet", "--data")
    cases = {
        "loose: has no labels; eval needs a sub-folder per class": (*scored, tmp_path / "loose"),
        "broken: none of its 2 images could be decoded": (*scored, tmp_path / "broken"),
    }
    check_commands(call, cases, 1)


def test_vectors_that_cannot_be_ranked(call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "photos", count=1)
    letters = vector_file("builtin:letters")
    tensors, about = load_file(letters), read_metadata(letters)
    save_file(
        {name: torch.zeros_like(t) for name, t in tensors.items()}, "still.safetensors", about
    )
    name = next(name for name, tensor in tensors.items() if tensor.is_floating_point())
    tensors[name] = torch.full_like(tensors[name], torch.inf)
    save_file(tensors, "wild.safetensors", about)
    ranked = (
        "fit",
        "photos",
        "--model",
        "builtin:tiny",
        *QUICK,
        "--keep-vectors",
        "1",
        "-o",
        "run",
    )
    changes_nothing = (*ranked, "--vectors", "still.safetensors")
    check_commands(call, {"no block of the vectors changes the loss": changes_nothing}, 2)
    infinite = (*ranked, "--vectors", "wild.safetensors")
    check_commands(call, {"holds no finite values": infinite}, 1)


def test_run_folders(call, as_ordinary_user, tmp_path: Path):
    photos, sealed, run = write_images(tmp_path / "photos", count=1), tmp_path / "sealed", "run"
    sealed.mkdir(mode=0o555)
    given = ("fit", photos, *TINY, *QUICK)
    check_commands(
        as_ordinary_user, {"sealed/run: cannot be written": (*given, "-o", sealed / run)}, 1
    )


def test_a_rank_whose_peers_do_not_come_says_so(monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "2"}
    for name, value in {**place, "ATLAS_TIMEOUT": "0.5"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ranks, "GRACE", 0.0)
    check({"another process of this run ended or does not answer": lambda: ranks.join("cpu")})
