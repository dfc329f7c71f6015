"""Accuracy and its uncertainty, against scipy and by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from atlas_cli.learning.evaluate import mcnemar, mean_class_accuracy, top_k, wilson


def test_equal_logits_go_to_the_lower_class():
    assert top_k(torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]]), 2).tolist() == [[1, 2], [0, 1]]


def test_mean_class_accuracy_weighs_classes_equally():
    assert mean_class_accuracy([True, True, True, False], [0, 0, 0, 1]) == 0.5
    assert mean_class_accuracy([True, False], [7, 7]) == 0.5


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_wilson_interval_is_scipys(counts: tuple[int, int]):
    expected = stats.binomtest(*counts).proportion_ci(0.95, method="wilson")
    assert wilson(*counts) == pytest.approx((expected.low, expected.high), abs=1e-12)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=300))
def test_mcnemars_test_is_scipys_binomial_test(pairs: list[tuple[bool, bool]]):
    ours, theirs = zip(*pairs, strict=True)
    only = sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs)
    expected = stats.binomtest(only[0], sum(only)).pvalue if sum(only) else 1.0
    assert mcnemar(ours, theirs) == pytest.approx(expected, rel=1e-9)


def test_mcnemars_test_holds_for_many_images():
    ours = [True] * 30_000 + [False] * 29_000
    assert 0 < mcnemar(ours, [not right for right in ours]) < 1e-3
