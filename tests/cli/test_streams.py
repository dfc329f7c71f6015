"""Nothing that a file says controls the terminal, and closed streams end nothing."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
import warm
from conftest import TIMEOUT, write_images
from safetensors.torch import save_file

from atlas_cli.cli.console import printable
from atlas_cli.errors import AtlasError

EVIL = "x\x1b]0;owned\x07\natlas: error: forged\u202e\x9b31m"


def test_control_characters_are_escaped_and_other_text_stays():
    assert printable("naïve 猫 🐱\u00a0") == "naïve 猫 🐱\u00a0"
    assert printable(EVIL) == r"x\x1b]0;owned\x07\natlas: error: forged\u202e\x9b31m"
    assert printable("a\nb\udcff", "\n") == "a\nb\\udcff"


def test_an_error_with_several_messages_has_a_line_for_each():
    assert str(AtlasError("a", "b")) == "a\nb"


def test_names_of_files_keys_tensors_and_templates_forge_no_line(call, tmp_path: Path):
    recipe, photos = tmp_path / "r.yaml", write_images(tmp_path / "photos")
    recipe.write_text('"x\\e]0;owned\\a\\natlas: error: forged": 1\nmodels: [a]\ndata: [b]\n')
    save_file({EVIL: torch.ones(1)}, tmp_path / "w.safetensors")
    (photos / "templates.txt").write_text("no \x1b[31m braces\n")
    (tmp_path / "t.csv").write_text("path,label\n\x1b[2J.png,a\n\x1b[3J.png,b\n")
    for given in (
        ("eval", recipe),
        ("eval", f"./{EVIL}", "--data", "builtin:digits"),
        ("extract", "builtin:tiny", tmp_path / "w.safetensors", "-o", tmp_path / "v.safetensors"),
        ("eval", "builtin:tiny", "--data", photos),
        ("eval", "builtin:tiny", "--data", f"csv:{tmp_path}/t.csv"),
    ):
        result = call(*given)
        assert result.code in (1, 2), (given, result)
        assert result.error_lines, given
        assert all(line.startswith("atlas: error: ") for line in result.error_lines), result.err
        assert not [c for c in result.err if not c.isprintable() and c != "\n"], result.err
        assert "error: forged" not in [line[7:20] for line in result.error_lines]


def test_names_on_a_terminal_are_escaped_in_tables(on_terminal, tmp_path: Path):
    photos = write_images(tmp_path / "pho\x1b[5mtos\x07")
    shown = on_terminal("eval", "builtin:tiny", "--data", photos, "--workers", "0")
    assert "\x1b[5m" not in shown
    assert "\x07" not in shown


def closed(number: int, *given: str) -> subprocess.CompletedProcess[bytes]:
    """Run atlas with a stream that is closed, as `2>&-` does in a shell."""
    shut = {0: "<&-", 1: ">&-", 2: "2>&-"}[number]
    command = " ".join([*warm.atlas(), *given, shut])
    return subprocess.run(["bash", "-c", command], capture_output=True, timeout=TIMEOUT)


def test_closed_streams_are_no_traceback_and_cost_no_result():
    evaluation = ("eval", "builtin:tiny", "--data", "builtin:digits", "--shots", "1")
    done = closed(2, *evaluation)
    assert (done.returncode, done.stdout[:11]) == (0, b"model,data,")
    done = closed(2, "eval", "builtin:tyni", *evaluation[2:])
    assert (done.returncode, done.stdout) == (2, b"")
    done = closed(1, *evaluation)
    line = b"atlas: error: stdout was closed before everything was written\n"
    assert (done.returncode, done.stderr) == (1, line)
    done = closed(0, "fit", "-")
    assert (done.returncode, done.stderr) == (2, b"atlas: error: stdin: is closed\n")
    done = closed(1, "--help")
    assert (done.returncode, done.stderr) == (0, b"")  # nobody wants to read it


def test_termination_is_one_line_and_leaves_nothing(tmp_path: Path):
    process = warm.start(
        *("fit", "builtin:digits", "--model", "builtin:tiny", "--vectors", "builtin:letters"),
        *("--shots", "1", "--batch-size", "10", "--epochs", "10000", "-o", tmp_path / "run"),
    )
    while process.poll() is None and not (tmp_path / "run" / "state.safetensors").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    err = process.communicate(timeout=TIMEOUT)[1]
    assert process.returncode == 143, err
    assert err.splitlines()[-1] == "atlas: terminated"
    assert "Traceback" not in err
    assert not list((tmp_path / "run").glob(".*.part"))


@pytest.mark.parametrize("name", ["~nosuchuser/x", "a" * 5000, "a/" * 3000 + "b"])
def test_paths_that_cannot_be_are_one_line(call, tmp_path: Path, name: str):
    for given in (
        ("eval", f"./{name}" if name[0] != "~" else name, "--data", "builtin:digits"),
        ("eval", "builtin:tiny", "--data", name),
        ("eval", name),
        ("fit", "builtin:digits", "--model", "builtin:tiny", "--vectors", name),
        ("inspect", name),
        ("extract", "builtin:tiny", "builtin:tiny", "-o", name),
    ):
        result = call(*given)
        assert (result.code in (1, 2), len(result.error_lines)) == (True, 1), (given[0], result.err)
