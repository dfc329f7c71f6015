"""The table of coefficients: no float32 number is lost, and a few numbers sum it up."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atlas_cli.recipes.text import summarise, table_problems, to_table

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def test_rows_are_vectors_and_columns_are_blocks():
    table = to_table(["cars", "dogs"], ["a", "b"], [[1.0, 2.0], [3.0, -0.5]])
    assert table == {"cars": {"a": 1.0, "b": 2.0}, "dogs": {"a": 3.0, "b": -0.5}}


@pytest.mark.parametrize(("vectors", "labels"), [(["cars"], ["a", "b"]), (["cars", "dogs"], ["a"])])
def test_names_that_do_not_fit_the_table_are_our_mistake(vectors: list[str], labels: list[str]):
    with pytest.raises(ValueError, match="zip"):
        to_table(vectors, labels, [[1.0, 2.0], [3.0, 4.0]])


@given(FLOATS)
def test_every_float32_number_comes_back_from_its_text(value: float):
    written = to_table(["v"], ["b"], torch.tensor([[value]]).tolist())
    read = json.loads(json.dumps(written))["v"]["b"]
    assert torch.tensor(read, dtype=torch.float32).item() == value


@given(FLOATS)
def test_numbers_are_written_in_nine_digits_at_most(value: float):
    written = repr(to_table(["v"], ["b"], [[value]])["v"]["b"])
    mantissa = written.partition("e")[0].strip("-").replace(".", "")
    assert len(mantissa.strip("0")) <= 9


def test_a_learned_tenth_is_written_as_a_tenth():
    learned = torch.tensor([[0.1]]).tolist()  # 0.10000000149011612 in float64
    assert to_table(["v"], ["b"], learned)["v"]["b"] == 0.100000001
    assert to_table(["v"], ["b"], [[0.5]])["v"]["b"] == 0.5


def test_numbers_that_are_not_finite_are_named_with_their_place():
    table = {"cars": {"a": math.nan, "b": 1.0}, "dogs": {"a": -math.inf}}
    assert table_problems(table, "recipe.coefficients") == [
        "recipe.coefficients.cars.a: nan is not a finite number",
        "recipe.coefficients.dogs.a: -inf is not a finite number",
    ]
    assert table_problems({"cars": {"a": 0.0}}, "x") == []


def test_a_vector_is_summed_up_by_its_mean_size_range_and_largest_block():
    (summary,) = summarise({"cars": {"a": 0.5, "b": -2.0, "c": 0.0}})
    assert (summary.vector, summary.blocks) == ("cars", 3)
    assert summary.mean == pytest.approx(-0.5)
    assert summary.mean_size == pytest.approx(2.5 / 3)
    assert (summary.lowest, summary.highest, summary.largest) == (-2.0, 0.5, "b")


def test_vectors_keep_their_order_and_one_without_coefficients_has_no_summary():
    found = summarise({"dogs": {"a": 1.0}, "none": {}, "cars": {"a": 2.0}})
    assert [summary.vector for summary in found] == ["dogs", "cars"]
