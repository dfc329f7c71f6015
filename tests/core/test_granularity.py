"""Granularities by their names: which layout a recipe asks for."""

from __future__ import annotations

import pytest

from atlas_cli.core.granularity import Layout, by_block, by_group, by_partition, choose_layout
from atlas_cli.errors import MismatchError, UsageError
from atlas_cli.registry import (
    Granularity,
    find_granularity,
    granularity_labels,
    granularity_pattern,
)

SHAPES = {"a.weight": (4, 2), "a.bias": (4,), "b.weight": (3,)}


def test_a_granularity_is_chosen_by_its_name():
    assert choose_layout(SHAPES, "block") == by_block(SHAPES)
    assert choose_layout(SHAPES, "vector").labels == ("all",)
    assert choose_layout(SHAPES, "partition:3", seed=5) == by_partition(SHAPES, 3, 5)
    groups = choose_layout(SHAPES, "block", groups=[r"^(\w+)\."])
    assert len(groups.labels) == 2


def test_a_name_must_have_the_parameter_that_it_needs_and_no_other():
    for text in ("layer", "partition", "partition:", "partition:0", "partition:100000", "block:2"):
        assert find_granularity(text) is None
        with pytest.raises(UsageError, match="expected block, vector, qkv or partition:K, found"):
            choose_layout(SHAPES, text)


def test_names_are_shown_and_matched_in_one_order():
    assert granularity_labels() == "block, vector, qkv or partition:K"
    assert granularity_pattern() == "^(block|vector|qkv|partition:[1-9][0-9]{0,4})$"


def test_a_layout_without_a_place_for_every_block_is_refused(monkeypatch: pytest.MonkeyPatch):
    def first_only(shapes) -> Layout:
        return by_group({"a.weight": shapes["a.weight"]}, {"a.weight": "first"})

    found = Granularity("first", first_only, "", "")
    monkeypatch.setattr("atlas_cli.core.granularity.find_granularity", lambda name: found)
    with pytest.raises(MismatchError, match=r"granularity first: no coefficient for a\.bias"):
        choose_layout(SHAPES, "first")
