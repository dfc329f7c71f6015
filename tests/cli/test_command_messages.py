"""Command lines that cannot be: what each of them is told."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from conftest import write_images
from refusals import check_commands
from stopping import largest_file

TINY = ("--model", "builtin:tiny", "--vectors", "builtin:letters")


def test_options_that_contradict_each_other_or_name_nothing(
    call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".local").touch()
    (tmp_path / "latin").write_bytes(b"caf\xe9\n")
    (tmp_path / "empty").mkdir()
    write_images(tmp_path / "photos", count=1)
    usage = {
        "builtin:all: stands for ": ("draw", "builtin:all", "-o", "out"),
        "- can be given once: stdin has one task vector": ("inspect", "-", "-"),
        "no such file: none.safetensors": ("inspect", "none.safetensors"),
        "--launch: several processes cannot share stdin; give a file": (
            *("fit", "-", "--launch", "2"),
        ),
        "--launch many: expected a number of processes": ("fit", "photos", "--launch", "many"),
        "--classes latin: cannot be read as UTF-8 text": (
            *("tta", "photos", *TINY, "--classes", "latin"),
        ),
        "--method search looks at all images at once; it has no --online": (
            *("tta", *TINY, "--online", "--classes", "a,b", "--method", "search"),
        ),
        "--log follows the steps of a run over given images; it has no --online": (
            *("tta", *TINY, "--online", "--classes", "a,b", "--log", "tensorboard", "-o", "out"),
        ),
        "--device cpu:3: there are 1 cpu devices": (
            *("eval", "builtin:tiny", "--data", "photos", "--device", "cpu:3"),
        ),
        "--plot x.txt: expected a name that ends in .png, .svg, .pdf or .html": (
            *("inspect", "builtin:digits", "--plot", "x.txt"),
        ),
        "--plot none/x.png: no such folder: none": (
            *("inspect", "builtin:digits", "--plot", "none/x.png"),
        ),
        "no such file: none.json": ("report", "none.json", "-o", "out"),
        "--evaluation latin: cannot be read as UTF-8 text": (
            *("push", "photos", "owner/name", "--evaluation", "latin"),
        ),
    }
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    check_commands(call, usage, 2)
    failures = {
        "completions/atlas: cannot be written: Not a directory": ("--install-completion", "bash"),
        "none: no such folder": ("draw", "builtin:digits", "-o", "none/out"),
    }
    check_commands(call, failures, 1)
    assert not (tmp_path / "out").exists()


def test_what_comes_on_stdin(call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9: 1\n")))
    check_commands(call, {"stdin: cannot be read as UTF-8 text": ("merge", "-", "-o", "out")}, 2)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    size = 32 << 20  # more than the tests write themselves
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(bytes(size + 1))))
    with largest_file(size):
        said = f"stdin: cannot be kept in {tmp_path}: File too large; set TMPDIR to a folder"
        check_commands(call, {said: ("inspect", "-")}, 1)
    assert list(tmp_path.iterdir()) == []
