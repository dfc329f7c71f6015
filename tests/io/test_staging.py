"""A folder is there whole or not at all, and what a kill left of it goes with the next run."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import TIMEOUT
from warm import start

from atlas_cli.errors import AtlasError
from atlas_cli.io.staging import temporary_folder
from atlas_cli.models.saving import whole_folder


def aged(path: Path) -> Path:
    os.utime(path, (time.time() - 3600,) * 2)
    return path


def wait_for(found: Callable[[], list[Path]]) -> Path:
    deadline = time.monotonic() + TIMEOUT
    while not found() and time.monotonic() < deadline:
        time.sleep(0.01)
    return found()[0]


def test_a_drawing_that_was_killed_is_swept_by_the_next(call, tmp_path: Path):
    process = start("draw", "builtin:digits", "-o", tmp_path / "x")
    left = wait_for(lambda: list(tmp_path.glob(".x.*")))
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=TIMEOUT)
    assert aged(left).is_dir()
    assert call("draw", "builtin:digits", "-o", tmp_path / "x", "--shots", 1).code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_only_old_folders_of_ours_that_nobody_holds_are_swept(tmp_path: Path):
    names = (".x.atlas-old.part", ".x.atlas-new.part", ".x.part", ".y.atlas-old.part", "target")
    old, new, own, other, target = (tmp_path / name for name in names)
    for path in (old, new, own, other, target):
        path.mkdir()
        (path / "file").touch()
    for path in (old, own, other, target):
        aged(path)
    link = tmp_path / ".x.atlas-link.part"
    link.symlink_to(target)
    os.utime(link, (time.time() - 3600,) * 2, follow_symlinks=False)
    with temporary_folder(tmp_path / "x") as first:
        with temporary_folder(aged(first).parent / "x"):
            assert first.is_dir()
        assert not old.exists()
    assert {path.name for path in tmp_path.iterdir()} == {*names, link.name} - {old.name}
    assert (target / "file").exists()


def test_an_error_leaves_the_folder_that_was_there(tmp_path: Path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "old").touch()
    with (
        pytest.raises(AtlasError, match="model: cannot be written: Is a directory"),
        whole_folder(tmp_path / "model") as temporary,
    ):
        temporary.write_text("a folder is there already")
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == [
        "model",
        "model/old",
    ]
