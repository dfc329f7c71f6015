"""`scope: model`: the tensors of a model are sparsified as one long vector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from merge_runs import digests, llama, read_model, write_model, write_recipe
from mergekit_cases import fixture
from method_cases import NET_SHAPES
from tiles import merge as merge_tensors

from atlas_cli.io.checkpoint import open_safetensors

ROOMY = ("--memory", "8GB")  # the process of the tests itself is in the budget


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """./base and ./m1 to ./m3 in bfloat16, where many differences are equally large."""
    monkeypatch.chdir(tmp_path)
    for number in range(4):
        name = "base" if number == 0 else f"m{number}"
        write_model(tmp_path / name, llama(number, width=24, dtype=torch.bfloat16))
    return tmp_path


def recipe_of(method: str, own: dict[str, Any], **merge: Any) -> dict[str, Any]:
    entries = [{"model": f"./m{number}", "parameters": dict(own)} for number in (1, 2, 3)]
    found = {"merge_method": method, "base_model": "./base", "models": entries}
    return found | {"parameters": {"scope": "model", **merge}}


def as_one(folder: Path) -> torch.Tensor:
    """All tensors of a model, one after another as they are in its file."""
    return torch.cat([t.read().flatten() for t in open_safetensors(folder).values()])


OWN = {"weight": 0.7, "density": 0.3}


@pytest.mark.parametrize("tile", [1 << 7, 1 << 19])
@pytest.mark.parametrize(
    ("method", "own", "merge"),
    [
        ("ties", OWN, {}),
        ("ties", OWN, {"zero_sign": "majority", "divisor": "count", "rounding": "above"}),
        ("breadcrumbs", OWN | {"gamma": 0.1}, {"rescale": True}),
        ("breadcrumbs_ties", OWN | {"gamma": 0.1}, {}),
    ],
)
def test_a_model_is_merged_as_one_vector(
    call,
    models: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    own: dict[str, Any],
    merge: dict[str, Any],
    tile: int,
):
    monkeypatch.setattr("atlas_cli.merging.plan.TILE", tile)
    path = write_recipe(models / "r.yaml", recipe_of(method, own, **merge))
    for threads in ("1", "4"):
        result = call("merge", path, "-o", f"out{threads}", "--threads", threads, *ROOMY)
        assert result.code == 0, result.err
    assert digests(models / "out1") == digests(models / "out4")
    base, *tuned = (as_one(models / n / "model.safetensors") for n in ("base", "m1", "m2", "m3"))
    wanted = merge_tensors(method, base, tuned, own | merge)
    # The result has the order of the base.
    assert torch.equal(as_one(models / "out1" / "model.safetensors"), wanted)
    assert not torch.equal(base, wanted)


def test_small_tensors_keep_less_if_the_model_is_one_vector(call, models: Path):
    """Differences a tenth as large stay where they are if the others fill the density."""
    shrunk = {}
    base = llama(0)
    for name, tensor in llama(1).items():
        shrunk[name] = base[name] + (0.01 if "norm" in name else 1) * (tensor - base[name])
    write_model(models / "base", base)
    for number in (1, 2, 3):
        write_model(models / f"m{number}", shrunk)
    for scope in ("model", "tensor"):
        found = recipe_of("ties", OWN, scope=scope)
        path = write_recipe(models / "r.yaml", found)
        assert call("merge", path, "-o", scope, *ROOMY).code == 0
    name = "model.norm.weight"
    assert torch.equal(read_model(models / "model")[name], base[name])
    assert not torch.equal(read_model(models / "tensor")[name], base[name])


def test_ties_over_the_whole_model_is_that_of_fusion_bench(call, models: Path):
    kept = fixture("methods")
    for label, folder in (("base", "base"), ("0", "m1"), ("1", "m2"), ("2", "m3")):
        write_model(models / folder, {name: kept[f"nets/{label}/{name}"] for name in NET_SHAPES})
    conventions = {"zero_sign": "majority", "divisor": "count", "rounding": "above", "lambda": 0.3}
    recipe = recipe_of("ties", {"weight": 1.0, "density": 0.2}, **conventions)
    result = call("merge", write_recipe(models / "r.yaml", recipe), "-o", "out", *ROOMY)
    assert result.code == 0, result.err
    merged = read_model(models / "out")
    assert merged.keys() == NET_SHAPES.keys()
    for name, found in merged.items():
        torch.testing.assert_close(found, kept[f"nets/ties-all/{name}"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("changed", ["a parameter by layer", "dtypes"])
def test_what_differs_from_tensor_to_tensor_is_refused(call, models: Path, changed: str):
    recipe = recipe_of("ties", OWN)
    if changed == "dtypes":
        for name in ("base", "m1", "m2", "m3"):
            tensors = read_model(models / name)
            tensors["lm_head.weight"] = tensors["lm_head.weight"].float()
            write_model(models / name, tensors)
    else:
        recipe["models"][1]["parameters"]["density"] = [0.2, 0.9]
    result = call("merge", write_recipe(models / "r.yaml", recipe), "-o", "out", *ROOMY)
    assert (result.code, result.out, len(result.error_lines)) == (2, "", 1)
    wanted = "several dtypes" if changed == "dtypes" else "give every parameter as one value"
    assert wanted in result.err
    assert not (models / "out").exists()
