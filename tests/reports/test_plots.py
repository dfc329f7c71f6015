"""A picture is the same bytes each time, and needs its libraries only when asked for."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import warm
from makers import LAYER, MLP, random_values, write_vector
from PIL import Image

from atlas_cli.errors import install_hint


@pytest.fixture
def vectors(tmp_path: Path) -> list[Path]:
    return [write_vector(tmp_path / f"v{n}.safetensors", random_values(n)) for n in range(3)]


def test_two_runs_give_the_same_bytes(call, run, vectors: list[Path], tmp_path: Path):
    """The first picture of a process, and one after others."""
    for form in ("png", "svg", "pdf"):
        results = [
            run("inspect", *vectors, "--plot", tmp_path / f"0.{form}"),
            call("inspect", *vectors, "--plot", tmp_path / f"1.{form}"),
        ]
        assert {(result.code, result.err) for result in results} == {(0, "")}
        first, second = ((tmp_path / f"{n}.{form}").read_bytes() for n in range(2))
        assert first == second, form
        assert len(first) > 5000, form


def test_a_name_tells_the_format(call, vectors: list[Path], tmp_path: Path):
    starts = {
        "x.png": b"\x89PNG",
        "x.PDF": b"%PDF-",
        "x.svg": b"<svg",
        "x.html": b"<!doctype html>",
    }
    for name, start in starts.items():
        assert call("inspect", vectors[0], "--plot", tmp_path / name).code == 0
        assert (tmp_path / name).read_bytes().startswith(start)


def test_the_picture_has_every_kind_layer_and_vector(call, vectors: list[Path], tmp_path: Path):
    path = tmp_path / "x.svg"
    assert call("inspect", *vectors, "--plot", path).code == 0
    text = path.read_text()
    for word in ("mlp.c_fc.weight", "class_embedding", "layer", "cosine", "v0", "v1", "v2"):
        assert f">{word}</text>" in text
    assert "outside the layers" in text


def test_a_cell_shows_its_number(call, tmp_path: Path):
    names = [LAYER.format(layer, MLP) for layer in (0, 1)]
    values = dict(zip(names, (torch.full((2, 2), 0.02), torch.full((2, 2), 50.0)), strict=True))
    vector = write_vector(tmp_path / "v.safetensors", values)  # the norm of the base is 2
    assert call("inspect", vector, "--plot", tmp_path / "x.svg").code == 0
    text = (tmp_path / "x.svg").read_text()
    assert ">2</text>" in text
    assert ">5000</text>" in text  # in percent, without an exponent


def test_one_vector_has_no_cosines(call, vectors: list[Path], tmp_path: Path):
    several, single = tmp_path / "s.png", tmp_path / "o.png"
    assert call("inspect", *vectors, "--plot", several).code == 0
    assert call("inspect", vectors[0], "--plot", single).code == 0
    with Image.open(single) as one, Image.open(several) as three:
        assert one.width < three.width


def test_one_block_can_be_drawn(call, tmp_path: Path):
    values = {"visual.class_embedding": random_values()["visual.class_embedding"]}
    vector = write_vector(tmp_path / "v.safetensors", values)
    result = call("inspect", vector, vector, "--plot", tmp_path / "x.png")
    assert (result.code, result.err) == (0, "")


def test_nothing_relative_to_the_base_is_no_picture(call, tmp_path: Path):
    vector = write_vector(tmp_path / "v.safetensors", random_values(), base_norm=0.0)
    result = call("inspect", vector, "--plot", tmp_path / "x.png")
    assert (result.code, len(result.error_lines)) == (1, 1)
    assert not (tmp_path / "x.png").exists()


def test_a_model_is_no_picture(call, tmp_path: Path):
    result = call("inspect", "builtin:tiny", "--plot", tmp_path / "x.png")
    assert (result.code, result.out) == (2, "")
    assert "builtin:tiny is a model" in result.err


def test_a_folder_that_cannot_be_written(as_ordinary_user, vectors: list[Path], tmp_path: Path):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    result = as_ordinary_user("inspect", vectors[0], "--plot", locked / "x.png")
    assert (result.code, result.out) == (1, "")
    assert result.err == f"atlas: error: {locked}/x.png: cannot be written: Permission denied\n"


def test_without_the_extra_one_line_says_what_to_install(vectors: list[Path], tmp_path: Path):
    code = (
        "import sys; sys.modules['altair'] = None\n"
        "from atlas_cli.cli.app import main\n"
        "refused = main(['inspect', *sys.argv[1:]])\n"
        "print('refused with', refused, flush=True)\n"
        "sys.exit(main(['inspect', sys.argv[1]]))"
    )
    command = [sys.executable, "-c", code, str(vectors[0]), "--plot", str(tmp_path / "x.png")]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True)
    line = f"atlas: error: --plot needs altair; run: {install_hint('plot')}\n"
    assert (done.returncode, done.stderr) == (0, line)
    before, _, after = done.stdout.partition("refused with 1\n")
    assert before == ""
    assert after


@pytest.mark.parametrize("most", [8, 13])
def test_too_few_descriptors_for_charts_are_one_line(
    vectors: list[Path], tmp_path: Path, most: int
):
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    arguments = ("inspect", vectors[0], "--plot", tmp_path / "x.svg")
    process = warm.start(*arguments, preexec_fn=limit)
    _, err = process.communicate()
    assert process.returncode == 1
    assert err == "atlas: error: charts cannot be drawn: Too many open files\n"
    assert not list(tmp_path.glob("*x.svg*"))
