"""Every method that mergekit has gives mergekit's numbers, on random tensors."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiles import merge

from atlas_cli.core.methods.bits import bits_of

PYTHON = os.environ.get("ATLAS_MERGEKIT_PYTHON")
pytestmark = pytest.mark.skipif(
    not PYTHON, reason="ATLAS_MERGEKIT_PYTHON does not name a python with mergekit 0.1.5"
)

SHAPES = {"matrix": (150, 1000), "vector": (77,), "kernel": (6, 5, 3, 3)}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SETS = [f"{shape}-{dtype}" for shape in SHAPES for dtype in DTYPES]
WEIGHTS = {"weight": [0.7, 0.4, -0.2]}


@dataclass(frozen=True)
class Case:
    """A merge of a base, if there is one, and some models."""

    method: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    models: int = 3
    base: bool = True

    def __str__(self) -> str:
        given = ",".join(f"{k}={v}" for k, v in self.parameters.items())
        return f"{self.method}({given})x{self.models}{'+base' if self.base else ''}"


# Elementwise arithmetic: the same bits.
EXACT = [
    Case("linear", WEIGHTS, base=False),
    Case("linear", WEIGHTS | {"normalize": False}, base=False),
    Case("linear", {"weight": [1.0, 1.0, 1.0, 1.0]}, 4, base=False),
    Case("passthrough", {"scale": 0.3}, 1, base=False),
    Case("passthrough", {}, 1, base=False),
    Case("task_arithmetic", WEIGHTS),
    Case("task_arithmetic", WEIGHTS | {"normalize": True, "lambda": 0.7}),
    Case("task_arithmetic", {"weight": [1.0, -1.0], "normalize": False}, 2),
    Case("task_arithmetic", {"weight": [0.9]}, 1),
    Case("ties", WEIGHTS),
    Case("ties", {"weight": [1.0] * 4, "int8_mask": True}, 4),
    Case("ties", WEIGHTS | {"normalize": False, "lambda": 1.3}),
    Case("dare_ties", WEIGHTS),
    Case("dare_linear", WEIGHTS),
    Case("della", WEIGHTS),
    Case("della_linear", WEIGHTS),
    Case("breadcrumbs", WEIGHTS),
]
# Chosen by magnitude: the same bits, but for elements as large as the last one chosen.
CHOSEN = [
    Case("ties", WEIGHTS | {"density": [0.5, 0.2, 0.9]}),
    Case("ties", WEIGHTS | {"density": [1.0, 0.0, 0.001]}),
    Case("ties", WEIGHTS | {"density": 0.3, "normalize": False}),
    Case("breadcrumbs", WEIGHTS | {"density": 0.5, "gamma": [0.01, 0.1, 0.7]}),
    Case("breadcrumbs", WEIGHTS | {"density": [0.9, 0.3, 0.0], "gamma": 0.0}),
    Case("breadcrumbs_ties", WEIGHTS | {"density": [0.5, 0.2, 0.9], "gamma": 0.1}),
    Case("sce", {"select_topk": 0.3, "int8_mask": True}),
    Case("sce", {"select_topk": 0.9}, 4),
]
# Through a norm or an angle of the whole tensor.
MEASURED = [
    Case("slerp", {"t": 0.3}, 1),
    Case("slerp", {"t": 1.4}, 1),
    Case("nuslerp", {"weight": [0.3, 0.7]}, 2),
    Case("nuslerp", {"weight": [1.0, -1.0]}, 2, base=False),
    Case("nuslerp", {"weight": [2.0, 0.5], "nuslerp_flatten": False}, 2),
    Case("nuslerp", {"weight": [1.0, 0.5], "nuslerp_flatten": False}, 2, base=False),
    Case("nuslerp", {"weight": [1.0, 0.5], "nuslerp_flatten": False, "nuslerp_row_wise": True}, 2),
    Case("multislerp", {"weight": [0.5, 0.3, 0.9]}),
    Case("multislerp", {"weight": [0.5, 0.3, 0.9], "normalize_weights": False}, base=False),
    Case("multislerp", {"weight": [1.0]}, 1),
    Case("karcher", {}, base=False),
    Case("karcher", {}, 4, base=False),
    Case("karcher", {"max_iter": 2, "tol": 1e-3}, 2, base=False),
    Case("karcher", {}, 1, base=False),
    Case("model_stock", {}),
    Case("model_stock", {}, 4),
    Case("model_stock", {"filter_wise": True}),
    Case("sce", {}),
    Case("sce", {"select_topk": 0.0}),
]


def key_of(case: Case, chosen: str) -> str:
    return f"{case}@{chosen}"


def inputs_of(chosen: str) -> list[torch.Tensor]:
    """A base and four models that are near it; a few elements are equal."""
    shape, dtype = chosen.split("-")
    generator = torch.Generator().manual_seed(SETS.index(chosen))
    base = torch.randn(SHAPES[shape], generator=generator)
    noise = [torch.randn(base.shape, generator=generator) for _ in range(4)]
    tuned = [base + 0.3 * tau * (tau.abs() > 0.1) for tau in noise]
    return [tensor.to(DTYPES[dtype]) for tensor in (base, *tuned)]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """What mergekit makes of all cases, in one run."""
    folder = tmp_path_factory.mktemp("mergekit")
    named = {
        f"{chosen}/{label}": tensor
        for chosen in SETS
        for label, tensor in zip(("base", *range(4)), inputs_of(chosen), strict=True)
    }
    save_file(named, folder / "inputs.safetensors")
    cases = [
        vars(case) | {"key": key_of(case, chosen), "set": chosen}
        for case in (*EXACT, *CHOSEN, *MEASURED)
        for chosen in SETS
    ]
    (folder / "cases.json").write_text(json.dumps(cases))
    driver = Path(__file__).parent / "mergekit_driver.py"
    names = ("inputs.safetensors", "cases.json", "outputs.safetensors")
    subprocess.run([PYTHON, driver, *(folder / name for name in names)], check=True)
    return load_file(folder / "outputs.safetensors")


def ours(case: Case, chosen: str, rows: int = 1 << 30) -> torch.Tensor:
    base, *models = inputs_of(chosen)
    given = models[: case.models]
    return merge(case.method, base if case.base else None, given, case.parameters, rows=rows)


@pytest.mark.parametrize("chosen", SETS)
@pytest.mark.parametrize("case", EXACT, ids=str)
def test_arithmetic_gives_the_same_bits(case: Case, chosen: str, theirs):
    wanted = theirs[key_of(case, chosen)]
    found = ours(case, chosen, rows=13)
    assert found.dtype == wanted.dtype
    assert torch.equal(bits_of(found), bits_of(wanted))  # the sign of a zero as well


@pytest.mark.parametrize("chosen", SETS)
@pytest.mark.parametrize("case", CHOSEN, ids=str)
def test_a_choice_by_magnitude_differs_only_among_equals(case: Case, chosen: str, theirs):
    wanted = theirs[key_of(case, chosen)]
    found = ours(case, chosen, rows=13)
    assert torch.equal(found, wanted) or same_but_for_equals(case, chosen, found, wanted)


def same_but_for_equals(case: Case, chosen: str, found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether every difference is where some delta is as large as others, and there are few."""
    base, *models = inputs_of(chosen)
    apart = found != wanted
    shared = torch.zeros_like(apart)
    for model in models[: case.models]:
        sizes = (model - base).abs()
        values, counts = sizes.unique(return_counts=True)
        shared |= torch.isin(sizes, values[counts > 1])
    return bool((apart & ~shared).sum() == 0) and apart.float().mean() < 0.05


@pytest.mark.parametrize("chosen", SETS)
@pytest.mark.parametrize("case", MEASURED, ids=str)
def test_what_depends_on_norms_agrees_to_rounding(case: Case, chosen: str, theirs):
    wanted = theirs[key_of(case, chosen)]
    found = ours(case, chosen, rows=13)
    assert found.dtype == wanted.dtype
    apart = (found.double() - wanted.double()).norm() / wanted.double().norm()
    assert apart < {torch.float32: 1e-6, torch.float16: 1e-4, torch.bfloat16: 1e-3}[wanted.dtype]
