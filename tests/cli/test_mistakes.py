"""Every mistake is one line on stderr and a documented exit code, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from conftest import TIMEOUT, write_images
from PIL import Image
from safetensors.torch import load_file, save_file
from warm import COLD, atlas

DIGITS = ("--data", "builtin:digits", "--shots", "1")


def command(*arguments: str | Path) -> list[str]:
    return [*atlas(), *map(str, arguments)]


def test_a_missing_path(run):
    result = run("eval", "./missing", *DIGITS)
    assert (result.code, result.err) == (2, "atlas: error: no such file or folder: ./missing\n")
    result = run("eval", "builtin:tiny", "--data", "missing/")
    assert (result.code, len(result.error_lines)) == (2, 1)
    assert result.out == ""


def test_a_folder_without_images(run, tmp_path: Path):
    result = run("eval", "builtin:tiny", "--data", tmp_path)
    assert (result.code, len(result.error_lines)) == (1, 1)
    assert f"{tmp_path}: has no images" in result.err


def test_a_truncated_jpeg(run, tmp_path: Path):
    write_images(tmp_path, count=60)
    Image.open(tmp_path / "cat" / "0.png").save(tmp_path / "cat" / "a.jpg")
    whole = (tmp_path / "cat" / "a.jpg").read_bytes()
    (tmp_path / "cat" / "a.jpg").write_bytes(whole[:-200])
    result = run("eval", "builtin:tiny", "--data", tmp_path, "--predictions", tmp_path / "p.jsonl")
    assert (result.code, len(result.error_lines)) == (1, 1)
    assert f"{tmp_path}/cat/a.jpg: cannot be decoded: image file is truncated" in result.err
    assert not (tmp_path / "p.jsonl").exists()


def test_a_class_name_file_of_the_wrong_length(run, photos: Path):
    (photos / "classnames.txt").write_text("cat\ndog\nemu\n")
    result = run("eval", "builtin:tiny", "--data", photos)
    expected = f"atlas: error: {photos}/classnames.txt: has 3 names for 2 classes\n"
    assert (result.code, result.err) == (1, expected)


@pytest.mark.parametrize("name", ["ViT-B-33/openai", "builtin:tyni", "nonsense"])
def test_an_unknown_model(run, name: str):
    result = run("eval", name, *DIGITS)
    assert (result.code, len(result.error_lines)) == (2, 1)
    assert f"unknown model '{name}'" in result.err


def test_an_unknown_builtin(run):
    result = run("eval", "builtin:tiny", "--data", "builtin:digit")
    assert (result.code, len(result.error_lines)) == (2, 1)
    assert "did you mean 'digits'?" in result.err


def test_an_argument_after_an_option_of_many_values_is_not_swallowed(call):
    """The last value is the argument's if that has none, which is said; weights are no data."""
    base = ("--model", "builtin:tiny", "--shots", "1", "--epochs", "1", "--batch-size", "8")
    vectors = ("--vectors", "builtin:digits", "builtin:signs")
    first = call("fit", "builtin:terrain", *vectors, *base, "--quiet")
    last = call("fit", *base, *vectors, "builtin:terrain")
    assert (first.code, last.code, last.out) == (0, 0, first.out)
    assert (
        last.err.splitlines()[0] == "atlas: 'builtin:terrain' is taken for DATA, which is missing"
    )
    assert "is taken for" not in first.err
    scores = call("eval", "--data", "builtin:digits", "builtin:tiny", "--shots", "1", "--quiet")
    assert scores.out.splitlines()[1].startswith("builtin:tiny,builtin:digits,")
    for given in (("one",), ("one", "two.safetensors")):
        refused = call("fit", *base, "--vectors", *given)
        said = "missing argument 'DATA'; atlas fit -h shows what it takes"
        assert (refused.code, refused.err) == (2, f"atlas: error: {said}\n")


def test_a_weight_file_with_one_tensor_of_the_wrong_shape(run, open_clip_folder: Path):
    path = open_clip_folder / "open_clip_model.safetensors"
    tensors = load_file(path)
    tensors["visual.ln_post.weight"] = torch.ones(63)
    save_file(tensors, path)
    result = run("eval", open_clip_folder, *DIGITS)
    assert (result.code, len(result.error_lines)) == (1, 1)
    assert "visual.ln_post.weight has shape (63,), expected (64,)" in result.err


@pytest.mark.parametrize("content", [b"", b"12345678", b"\xff" * 64, b"{}" * 40])
def test_a_weight_file_that_is_none(run, open_clip_folder: Path, content: bytes):
    (open_clip_folder / "open_clip_model.safetensors").write_bytes(content)
    result = run("eval", open_clip_folder, *DIGITS)
    assert (result.code, len(result.error_lines)) == (1, 1)
    assert "is not a valid safetensors file" in result.err


def test_a_read_only_cache_folder_costs_the_cache_not_the_result(as_ordinary_user, tmp_path: Path):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    result = as_ordinary_user("eval", "builtin:tiny", *DIGITS, ATLAS_CACHE=str(locked))
    assert result.code == 0
    assert result.out.startswith("model,data,")
    assert result.error_lines == [
        f"atlas: warning: {locked}/heads: cannot keep the zero-shot head: Permission denied; "
        "set ATLAS_CACHE to a folder that can be written"
    ]


def test_a_closed_stdout(tmp_path: Path):
    reader, writer = os.pipe()
    os.close(reader)
    arguments = command("eval", "builtin:tiny", *DIGITS)
    done = subprocess.run(arguments, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    line = "atlas: error: stdout was closed before everything was written\n"
    assert (done.returncode, done.stderr) == (1, line)


def test_a_reader_that_takes_one_line_of_many(tmp_path: Path):
    """More lines than a pipe holds."""
    arguments = " ".join(command("eval", "builtin:tiny", "--data", "builtin:digits"))
    script = f"set -o pipefail; {arguments} --quiet --predictions - | head -1"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    line = "atlas: error: stdout was closed before everything was written\n"
    assert (done.returncode, done.stderr) == (1, line)
    assert json.loads(done.stdout)["model"] == "builtin:tiny"


def test_help_into_a_closed_pipe_is_no_traceback():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command("--help"), stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1


def test_a_full_disk_behind_stdout():
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command("eval", "builtin:tiny", *DIGITS), stdout=full, stderr=subprocess.PIPE, text=True
        )
    line = "atlas: error: stdout: cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, line)


def children_of(parent: int) -> list[str]:
    """The processes that a process has begun and that are still there."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(status.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(status.parent.name)
    return found


@pytest.mark.parametrize("moment", ["at once", "importing", "working"])
def test_ctrl_c(moment: str):
    """A real interrupt to the whole process group, as a terminal sends it."""
    given = ("eval", *["builtin:tiny"] * 20, "--data", "builtin:all", "--workers", "2")
    process = subprocess.Popen(
        [*COLD, *given],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # shells ignore it for &
    )
    try:
        _wait_for(moment, process)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=TIMEOUT)
    finally:
        process.kill()
        process.communicate()
    if moment == "at once":  # the interpreter itself may not have started yet
        assert process.returncode in (130, -signal.SIGINT, 1)
        return
    assert (process.returncode, out, err) == (130, "", "atlas: interrupted\n")


def _wait_for(moment: str, process: subprocess.Popen[str]) -> None:
    loaded = Path(f"/proc/{process.pid}/maps")
    while process.poll() is None and (
        (moment == "importing" and "libtorch" not in loaded.read_text())
        or (moment == "working" and len(children_of(process.pid)) < 2)
    ):
        time.sleep(0.01)


def test_on_a_terminal_there_is_a_table_and_a_bar_and_in_a_pipe_neither(run, on_terminal):
    shown = on_terminal("eval", "builtin:tiny", *DIGITS)
    assert "in percent; split: test" in shown
    assert "evaluating" in shown
    assert "top-1" in shown
    assert "─" in shown
    piped = run("eval", "builtin:tiny", *DIGITS)
    assert piped.err == ""
    assert "\x1b" not in piped.out


def test_no_color_takes_the_colours_away(on_terminal):
    arguments = ("eval", "builtin:tiny", *DIGITS)
    coloured = re.compile(r"\x1b\[(\d+;)*(3[0-7]|9[0-7]|38)")
    assert coloured.search(on_terminal(*arguments))
    assert not coloured.search(on_terminal(*arguments, NO_COLOR="1"))


def test_quiet_shows_no_bar_on_a_terminal(on_terminal):
    shown = on_terminal("eval", "builtin:tiny", *DIGITS, "--quiet")
    assert "evaluating" not in shown
    assert "top-1" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["evall"], "no such command 'evall'; did you mean 'eval'?"),
        (["eval", "builtin:tiny", "--dat", "x"], "no such option: --dat; did you mean '--data'?"),
        (["eval", "builtin:tiny"], "no data given"),
        (["eval"], "missing argument 'MODEL'; atlas eval -h shows what it takes"),
        (["eval", "builtin:tiny", *DIGITS, "--device", "gpu"], "--device gpu: expected auto, cpu"),
        (["eval", "builtin:tiny", *DIGITS, "--split", "tset"], "did you mean 'test'?"),
        (["eval", "builtin:tiny", *DIGITS, "--template", "a"], "needs one {}"),
        (["eval", "builtin:tiny", *DIGITS, "--arch", "ViT-B-3"], "did you mean 'ViT-B-32'?"),
        (["eval", "builtin:tiny", *DIGITS, "--batch-size", "0"], "--batch-size"),
        (["eval", "builtin:tiny", *DIGITS, "--seed", "-1"], "--seed"),
        (["draw", "digits", "-o", "x"], "no such data: digits"),
        (["draw", "builtin:digits"], "missing option '--output' / '-o'; atlas draw -h"),
    ],
)
def test_a_bad_command_line(call, arguments: list[str], message: str):
    result = call(*arguments)
    assert (result.code, len(result.error_lines)) == (2, 1)
    assert message in result.err
    assert result.out == ""


def test_a_predictions_file_that_cannot_be_written(call, tmp_path: Path):
    result = call("eval", "builtin:tiny", *DIGITS, "--predictions", tmp_path / "no" / "p.jsonl")
    assert (result.code, len(result.error_lines)) == (1, 1)
    assert "p.jsonl: cannot be written: No such file or directory" in result.err


def test_a_recipe_lists_every_problem_at_once(call, tmp_path: Path):
    path = tmp_path / "r.yaml"
    path.write_text("modls: [x]\ndata: builtin:digits\nseed: many\nshots: true\n")
    result = call("eval", path)
    assert result.code == 2
    assert result.error_lines == [
        f"atlas: error: {path}: unknown key 'modls'; did you mean 'models'?",
        f"atlas: error: {path}: key 'models' is missing",
        f"atlas: error: {path}.data: expected a list, found str",
        f"atlas: error: {path}.shots: expected int, found bool",
        f"atlas: error: {path}.seed: expected int, found str",
    ]
