"""Every method that mergekit has gives mergekit's numbers, on random tensors.

What mergekit gave is kept in tests/fixtures; test_oracles.py holds that against mergekit itself.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from mergekit_cases import (
    CHOSEN,
    DRAWN,
    DTYPES,
    EXACT,
    MEASURED,
    SETS,
    Case,
    Tensors,
    fixture,
    key_of,
)
from tiles import merge

from atlas_cli.merge_methods.order_statistics import bits_of

# Rounding of one number of each size; whole tensors agree much better in float32.
LIMIT = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SHORT = [chosen for chosen in SETS if "float32" not in chosen]


@pytest.fixture(scope="module")
def kept() -> Tensors:
    return fixture("mergekit_methods")


def ours(case: Case, chosen: str, kept: Tensors, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The same by us, a few rows at a time."""
    models = [kept[f"{chosen}/{number}"].to(dtype) for number in range(case.models)]
    base = kept[f"{chosen}/base"].to(dtype) if case.base else None
    return merge(case.method, base, models, case.parameters, rows=5)


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    assert found.dtype == wanted.dtype or found.dtype == torch.float64
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def test_arithmetic_gives_the_same_bits(kept: Tensors):
    for case, chosen in itertools.product(EXACT, SETS):
        key = key_of(case, chosen)
        found = ours(case, chosen, kept)
        assert found.dtype == kept[key].dtype, key
        assert torch.equal(bits_of(found), bits_of(kept[key])), key  # the sign of a zero as well


def test_a_choice_by_magnitude_differs_only_among_equals(kept: Tensors):
    for case, chosen in itertools.product(CHOSEN, SETS):
        key = key_of(case, chosen)
        wanted, found = kept[key], ours(case, chosen, kept)
        if case.method != "sce" and "float32" in chosen:  # no two are equal
            assert torch.equal(found, wanted), key
        limit = LIMIT[wanted.dtype] if case.method == "sce" else 0.0
        differ = (found - wanted).abs() > limit * (1 + wanted.abs())
        assert not (differ & ~shared(case, chosen, kept)).any(), key
        assert differ.double().mean() < 0.1, key


def shared(case: Case, chosen: str, kept: Tensors) -> torch.Tensor:
    """Where what is chosen by is as large in one place as in another."""
    base = kept[f"{chosen}/base"]
    deltas = [kept[f"{chosen}/{number}"] - base for number in range(case.models)]
    if case.method == "sce":
        deltas = [torch.stack(deltas).var(0, unbiased=False)]
    found = torch.zeros_like(base, dtype=torch.bool)
    for delta in deltas:
        values, counts = delta.abs().unique(return_counts=True)
        found |= torch.isin(delta.abs(), values[counts > 1])
    return found


def test_given_what_is_kept_random_methods_give_the_same_numbers(kept: Tensors):
    for case, chosen in itertools.product(DRAWN, SETS):
        key = key_of(case, chosen)
        wanted, found = kept[key], ours(case, chosen, kept)
        if "bfloat16" in chosen or not case.parameters.get("rescale", True):
            assert torch.equal(bits_of(found), bits_of(wanted)), key
        limit = min(LIMIT[wanted.dtype], 1e-6 if "float32" in chosen else 1e-4)
        assert apart(found, wanted) < limit, key


def test_what_depends_on_norms_agrees_to_rounding(kept: Tensors):
    """Or, where mergekit's own norms are further off than that, is nearer to the exact result."""
    for case, chosen in itertools.product(MEASURED, SETS):
        key = key_of(case, chosen)
        wanted, found = kept[key], ours(case, chosen, kept)
        assert found.shape == wanted.shape, key
        if "bfloat16" in chosen and case.method not in ("slerp", "karcher", "model_stock"):
            assert torch.equal(bits_of(found), bits_of(wanted)), key
        if apart(found, wanted) >= LIMIT[wanted.dtype]:
            exact = ours(case, chosen, kept, torch.float64)
            assert apart(found, wanted) < 10 * LIMIT[wanted.dtype], key
            assert apart(exact, found) < 0.2 * apart(exact, wanted), key


def test_the_karcher_mean_of_short_numbers_is_nearer_to_the_exact_one(kept: Tensors):
    case = Case("karcher", {}, base=False)
    for chosen in SHORT:
        exact = ours(case, chosen, kept, torch.float64)
        limit = 0.7 * apart(exact, kept[key_of(case, chosen)])
        assert apart(exact, ours(case, chosen, kept)) < limit, chosen


def test_model_stock_of_short_numbers_is_rounded_once_and_nearer_to_the_exact_one(kept: Tensors):
    for models, chosen in itertools.product((3, 4), SHORT):
        case = Case("model_stock", {}, models)
        exact = ours(case, chosen, kept, torch.float64)
        rounding = apart(exact, exact.to(DTYPES[chosen.split("-")[1]]))
        assert apart(exact, ours(case, chosen, kept)) < 1.01 * rounding, chosen
        assert apart(exact, kept[key_of(case, chosen)]) > rounding, chosen


def test_the_docs_promise_of_sce_what_holds(kept: Tensors):
    """Ties change the shares of whole models, so that elements without a tie move by a rounding."""
    case, chosen = Case("sce", {"select_topk": 0.3, "int8_mask": True}), "matrix-bfloat16"
    found, wanted = ours(case, chosen, kept), kept[key_of(case, chosen)]
    moved = (found != wanted) & ~shared(case, chosen, kept)
    assert ((found - wanted).abs()[moved] <= 8e-3 * wanted.abs()[moved]).all()
    bullets = (Path(__file__).parents[2] / "docs/merging.md").read_text("utf-8").split("\n- ")
    promised = [text for text in bullets if "All other elements are the same" in text]
    assert len(promised) == 1
    assert "sce" not in promised[0]
    assert any(text.startswith("`sce`") and "by a rounding" in text for text in bullets)
