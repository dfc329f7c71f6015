"""Steps after a merge method, against their formulas in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from merge_runs import ROOMY, llama, read_model, write_model

POST = {"post": {"svc": {"alpha": 0.2}}}


@pytest.fixture
def merge(call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for number in range(3):
        write_model(tmp_path / ("base" if number == 0 else f"m{number}"), llama(number))

    def run(recipe: dict[str, Any], to: str = "out") -> Any:
        Path("recipe.yaml").write_text(yaml.safe_dump(recipe))
        return call("merge", "recipe.yaml", "-o", to, *ROOMY)

    return run


def calibrated(
    merged: torch.Tensor, base: torch.Tensor, models: list[torch.Tensor], alpha: float
) -> torch.Tensor:
    """Every direction on its own."""
    tau = merged.double() - base.double()
    left, sizes, right = torch.linalg.svd(tau, full_matrices=False)
    result = base.double().clone()
    for r, size in enumerate(sizes):
        own = left[:, r] @ tau
        total = 0.0
        for model in models:
            task = left[:, r] @ (model.double() - base.double())
            total += max(alpha, float(own @ task / (task @ task)))
        result += size * len(models) / total * torch.outer(left[:, r], right[r])
    return result


def recipes() -> list[dict[str, Any]]:
    weighed = [{"model": f"./m{n}", "parameters": {"weight": 0.8}} for n in (1, 2)]
    return [
        {"merge_method": "task_arithmetic", "models": weighed},
        {"merge_method": "iso_c", "models": [{"model": "./m1"}, {"model": "./m2"}]},
        {"merge_method": "linear", "models": weighed, "parameters": {"weight": 0.2}},
    ]


def test_svc_calibrates_what_a_method_has_merged(merge, tmp_path: Path):
    base, one, two = (llama(number) for number in range(3))
    for number, recipe in enumerate(recipes()):
        based = recipe | {"base_model": "./base"}
        assert merge(based, to=f"plain{number}").code == 0
        result = merge(based | POST, to=f"post{number}")
        assert result.code == 0, result.err
        plain, found = (read_model(tmp_path / f"{kind}{number}") for kind in ("plain", "post"))
        for name, tensor in plain.items():
            if tensor.ndim != 2:
                assert torch.equal(found[name], tensor)
                continue
            wanted = calibrated(tensor, base[name], [one[name], two[name]], 0.2)
            torch.testing.assert_close(found[name].double(), wanted, rtol=1e-4, atol=1e-5)
            assert not torch.equal(found[name], tensor)


def test_wrong_steps_are_told_all_at_once(merge):
    recipe = recipes()[2] | {"post": {"svd": {}, "svc": {"alpa": 1, "alpha": [0, 1]}}}
    result = merge(recipe)
    assert result.code == 2
    assert sorted(result.err.splitlines()) == sorted(
        [
            "atlas: error: recipe.yaml: key 'base_model' is missing; post steps need it",
            "atlas: error: recipe.yaml.post: unknown step 'svd'; did you mean 'svc'?",
            "atlas: error: recipe.yaml.post.svc.alpha: expected one number for all tensors",
            "atlas: error: recipe.yaml.post.svc: unknown parameter 'alpa'; did you mean 'alpha'? "
            "(there are: alpha)",
        ]
    )
