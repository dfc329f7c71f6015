"""Vectors of few bits: extracted, inspected, learned with and merged like any other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from learned_runs import QUICK, WEIGHTS, learn, write_tuned, write_world
from safetensors.torch import load_file, save_file

from atlas_cli.core.packed import unpacked
from atlas_cli.core.storage import Packed, Residual
from atlas_cli.vectors.format import open_checked

MATRIX = "visual.transformer.resblocks.0.mlp.c_fc.weight"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("world"))


def extract(call, world: Path, folder: Path, dtype: str, *more: str):
    models = (world / "tuned0", world / "tuned1")
    return call("extract", world / "base", *models, "-o", folder, "--dtype", dtype, *more)


def differences(world: Path, name: str) -> list[torch.Tensor]:
    base, *tuned = (
        load_file(world / folder / WEIGHTS)[name] for folder in ("base", "tuned0", "tuned1")
    )
    return [model - base for model in tuned]


def test_fewer_bits_take_fewer_bytes_and_inspect_tells_the_error_of_every_block(
    call, world, tmp_path
):
    sizes, errors = [], []
    for dtype in ("int8", "int4", "int3", "int2"):
        assert extract(call, world, tmp_path / dtype, dtype, "--quiet").code == 0
        file = tmp_path / dtype / "tuned0.safetensors"
        told = json.loads(call("inspect", file, "--json").out)["vectors"][0]
        blocks = {block["name"]: block for block in told["blocks"]}
        exact, kept = differences(world, MATRIX)[0], open_checked(file).values(MATRIX)
        error = (torch.linalg.norm(exact - kept) / torch.linalg.norm(exact)).item()
        assert blocks[MATRIX]["error"] == pytest.approx(error, rel=1e-4)
        assert blocks[MATRIX]["storage"] == dtype
        sizes.append(file.stat().st_size)
        errors.append(error)
    assert sizes == sorted(sizes, reverse=True)
    assert errors == sorted(errors)
    assert {block["storage"] for block in blocks.values()} == {"int2", "bf16"}  # bf16: no matrices


def test_rtvq_is_three_bits_of_the_mean_and_two_of_what_is_left(call, world, tmp_path):
    assert extract(call, world, tmp_path / "pool", "rtvq", "--quiet").code == 0
    names = sorted(path.name for path in (tmp_path / "pool").iterdir())
    assert names == ["mean.rtvq", "tuned0.safetensors", "tuned1.safetensors"]
    exact = differences(world, MATRIX)
    for number, tau in enumerate(exact):
        block = open_checked(tmp_path / "pool" / f"tuned{number}.safetensors").read(MATRIX)
        assert isinstance(block, Residual)
        assert (block.shared.bits, block.own.bits) == (3, 2)
        mean = unpacked(block.shared)
        assert torch.linalg.norm(mean - (exact[0] + exact[1]) / 2) < 0.25 * torch.linalg.norm(mean)
        left = tau - mean
        assert torch.linalg.norm(left - unpacked(block.own)) < 0.5 * torch.linalg.norm(left)


@pytest.mark.slow
def test_what_is_learned_with_few_bits_is_what_is_merged(call, world, tmp_path):
    for dtype in ("int3", "rtvq"):
        pool, run, merged = (tmp_path / f"{dtype}-{word}" for word in ("pool", "run", "model"))
        assert extract(call, world, pool, dtype, "--quiet").code == 0
        learn(world, "fit", run, "--vectors", pool, "--select", "val:" + str(world / "photos"))
        assert call("merge", run / "recipe.yaml", "-o", merged, "--memory", "4GB").code == 0
        scored = json.loads(call("eval", merged, "--data", world / "photos", "--json").out)
        told = json.loads((run / "result.json").read_text())
        assert scored["results"][0]["top1"] == pytest.approx(told["learned"])


@pytest.mark.slow
def test_models_are_extracted_on_the_way_with_few_bits(call, world, tmp_path, monkeypatch):
    monkeypatch.setenv("ATLAS_CACHE", str(tmp_path / "cache"))
    given = ["fit", world / "photos", "--model", world / "base", "--vectors", world / "tuned0"]
    found = call(*given, *QUICK, "--storage", "int2", "-o", tmp_path / "run")
    assert found.code == 0, found.err
    (file,) = (tmp_path / "cache" / "vectors").rglob("*.safetensors")
    assert isinstance(open_checked(file).read(MATRIX), Packed)


def test_bad_input_is_one_line_and_nothing_is_written(call, world, tmp_path):
    base = load_file(world / "base" / WEIGHTS)
    biases = {name: tensor.clone() for name, tensor in base.items()}
    biases["visual.ln_post.bias"] += 1.0
    only = write_tuned(world / "base", tmp_path / "only", 3)
    save_file(biases, only / WEIGHTS, {"format": "pt"})
    out, one = tmp_path / "out", [world / "base", world / "tuned0"]
    cases = [
        ([world / "base", only, "--dtype", "int4"], "no matrix, and --dtype int4 is for matrices"),
        ([*one, "--dtype", "rtvq"], "--dtype rtvq is for several models"),
        ([*one, world / "tuned1", only, "--dtype", "rtvq"], "no matrix, and --dtype rtvq"),
        ([*one, "--dtype", "int3", "--rank", "4"], "--dtype int3 is for whole matrices"),
        ([*one, "--dtype", "int2", "--lora", "4"], "--dtype int2 is for task vectors"),
        ([*one, "--dtype", "int5"], "--dtype int5: expected fp32, fp16, bf16, int8, int4"),
    ]
    for given, words in cases:
        found = call("extract", *given, "-o", out)
        assert (found.code, len(found.error_lines)) == (2, 1), found.err
        assert words in found.err
        assert not out.exists(), words


def test_a_residual_is_refused_without_what_it_shares(call, world, tmp_path):
    pool = tmp_path / "pool"
    assert extract(call, world, pool, "rtvq", "--quiet").code == 0
    again = extract(call, world, pool, "rtvq", "--quiet")
    assert (again.code, "use --force" in again.err) == (1, True)
    mean, vector = pool / "mean.rtvq", pool / "tuned0.safetensors"
    mean.write_bytes(mean.read_bytes()[:-1] + b"\x07")
    assert "goes with another mean.rtvq" in call("inspect", vector).err
    mean.unlink()
    assert "goes with mean.rtvq beside it, which is not there" in call("inspect", vector).err
    pushed = call("push", vector, "me/vector", "--dry-run")
    assert (pushed.code, "shares mean.rtvq with others" in pushed.err) == (2, True)
