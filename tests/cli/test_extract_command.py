"""atlas extract as people call it: outputs, mistakes, hostile files, pipes and sudden deaths."""

from __future__ import annotations

import json
import math
import os
import pty
import struct
import subprocess
import time
from pathlib import Path

import pytest
import torch
from conftest import write_open_clip
from hostile import HOSTILE, MARKER
from imports import outcomes
from safetensors.torch import load_file, save_file
from warm import atlas

from atlas_cli.sources.locate import builtin_model
from atlas_cli.vectors.format import open_vector

WEIGHTS = "open_clip_model.safetensors"
TINY = "builtin:tiny"


def write_tuned(path: Path, seed: int = 1) -> Path:
    """The built-in model, a little further on, as a bare file."""
    random = torch.Generator().manual_seed(seed)
    tensors = load_file(builtin_model("tiny") / WEIGHTS)
    moved = {
        n: t.float() + 0.01 * torch.randn(t.shape, generator=random) for n, t in tensors.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(moved, path)
    return path


@pytest.fixture
def tuned(tmp_path: Path) -> Path:
    return write_tuned(tmp_path / "cars.safetensors")


def command(*arguments: str | Path) -> list[str]:
    return [*atlas(), *map(str, arguments)]


# What is written where ------------------------------------------------------------------------


def test_stdout_has_the_path_and_stderr_one_line(call, tuned: Path, tmp_path: Path):
    result = call("extract", TINY, tuned, "-o", tmp_path / "v.safetensors")
    assert (result.code, result.out) == (0, f"{tmp_path / 'v.safetensors'}\n")
    assert len(result.error_lines) == 1
    assert result.err.startswith("atlas: cars: ")
    assert "relative error worst 0 mean 0" in result.err
    quiet = call("extract", TINY, tuned, "-o", tmp_path / "w.safetensors", "--quiet")
    assert (quiet.code, quiet.err) == (0, "")


def test_json_has_the_numbers(call, tuned: Path, tmp_path: Path):
    path = tmp_path / "v.safetensors"
    result = call("extract", TINY, tuned, "-o", path, "--dtype", "int8", "--json", "-q")
    (found,) = json.loads(result.out)["vectors"]
    header = open_vector(path).header
    assert found["path"] == str(path)
    assert found["blocks"] == len(header.blocks)
    assert found["bytes"] == path.stat().st_size
    assert found["worst_error"] == max(block.error for block in header.blocks)
    assert 0 < found["mean_error"] <= found["worst_error"] < 0.02
    assert found["parameters"] == sum(math.prod(block.shape) for block in header.blocks)
    assert found["dropped"] == 0


def test_several_models_go_to_a_folder_under_their_names(call, tmp_path: Path):
    first = write_tuned(tmp_path / "cars.safetensors", 1)
    second = write_tuned(tmp_path / "DTDVal" / "finetuned.safetensors", 2)
    third = tmp_path / "sun"
    write_tuned(third / WEIGHTS, 3)
    result = call("extract", TINY, first, second, third, "-o", tmp_path / "out", "-q")
    names = ["cars", "DTDVal", "sun"]
    paths = [tmp_path / "out" / f"{name}.safetensors" for name in names]
    assert result.out.splitlines() == [str(path) for path in paths]
    assert [open_vector(path).header.name for path in paths] == names
    assert len({open_vector(path).header.fingerprint for path in paths}) == 1


def test_a_name_may_be_given(call, tuned: Path, tmp_path: Path):
    result = call("extract", TINY, tuned, "-o", tmp_path / "out", "--name", "my cars", "-q")
    assert result.out == f"{tmp_path}/out/my-cars.safetensors\n"
    assert open_vector(tmp_path / "out" / "my-cars.safetensors").header.name == "my cars"


def test_an_existing_file_is_kept_unless_forced(call, tuned: Path, tmp_path: Path):
    path = tmp_path / "v.safetensors"
    path.write_text("precious")
    result = call("extract", TINY, tuned, "-o", path)
    assert (result.code, result.out) == (1, "")
    assert result.err == f"atlas: error: {path}: exists already; use --force to replace it\n"
    assert path.read_text() == "precious"
    assert call("extract", TINY, tuned, "-o", path, "--force").code == 0
    assert open_vector(path).names


def test_an_input_is_never_overwritten(call, tuned: Path):
    before = tuned.read_bytes()
    result = call("extract", TINY, tuned, "-o", tuned, "--force")
    assert (result.code, len(result.error_lines)) == (2, 1)
    assert "is one of the inputs" in result.err
    assert tuned.read_bytes() == before


def test_a_folder_made_in_vain_is_taken_away(call, tmp_path: Path):
    (tmp_path / "bad.safetensors").write_bytes(b"nonsense")
    result = call("extract", TINY, tmp_path / "bad.safetensors", "-o", tmp_path / "out")
    assert (result.code, len(result.error_lines)) == (1, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["bad.safetensors"]


def test_the_vector_goes_through_a_real_pipe(tuned: Path, tmp_path: Path):
    target = tmp_path / "v.safetensors"
    subprocess.run(command("extract", TINY, tuned, "-o", target), capture_output=True, check=True)
    piped = subprocess.run(command("extract", TINY, tuned, "-o", "-"), capture_output=True)
    assert piped.returncode == 0
    assert piped.stdout == target.read_bytes()
    assert len(piped.stderr.splitlines()) == 1
    text = " ".join(command("extract", TINY, tuned, "-o", "-"))
    cut = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {text} -q | head -c 10"], capture_output=True
    )
    line = b"atlas: error: stdout was closed before everything was written\n"
    assert (cut.returncode, cut.stderr) == (1, line)


def test_a_terminal_gets_no_binary(tuned: Path):
    reader, terminal = pty.openpty()
    done = subprocess.run(
        command("extract", TINY, tuned, "-o", "-"), stdout=terminal, stderr=subprocess.PIPE
    )
    os.close(terminal)
    os.close(reader)
    assert done.returncode == 2
    assert b"send it to a pipe or a file" in done.stderr


def test_a_scale_of_minus_one_negates(call, tuned: Path, tmp_path: Path):
    call("extract", TINY, tuned, "-o", tmp_path / "v.safetensors", "-q")
    call("extract", TINY, tuned, "-o", tmp_path / "n.safetensors", "-q", "--scale", "-1")
    forth, back = (load_file(tmp_path / f"{name}.safetensors") for name in "vn")
    assert all(torch.equal(forth[name], -back[name]) for name in forth)
    assert forth.keys() == back.keys()


def test_a_wrong_base_is_one_warning_line(call, tmp_path: Path):
    first, second = (write_open_clip(tmp_path / str(seed), seed=seed) for seed in (1, 2))
    result = call("extract", first, second, "-o", tmp_path / "v.safetensors")
    (warning,) = [line for line in result.error_lines if line.startswith("atlas: warning: ")]
    assert result.code == 0
    assert warning.startswith(f"atlas: warning: {second}: |tau|/|theta0| is ")
    quiet = call("extract", first, second, "-o", tmp_path / "w.safetensors", "-q")
    assert (quiet.code, quiet.err) == (0, "")


def test_names_in_a_pickle_are_allowed_one_by_one(call, tuned: Path, tmp_path: Path):
    torch.save(
        {"state_dict": load_file(tuned), "when": time.strptime("2024", "%Y")}, tmp_path / "a.pt"
    )
    target = tmp_path / "v.safetensors"
    result = call("extract", TINY, tmp_path / "a.pt", "-o", target)
    assert (result.code, len(result.error_lines)) == (1, 1)
    assert "refuses to load time.struct_time; " in result.err
    allowed = ("--allow-global", "time.struct_time")
    assert call("extract", TINY, tmp_path / "a.pt", "-o", target, *allowed).code == 0


def test_tensors_to_ignore_are_named_by_patterns(call, tuned: Path, tmp_path: Path):
    tensors = load_file(tuned)
    kept = {n: t for n, t in tensors.items() if not n.startswith("visual.ln_p")}
    save_file(kept, tuned)
    target = tmp_path / "v.safetensors"
    result = call("extract", TINY, tuned, "-o", target)
    assert (result.code, len(result.error_lines)) == (1, 1)
    assert "visual.ln_post.bias is missing; visual.ln_post.weight is missing" in result.err
    assert "(and 1 more); what may be left out can be named with --ignore" in result.err
    result = call("extract", TINY, tuned, "-o", target, "--ignore", "ln_pre", "ln_post", "-q")
    assert result.code == 0
    assert len(open_vector(target).header.dropped) == 4


# Mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--dtype", "fp61"],
            "--dtype fp61: expected fp32, fp16, bf16, int8, int4, int3, int2; did you mean 'fp16'?",
        ),
        (
            ["--scope", "visaul"],
            "--scope visaul: expected visual, text, all; did you mean 'visual'?",
        ),
        (["--rank", "0"], "--rank"),
        (["--rank", "4", "--energy", "0.9"], "--rank and --energy both set the rank"),
        (["--energy", "1.5"], "--energy 1.5: expected a share between 0 and 1"),
        (["--rank", "4", "--dtype", "int8"], "--dtype int8 is for whole matrices"),
        (["--scale", "0"], "--scale 0.0: expected a number other than 0"),
        (["--scale", "nan"], "--scale nan: expected a number other than 0"),
        (["--ignore", "("], "--ignore (: not a regular expression"),
        (["--arch", "ViT-B-33"], "unknown architecture 'ViT-B-33'"),
        (["--json", "-o", "-"], "--json and -o - both write to stdout"),
        (["builtin:tiny"], "x.safetensors: is one file for 2 models; give a folder"),
        (["-o", "x.pt"], "-o x.pt: vectors are written as .safetensors, not as .pt"),
        (["builtin:tiny", "--name", "x"], "--name is for one fine-tuned model"),
        (["builtin:tiny", "-o", "-"], "-o - takes one fine-tuned model"),
        (["builtin:tiny", "-o", "out"], "two vectors would be written to out/tiny.safetensors"),
        (["builtin:tyni"], "unknown model 'builtin:tyni'; did you mean 'tiny'?"),
        (["./missing.pt"], "no such file or folder: ./missing.pt"),
    ],
)
def test_a_bad_command_line(call, arguments: list[str], message: str):
    result = call("extract", TINY, TINY, "-o", "x.safetensors", *arguments)
    assert (result.code, len(result.error_lines)) == (2, 1)
    assert message in result.err
    assert result.out == ""


def test_a_bad_command_line_costs_no_heavy_import():
    mistakes = (["--dtype", "fp61"], ["--rank", "4", "--energy", "1"], ["builtin:tyni"])
    given = [["extract", TINY, TINY, "-o", "x.safetensors", *extra] for extra in mistakes]
    given += [["extract", TINY, TINY, "-o", "/nowhere/at/all/x.safetensors"], ["extract", "--help"]]
    found = outcomes(given)
    assert [(outcome.code, outcome.heavy) for outcome in found] == [
        *[(2, [])] * len(mistakes),
        (1, []),
        (0, []),
    ]


def test_a_base_of_unknown_architecture_needs_its_name(call, tuned: Path, tmp_path: Path):
    result = call("extract", tuned, TINY, "-o", tmp_path / "v.safetensors")
    assert (result.code, len(result.error_lines)) == (2, 1)
    assert "name it with --arch" in result.err


def test_a_full_disk_is_one_line(run, tuned: Path, tmp_path: Path):
    import resource

    limit = (200_000, 200_000)
    result = run(
        *("extract", TINY, tuned, "-o", tmp_path / "v.safetensors"),
        before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit),
    )
    assert (result.code, len(result.error_lines)) == (1, 1)
    assert "v.safetensors: cannot be written: File too large" in result.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cars.safetensors"]


# Hostile files --------------------------------------------------------------------------------


def refused(call, path: Path, says: str) -> None:
    """Both as the fine-tuned model and as the base: exit code 1, one line, nothing left behind."""
    before = sorted(path.parent.rglob("*"))
    for arguments in ((TINY, path), (path, TINY, "--arch", "ViT-B-32")):
        start = time.process_time()
        result = call("extract", *arguments, "-o", path.parent / "v.safetensors")
        assert (result.code, result.out, len(result.error_lines)) == (1, "", 1), result.err
        assert says in result.err
        assert result.err.rstrip("\n").isprintable()
        assert time.process_time() - start < 20
    assert sorted(path.parent.rglob("*")) == before
    assert not (path.parent / MARKER).exists()


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.slow
def test_a_hostile_pickle_is_refused_in_one_line(call, tmp_path: Path, name: str):
    refused(call, HOSTILE[name].make(tmp_path), HOSTILE[name].says)


def entry(start: int, stop: int, shape: list[int] | None = None) -> dict[str, object]:
    count = (stop - start) // 4
    return {"dtype": "F32", "shape": shape or [count], "data_offsets": [start, stop]}


def write_raw(path: Path, header: str | bytes, data: bytes = bytes(64)) -> Path:
    content = header if isinstance(header, bytes) else header.encode()
    path.write_bytes(struct.pack("<Q", len(content)) + content + data)
    return path


HEADERS: dict[str, tuple[str, str]] = {
    "overlapping offsets": (
        json.dumps({"visual.a": entry(0, 40), "visual.b": entry(24, 64)}),
        "is not a valid safetensors file",
    ),
    "a gap between tensors": (
        json.dumps({"visual.a": entry(0, 16), "visual.b": entry(32, 64)}),
        "is not a valid safetensors file",
    ),
    "offsets beyond the end": (
        json.dumps({"visual.a": entry(0, 64), "visual.b": entry(64, 6400)}),
        "is not a valid safetensors file",
    ),
    "a shape larger than its bytes": (
        json.dumps({"visual.a": entry(0, 64, [10**9, 10**9])}),
        "is not a valid safetensors file",
    ),
    "negative offsets": (
        json.dumps({"visual.a": entry(-64, 0)}),
        "is not a valid safetensors file",
    ),
    "duplicated keys": (
        '{"visual.a": %s, "visual.a": %s}' % ((json.dumps(entry(0, 64)),) * 2),
        "it has 'visual.a' twice",
    ),
    "duplicated fields": (
        '{"visual.a": {"dtype": "F32", "dtype": "F32", "shape": [16], "data_offsets": [0, 64]}}',
        "is not a valid safetensors file",
    ),
    "no JSON": ("{" * 100, "is not a valid safetensors file"),
    "endless nesting": ('{"a":' + "[" * 100_000, "is not a valid safetensors file"),
    "another value than an object": ("[1, 2]", "is not a valid safetensors file"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_hostile_safetensors_header_is_refused_in_one_line(call, tmp_path: Path, name: str):
    header, says = HEADERS[name]
    refused(call, write_raw(tmp_path / "bad.safetensors", header), says)


@pytest.mark.parametrize("length", [2**62, 2**40, 10**8])
def test_an_oversized_header_takes_no_memory(call, tmp_path: Path, length: int):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{" + b" " * 100)
    refused(call, path, "is not a valid safetensors file")


@pytest.mark.parametrize("size", [0, 3, 8])
def test_a_safetensors_file_without_a_header_is_told_so(call, tmp_path: Path, size: int):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(bytes(size))
    refused(call, path, f"is not a valid safetensors file: it has no header, and {size} bytes")


def index(folder: Path, *shards: str) -> Path:
    weights = {f"visual.{number}": name for number, name in enumerate(shards)}
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": weights}))
    return path


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "a/../../b", "..\\b"])
def test_an_index_cannot_point_outside_its_folder(call, tmp_path: Path, name: str):
    (tmp_path / "model").mkdir()
    write_tuned(tmp_path / "outside.safetensors")
    index(tmp_path / "model", name)
    result = call("extract", TINY, tmp_path / "model", "-o", tmp_path / "v.safetensors")
    assert (result.code, len(result.error_lines)) == (1, 1)
    assert f"names a file outside its folder: {name}" in result.err


def test_a_shard_cannot_be_a_link_out_of_its_folder(call, tmp_path: Path):
    outside = write_tuned(tmp_path / "outside.safetensors")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "shard.safetensors").symlink_to(outside)
    index(tmp_path / "model", "shard.safetensors")
    result = call("extract", TINY, tmp_path / "model", "-o", tmp_path / "v.safetensors")
    assert (result.code, len(result.error_lines)) == (1, 1)
    assert "shard.safetensors is a link out of its folder" in result.err


def test_shards_linked_beside_a_linked_index_are_fine(call, tmp_path: Path):
    """As the cache of the Hub keeps them: all links, to one folder of blobs."""
    blobs, model = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    write_tuned(blobs / "shard.safetensors")
    model.mkdir(parents=True)
    index(blobs, "shard.safetensors")
    for path in blobs.iterdir():
        (model / path.name).symlink_to(path)
    assert call("extract", TINY, model, "-o", tmp_path / "v.safetensors").code == 0


def test_a_tensor_in_two_shards_is_refused(call, tmp_path: Path):
    for name in ("a.safetensors", "b.safetensors"):
        save_file({"visual.proj": torch.ones(2)}, tmp_path / name)
    index(tmp_path, "a.safetensors", "b.safetensors")
    result = call("extract", TINY, tmp_path, "-o", tmp_path / "v.safetensors")
    assert (result.code, len(result.error_lines)) == (1, 1)
    assert "visual.proj is also in another shard" in result.err


# Sudden death ---------------------------------------------------------------------------------

KILLED = """
import json, os, random, signal, sys, time
from pathlib import Path
import torch
from atlas_cli.sources.locate import locate
from atlas_cli.sources.locate import parse_reference
from atlas_cli.vectors.bases import open_base
from atlas_cli.vectors.extract import Options, extract_to

base, tuned = (locate(parse_reference(name)) for name in sys.argv[1:3])
path, times = Path(sys.argv[3]), int(sys.argv[4])

def extract():
    extract_to(path, "x", open_base(base, "visual"), tuned, Options())

def forked(delay):
    start, child = time.perf_counter(), os.fork()
    if not child:
        extract()
        os._exit(0)
    if delay is not None:
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    return time.perf_counter() - start, os.WIFSIGNALED(status)

took = max(forked(None)[0] for _ in range(2))
whole, chance = path.read_bytes(), random.Random(0)
seen = {"nothing": 0, "old": 0, "whole": 0, "broken": 0, "killed": 0}
for number in range(10 * times):
    path.unlink(missing_ok=True)
    if number % 2:
        path.write_bytes(b"old")
    killed = forked(chance.uniform(0, took))[1]
    seen["killed"] += killed
    took *= 1.0 if killed else 0.9  # it was done already: aim earlier
    content = path.read_bytes() if path.exists() else None
    kind = {None: "nothing", b"old": "old", whole: "whole"}.get(content, "broken")
    seen[kind] += 1
    if seen["killed"] == times:
        break
print(json.dumps(seen))
"""


@pytest.mark.slow
def test_killed_at_any_moment_it_leaves_nothing_or_a_whole_file(run_python, tmp_path: Path):
    """50 times, each in a fork of a process that has torch loaded already."""
    torch.manual_seed(0)
    config = (builtin_model("tiny") / "open_clip_config.json").read_text()
    tensors = {f"visual.{number}.weight": torch.randn(512, 1024) for number in range(24)}
    for name in ("base", "tuned"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "open_clip_config.json").write_text(config)
        save_file(tensors, tmp_path / name / WEIGHTS)
        tensors = {n: tensor + 0.01 for n, tensor in tensors.items()}
    (tmp_path / "out").mkdir()
    target = tmp_path / "out" / "v.safetensors"
    arguments = (str(tmp_path / "base"), str(tmp_path / "tuned"), str(target), "50")
    seen = json.loads(run_python(KILLED, *arguments))
    assert seen["broken"] == 0
    assert seen["killed"] == 50
    assert seen["nothing"] >= 5
    assert seen["old"] >= 5
