"""atlas inspect: a table for people, CSV for a pipe, JSON for programs, one line for mistakes."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import pty
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from imports import outcomes
from makers import FORMS, LAYER, MLP, lora, random_values, rewrite_header, write_vector
from safetensors.torch import save_file
from warm import atlas


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    return write_vector(tmp_path / "digits.safetensors", random_values(1))


@pytest.fixture
def signs(tmp_path: Path) -> Path:
    values = random_values(2)
    blocks = {name: FORMS["int8"](tensor) for name, tensor in values.items()}
    return write_vector(tmp_path / "signs.safetensors", blocks, exact=values)


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def on_a_terminal(*arguments: str | Path) -> str:
    """What a person sees in a terminal of 100 columns."""
    reader, terminal = pty.openpty()
    process = subprocess.Popen(
        [*atlas(), *map(str, arguments)],
        stdout=terminal,
        env=os.environ | {"TERM": "xterm", "NO_COLOR": "1", "COLUMNS": "100"},
    )
    os.close(terminal)
    shown = b""
    while True:
        try:
            shown += os.read(reader, 65536)
        except OSError:
            break
    assert process.wait() == 0
    return re.sub(r"\x1b\[[\d;]*m", "", shown.decode())


# Results --------------------------------------------------------------------------------------


def test_one_vector_in_a_pipe_is_a_row_per_block(call, digits: Path):
    result = call("inspect", digits)
    assert (result.code, result.err) == (0, "")
    found = rows(result.out)
    assert len(found) == len(random_values(1))
    block = next(row for row in found if row["block"] == LAYER.format(1, MLP))
    values = random_values(1)[LAYER.format(1, MLP)]
    assert (block["vector"], block["layer"], block["kind"]) == ("digits", "1", MLP)
    assert (block["shape"], block["storage"], block["parameters"]) == ("32x8", "fp32", "256")
    assert float(block["relative_norm"]) == pytest.approx(values.norm().item() / 2, rel=1e-5)
    assert 1 < float(block["effective_rank"]) <= 8
    assert float(block["energy_1"]) < float(block["energy_4"]) < float(block["energy_16"]) == 1


def test_several_vectors_in_a_pipe_are_their_cosines(call, digits: Path, signs: Path):
    result = call("inspect", digits, signs)
    found = rows(result.out)
    assert list(found[0]) == ["kind", "vector", "digits", "signs"]
    assert [row["vector"] for row in found[:2]] == ["digits", "signs"]
    assert (found[0]["kind"], found[0]["digits"], found[1]["signs"]) == ("all", "1", "1")
    assert {row["kind"] for row in found} > {"all", MLP}
    listed = rows(call("inspect", digits, signs, "--blocks").out)
    assert [row["vector"] for row in listed] == ["digits"] * 8 + ["signs"] * 8


def test_all_built_in_vectors_have_one_name(call):
    found = rows(call("inspect", "builtin:all").out)
    names = [row["vector"] for row in found if row["kind"] == "all"]
    assert "digits" in names
    assert names == [name for name in found[0] if name not in ("kind", "vector")]


def test_json_holds_everything_and_is_valid(call, digits: Path, signs: Path):
    result = call("inspect", digits, signs, "builtin:tiny", "--json")
    assert result.code == 0
    subprocess.run([sys.executable, "-m", "json.tool"], input=result.out, text=True, check=True)
    found = json.loads(result.out, parse_constant=pytest.fail)  # no NaN
    assert list(found) == ["atlas", "vectors", "models", "comparison"]
    first = found["vectors"][0]
    assert (first["label"], first["file"], first["scope"]) == ("digits", str(digits), "visual")
    assert first["base"]["sha256"]["model.safetensors"] == "ab" * 32
    assert first["fingerprint"] == "f0" * 32
    assert first["dropped"] == ["visual.ln_post.bias"]
    assert first["bytes"] == digits.stat().st_size
    assert first["blocks"][1]["energy"]["64"] == 1
    assert found["vectors"][1]["storage"] == {"int8": 8}
    assert found["comparison"]["cosine"][0][0] == 1
    assert len(found["comparison"]["spectrum"]["share"]) == 2
    assert found["models"][0]["activation"] == "gelu"


def test_json_has_null_where_there_is_no_number(call, tmp_path: Path):
    one = write_vector(tmp_path / "a.safetensors", {"visual.a": torch.ones(2)}, base_norm=0.0)
    two = write_vector(tmp_path / "b.safetensors", {"visual.b": torch.ones(2)}, base_norm=0.0)
    result = call("inspect", one, two, "--json")
    found = json.loads(result.out, parse_constant=pytest.fail)
    assert found["vectors"][0]["relative_norm"] is None
    assert found["comparison"]["cosine_by_kind"]["a"] == [[1, None], [None, None]]
    assert found["comparison"]["cosine"] == [[1, 0], [0, 1]]


def test_a_model_in_a_pipe_is_a_row_per_tensor(call):
    found = rows(call("inspect", "builtin:tiny").out)
    assert set(found[0]) == {"model", "tensor", "dtype", "shape", "parameters"}
    total = sum(int(row["parameters"]) for row in found)
    model = json.loads(call("inspect", "builtin:tiny", "--json").out)["models"][0]
    assert (model["parameters"], len(model["tensors"])) == (total, len(found))


def test_a_folder_with_one_vector_is_that_vector(call, digits: Path):
    assert call("inspect", digits.parent).out == call("inspect", digits).out


def test_vectors_of_one_name_are_told_apart(call, tmp_path: Path, digits: Path):
    (tmp_path / "b").mkdir()
    other = write_vector(tmp_path / "b" / "digits.safetensors", random_values(3))
    found = json.loads(call("inspect", digits, other, digits, "--json").out)
    labels = [vector["label"] for vector in found["vectors"]]
    assert labels == [str(digits), str(other), f"{digits} (2)"]
    assert found["comparison"]["cosine"][0][2] == 1


def test_the_same_run_gives_the_same_bytes(call, digits: Path, signs: Path):
    assert call("inspect", digits, signs, "--json") == call("inspect", digits, signs, "--json")


# A terminal -----------------------------------------------------------------------------------


def test_a_person_sees_a_card_and_the_kinds(digits: Path):
    shown = on_a_terminal("inspect", digits, "-q")
    for word in ("builtin:tiny, sha256 abababababab", "f0f0f0f0f0f0", "ViT, 2 layers of width 8"):
        assert word in shown
    assert "visual.ln_post.bias" in shown  # dropped
    assert "mlp.c_fc.weight" in shown
    assert "1.mlp.c_fc.weight" not in shown
    assert max(map(len, shown.splitlines())) <= 100
    assert "1.mlp.c_fc.weight" in on_a_terminal("inspect", digits, "-q", "--blocks")


def test_a_person_sees_several_vectors_side_by_side(tmp_path: Path, digits: Path, signs: Path):
    blocks = {LAYER.format(0, "attn.in_proj_weight"): lora(1)}
    adapter = write_vector(tmp_path / "adapter.safetensors", blocks)
    shown = on_a_terminal("inspect", digits, signs, adapter, "builtin:tiny", "-q")
    for word in ("+1.000", "participation ratio", "factors", "int8", "cosine over all blocks"):
        assert word in shown
    assert "images of 32 pixels" in shown  # the model


# stdin and stdout -----------------------------------------------------------------------------


def test_a_vector_from_a_pipe(call, digits: Path):
    with digits.open("rb") as file:
        done = subprocess.run([*atlas(), "inspect", "-", "--json"], stdin=file, capture_output=True)
    found = json.loads(done.stdout)["vectors"][0]
    wanted = json.loads(call("inspect", digits, "--json").out)["vectors"][0]
    assert found == wanted | {"file": "-"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "stdin: is empty"),
        (b"nonsense", "stdin: is not a valid safetensors file"),
        (None, "stdin: is not a valid safetensors file"),  # cut off in the middle
    ],
)
def test_a_pipe_that_gives_no_vector(digits: Path, content: bytes | None, message: str):
    given = digits.read_bytes()[:-9] if content is None else content
    done = subprocess.run([*atlas(), "inspect", "-"], input=given, capture_output=True)
    lines = done.stderr.decode().splitlines()
    assert (done.returncode, done.stdout, len(lines)) == (1, b"", 1)
    assert message in lines[0]


def test_a_model_from_a_pipe_is_refused(tmp_path: Path):
    save_file({"a": torch.ones(1)}, tmp_path / "m.safetensors")
    given = (tmp_path / "m.safetensors").read_bytes()
    done = subprocess.run([*atlas(), "inspect", "-"], input=given, capture_output=True, text=False)
    assert done.returncode == 1
    assert done.stderr.startswith(b"atlas: error: stdin: is not a task vector")


def test_a_folder_for_temporary_files_that_is_full(digits: Path):
    limited = f"ulimit -f 1; {shlex.join(atlas())} inspect - < {digits}"  # blocks of 1024 bytes
    done = subprocess.run(["bash", "-c", limited], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("atlas: error: stdin: cannot be kept in ")
    assert len(done.stderr.splitlines()) == 1


def test_a_closed_stdout(digits: Path):
    reader, writer = os.pipe()
    os.close(reader)
    command = [*atlas(), "inspect", str(digits)]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    line = "atlas: error: stdout was closed before everything was written\n"
    assert (done.returncode, done.stderr) == (1, line)


# Mistakes -------------------------------------------------------------------------------------


def test_mistakes_and_help_cost_no_heavy_import():
    mistakes: list[tuple[list[str], str]] = [
        (["missing.safetensors"], "no such file: missing.safetensors"),
        (["vectors/missing.safetensors"], "no such file: vectors/missing.safetensors"),
        (["./missing"], "no such file or folder: ./missing"),
        (["builtin:tyni"], "did you mean 'tiny'?"),
        (["-", "-"], "- can be given once"),
        (["builtin:tiny", "--arch", "ViT-B-3"], "did you mean 'ViT-B-32'?"),
        (
            ["builtin:tiny", "--plot", "x.gif"],
            "expected a name that ends in .png, .svg, .pdf or .html",
        ),
        (["builtin:tiny", "--plot", "nowhere/x.png"], "no such folder: nowhere"),
        (["builtin:tiny", "--jsn"], "did you mean '--json'?"),
        ([], "missing argument"),
    ]
    given = [["inspect", *arguments] for arguments, _ in mistakes]
    *found, helped = outcomes([*given, ["inspect", "--help"]])
    for (_, message), outcome in zip(mistakes, found, strict=True):
        assert (outcome.code, outcome.heavy) == (2, []), outcome
        assert message in outcome.err
        assert outcome.err.count("\n") == 1
    assert (helped.code, helped.heavy) == (0, [])


def test_vectors_of_different_bases(call, digits: Path, tmp_path: Path):
    other = write_vector(tmp_path / "other.safetensors", random_values(), fingerprint="0f" * 32)
    result = call("inspect", digits, other)
    assert (result.code, result.out, len(result.error_lines)) == (1, "", 1)
    assert "different base models" in result.err


def test_a_damaged_header(call, digits: Path):
    rewrite_header(digits, lambda header: header["blocks"][0].update(norm=math.nan))
    result = call("inspect", digits)
    assert (result.code, result.out, len(result.error_lines)) == (1, "", 1)
    assert f"{digits}: its task-vector header is damaged" in result.err


def test_two_tables_do_not_fit_in_one_pipe(call, digits: Path):
    result = call("inspect", digits, "builtin:tiny")
    assert (result.code, result.out) == (2, "")
    assert "add --json" in result.err
