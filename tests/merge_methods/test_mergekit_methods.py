"""Every method that mergekit has gives mergekit's numbers, on random tensors."""

from __future__ import annotations

import itertools
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
from tiles import cut, merge, resolve

from atlas_cli.merge_methods.order_statistics import bits_of
from atlas_cli.merge_methods.sparsify import AT_RANDOM, BY_RANK, delta_of, sparsify_
from atlas_cli.registry import MERGE_METHODS

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
# By chance: the same numbers, given what is kept.
KEPT = {"density": [0.5, 0.3, 0.8]}
DRAWN = [
    Case("dare_linear", WEIGHTS | KEPT),
    Case("dare_linear", WEIGHTS | KEPT | {"rescale": False}),
    Case("dare_ties", WEIGHTS | KEPT),
    Case("della", WEIGHTS | KEPT),
    Case("della", WEIGHTS | KEPT | {"normalize": False, "lambda": 0.8}),
    Case("della_linear", WEIGHTS | KEPT | {"epsilon": 0.1}),
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


SPARSIFIERS = {"dare": AT_RANDOM, "della": BY_RANK}
# Rounding of one number of each size; whole tensors agree much better in float32.
LIMIT = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


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


def masks_of(case: Case, chosen: str) -> list[torch.Tensor]:
    """What our draws keep of every task vector."""
    base, *models = inputs_of(chosen)
    (tile,) = cut(base, models[: case.models], len(base))
    values = resolve(MERGE_METHODS[case.method], case.models, case.parameters, 0)
    sparsifier = SPARSIFIERS[case.method.split("_")[0]]
    deltas = [delta_of(tile, model) for model in range(case.models)]
    for delta, found in zip(
        deltas, sparsifier.statistics(lambda: iter([tile]), values), strict=True
    ):
        sparsify_(sparsifier, delta, tile, found)
    return [(delta != 0).to(torch.uint8) for delta in deltas]


def run_mergekit(folder: Path, cases: list[dict], tensors: dict[str, torch.Tensor]):
    save_file(tensors, folder / "inputs.safetensors")
    (folder / "cases.json").write_text(json.dumps(cases))
    driver = Path(__file__).parent.parent / "mergekit_driver.py"
    names = ("inputs.safetensors", "cases.json", "outputs.safetensors")
    subprocess.run([PYTHON, driver, *(folder / name for name in names)], check=True)
    return load_file(folder / "outputs.safetensors")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """What mergekit makes of all cases, in one run."""
    tensors = {
        f"{chosen}/{label}": tensor
        for chosen in SETS
        for label, tensor in zip(("base", *range(4)), inputs_of(chosen), strict=True)
    }
    for case, chosen in itertools.product(DRAWN, SETS):
        for number, mask in enumerate(masks_of(case, chosen)):
            tensors[f"{key_of(case, chosen)}/mask{number}"] = mask
    cases = [
        vars(case) | {"key": key_of(case, chosen), "set": chosen}
        for case, chosen in itertools.product((*EXACT, *CHOSEN, *DRAWN, *MEASURED), SETS)
    ]
    return run_mergekit(tmp_path_factory.mktemp("mergekit"), cases, tensors)


def ours(case: Case, chosen: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The same by us, a few rows at a time."""
    base, *models = (tensor.to(dtype) for tensor in inputs_of(chosen))
    given = models[: case.models]
    return merge(case.method, base if case.base else None, given, case.parameters, rows=13)


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    assert found.dtype == wanted.dtype or found.dtype == torch.float64
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("chosen", SETS)
@pytest.mark.parametrize("case", EXACT, ids=str)
def test_arithmetic_gives_the_same_bits(case: Case, chosen: str, theirs):
    wanted = theirs[key_of(case, chosen)]
    found = ours(case, chosen)
    assert found.dtype == wanted.dtype
    assert torch.equal(bits_of(found), bits_of(wanted))  # the sign of a zero as well


@pytest.mark.parametrize("chosen", SETS)
@pytest.mark.parametrize("case", CHOSEN, ids=str)
def test_a_choice_by_magnitude_differs_only_among_equals(case: Case, chosen: str, theirs):
    wanted = theirs[key_of(case, chosen)]
    found = ours(case, chosen)
    if case.method != "sce" and "float32" in chosen:  # no two are equal
        assert torch.equal(found, wanted)
    limit = LIMIT[wanted.dtype] if case.method == "sce" else 0.0
    differ = (found - wanted).abs() > limit * (1 + wanted.abs())
    assert not (differ & ~shared(case, chosen)).any()
    assert differ.double().mean() < 0.05


def shared(case: Case, chosen: str) -> torch.Tensor:
    """Where what is chosen by is as large in one place as in another."""
    base, *models = inputs_of(chosen)
    deltas = [model - base for model in models[: case.models]]
    if case.method == "sce":
        deltas = [torch.stack(deltas).var(0, unbiased=False)]
    found = torch.zeros_like(base, dtype=torch.bool)
    for delta in deltas:
        values, counts = delta.abs().unique(return_counts=True)
        found |= torch.isin(delta.abs(), values[counts > 1])
    return found


@pytest.mark.parametrize("chosen", SETS)
@pytest.mark.parametrize("case", DRAWN, ids=str)
def test_given_what_is_kept_random_methods_give_the_same_numbers(case: Case, chosen: str, theirs):
    wanted = theirs[key_of(case, chosen)]
    found = ours(case, chosen)
    if "bfloat16" in chosen or not case.parameters.get("rescale", True):
        assert torch.equal(bits_of(found), bits_of(wanted))
    assert apart(found, wanted) < min(LIMIT[wanted.dtype], 1e-6 if "float32" in chosen else 1e-5)


@pytest.mark.parametrize("chosen", SETS)
@pytest.mark.parametrize("case", MEASURED, ids=str)
def test_what_depends_on_norms_agrees_to_rounding(case: Case, chosen: str, theirs):
    """Or, where mergekit's own norms are further off than that, is nearer to the exact result."""
    wanted = theirs[key_of(case, chosen)]
    found = ours(case, chosen)
    assert found.shape == wanted.shape
    if "bfloat16" in chosen and case.method not in ("slerp", "karcher", "model_stock"):
        assert torch.equal(bits_of(found), bits_of(wanted))
    if apart(found, wanted) >= LIMIT[wanted.dtype]:
        exact = ours(case, chosen, torch.float64)
        assert apart(found, wanted) < 10 * LIMIT[wanted.dtype]
        assert apart(exact, found) < 0.2 * apart(exact, wanted)


@pytest.mark.parametrize("chosen", [chosen for chosen in SETS if "float32" not in chosen])
def test_the_karcher_mean_of_short_numbers_is_nearer_to_the_exact_one(chosen: str, theirs):
    case = Case("karcher", {}, base=False)
    exact = ours(case, chosen, torch.float64)
    assert apart(exact, ours(case, chosen)) < 0.7 * apart(exact, theirs[key_of(case, chosen)])


@pytest.mark.parametrize("chosen", [chosen for chosen in SETS if "float32" not in chosen])
@pytest.mark.parametrize("models", [3, 4])
def test_model_stock_of_short_numbers_is_rounded_once_and_nearer_to_the_exact_one(
    models: int, chosen: str, theirs
):
    case = Case("model_stock", {}, models)
    exact = ours(case, chosen, torch.float64)
    rounding = apart(exact, exact.to(DTYPES[chosen.split("-")[1]]))
    assert apart(exact, ours(case, chosen)) < 1.01 * rounding
    assert apart(exact, theirs[key_of(case, chosen)]) > rounding


FREE = [Case("dare_linear", {"weight": [1.0], "density": [0.3], "rescale": False}, 1)] + [
    Case("della_linear", {"weight": [1.0], "density": [0.4], "epsilon": e, "rescale": False}, 1)
    for e in (0.05, 0.3)
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", FREE, ids=str)
def test_random_methods_keep_as_much_and_where_as_mergekit(case: Case, dtype: str, tmp_path: Path):
    """Shares of ten classes of rank, of 600 000 elements without zeros: within 5 deviations."""
    model = torch.randn(600, 1000, generator=torch.Generator().manual_seed(99)).to(DTYPES[dtype])
    model[model == 0] = 1
    asked = vars(case) | {"key": "k", "set": "s"}
    given = {"s/base": torch.zeros_like(model), "s/0": model}
    wanted = run_mergekit(tmp_path, [asked], given)["k"] != 0
    found = merge(case.method, torch.zeros_like(model), [model], case.parameters) != 0
    ranks = model.abs().float().argsort(1).argsort(1)
    shares = [
        torch.zeros(600, 1000).scatter_(1, ranks, kept.float()).view(600, 10, -1).mean((0, 2))
        for kept in (found, wanted)
    ]
    # bfloat16 rounds mergekit's ranks and probabilities to three digits
    slack = 0.003 if dtype == "bfloat16" else 0.0
    deviation = (2 * 0.25 / 60_000) ** 0.5
    assert (shares[0] - shares[1]).abs().max() < 5 * deviation + slack
    assert abs(shares[0].mean() - shares[1].mean()) < 5 * deviation / 10**0.5 + slack
