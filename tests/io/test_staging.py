"""A folder is there whole or not at all, and what a kill left of it goes with the next run."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import TIMEOUT
from warm import start

from atlas_cli.errors import AtlasError
from atlas_cli.io.files import hold
from atlas_cli.io.staging import recover, temporary_folder
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


CHANGES = ("os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "os.mkdir", "os.chmod", "open")


def replace_until(number: int, folder: Path) -> bool:
    """Replace a folder in another process, killed before so many changes; whether it ended."""
    if (process := os.fork()) == 0:
        left = [number]

        def kill(event: str, arguments: tuple[object, ...]) -> None:
            left[0] -= event in CHANGES
            if left[0] == 0:
                os._exit(9)  # at once, as by SIGKILL

        code = 1
        try:
            sys.addaudithook(kill)
            with whole_folder(folder) as temporary:
                (temporary / "file").write_text("new")
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(process, 0)[1] == 0


def test_a_kill_at_any_moment_of_an_exchange_loses_neither_folder(tmp_path: Path):
    model = tmp_path / "model"
    seen, number, ended = [], 0, False
    while not ended:
        shutil.rmtree(tmp_path)
        model.mkdir(parents=True)
        (model / "file").write_text("old")
        number += 1
        ended = replace_until(number, model)
        for left in tmp_path.glob(".*"):
            aged(left)
        with pytest.raises(KeyError), whole_folder(model):
            raise KeyError  # the next run comes to nothing
        seen.append((model / "file").read_text())
        assert [path.name for path in tmp_path.rglob("*")] == ["model", "file"], number
    assert seen == sorted(seen, reverse=True)  # first the old one, then the new one
    assert set(seen) == {"old", "new"}
    assert number > 8


def test_a_folder_that_another_run_is_exchanging_is_left_to_it(tmp_path: Path):
    aside = tmp_path / ".model.atlas-abcdefgh.old"
    aside.mkdir()
    handle = os.open(aside, os.O_RDONLY)
    try:
        assert hold(handle)
        with temporary_folder(tmp_path / "model"):
            assert aside.is_dir()
    finally:
        os.close(handle)
    with temporary_folder(tmp_path / "model"):
        assert (tmp_path / "model").is_dir()


def test_a_merge_killed_while_it_tidies_up_leaves_nothing_to_the_next(tmp_path: Path):
    target = tmp_path / "x"
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom atlas_cli.io import staging\n"
        "staging.remove = lambda folder: os.kill(os.getpid(), signal.SIGKILL)\n"
        "staging.StagingFolder(Path(sys.argv[1]), 'a', {'f': 4}).finish()\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(target)], timeout=TIMEOUT)
    assert ended.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2
    recover(target)
    assert list(tmp_path.iterdir()) == [target]
