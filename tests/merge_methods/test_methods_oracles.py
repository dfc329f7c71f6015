"""Merge methods agree with PEFT and FusionBench once their conventions are chosen.

What these gave is kept in tests/fixtures; test_oracles.py holds that against the libraries.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mergekit_cases import Tensors, fixture
from method_cases import DARE, DENSITIES, ISOTROPIC, NET_SHAPES, SIGNS, WEIGHTS
from tiles import merge

PEFT = {"weight": WEIGHTS, "weigh": "after", "divisor": "count", "normalize": True}


@pytest.fixture(scope="module")
def kept() -> Tensors:
    return fixture("methods")


def check_peft(kept: Tensors, name: str, method: str, asked: dict[str, Any], **more: int) -> None:
    base, models = kept["peft/base"], [kept[f"peft/{number}"] for number in range(3)]
    found = merge(method, base, models, asked, **more)
    torch.testing.assert_close(found, base + kept[f"peft/{name}"], rtol=1e-5, atol=1e-6)


def test_task_arithmetic_is_that_of_peft(kept: Tensors):
    check_peft(kept, "task_arithmetic", "task_arithmetic", {"weight": WEIGHTS})


@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize("theirs", SIGNS)
def test_ties_is_that_of_peft(kept: Tensors, density: float, theirs: str):
    asked = PEFT | {"density": density, "elect": SIGNS[theirs]}
    check_peft(kept, f"ties-{density}-{theirs}", "ties", asked, rows=7)


@pytest.mark.parametrize("name", DARE)
def test_dare_is_that_of_peft_given_what_was_dropped(kept: Tensors, name: str):
    conventions = PEFT if name == "dare_ties" else {"weight": WEIGHTS}
    check_peft(kept, name, name, conventions | {"density": 0.5, "rescale_by": "density"})


def check_nets(kept: Tensors, run: str, method: str, asked: dict[str, Any]) -> None:
    for name in NET_SHAPES:
        models = [kept[f"nets/{number}/{name}"] for number in range(3)]
        found = merge(method, kept[f"nets/base/{name}"], models, asked)
        torch.testing.assert_close(found, kept[f"nets/{run}/{name}"], rtol=1e-4, atol=1e-5)


def test_task_singular_vectors_are_those_of_fusion_bench(kept: Tensors):
    check_nets(kept, "tsv", "tsv", {})
    check_nets(kept, "tsv-weighted", "tsv", {"weight": WEIGHTS})


def test_isotropic_merging_is_that_of_fusion_bench(kept: Tensors):
    check_nets(kept, "iso_c", "iso_c", {"lambda": 1.5})


@pytest.mark.parametrize("fraction", ISOTROPIC)
def test_isotropic_merging_with_task_directions_is_that_of_fusion_bench(
    kept: Tensors, fraction: float
):
    asked = {"lambda": 1.5, "common_space_fraction": fraction}
    check_nets(kept, f"iso_cts-{fraction}", "iso_cts", asked)


def test_ties_over_one_vector_is_that_of_fusion_bench(kept: Tensors):
    """It takes the model as one vector: here a model of one tensor."""
    asked = {
        **{"weight": 1.0, "density": 0.2, "rounding": "above", "lambda": 0.3},
        **{"zero_sign": "majority", "divisor": "count"},
    }
    models = [kept[f"nets/{number}/tall"] for number in range(3)]
    found = merge("ties", kept["nets/base/tall"], models, asked)
    torch.testing.assert_close(found, kept["nets/ties-tall/tall"], rtol=1e-5, atol=1e-6)
