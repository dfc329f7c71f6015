"""The element of a given rank, found without sorting, is the one that sorting finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas_cli.merge_methods.order_statistics import Cut, bits_of, find_cuts, magnitudes, nonzero
from atlas_cli.merge_methods.sparsify import Band, band_mask, middle_ranks, top_ranks

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def passes_over(values: torch.Tensor, step: int):
    def passes() -> Iterator[tuple[int, Callable[[int], torch.Tensor]]]:
        for start in range(0, len(values), step):
            part = values[start : start + step]
            yield start, lambda _, part=part: part

    return passes


def before(values: torch.Tensor, found: Cut) -> torch.Tensor:
    sizes = magnitudes(values)
    equal = (sizes == found.value) & (torch.arange(len(values)) < found.position)
    return (sizes < found.value) | equal


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("levels", [3, 100, 10**6])
def test_a_cut_has_its_rank_before_it(dtype: torch.dtype, levels: int):
    generator = torch.Generator().manual_seed(0)
    whole = torch.randint(-levels, levels + 1, (5000,), generator=generator)
    values = (whole.double() / 1000).to(dtype)
    order = values.double().abs().sort(stable=True).indices
    ranks = [0, 1, 17, 2500, 4998, 4999]
    (found,) = find_cuts(passes_over(values, 777), [ranks])
    for rank, one in zip(ranks, found, strict=True):
        chosen = before(values, one)
        first = order[:rank]
        unequal = first[values[first] != 0]  # the order of zeros does not matter
        assert chosen[unequal].all()
        assert not chosen[order[rank:]][values[order[rank:]] != 0].any()


@settings(max_examples=60)
@given(
    st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=1, max_size=60),
    st.integers(1, 20),
    st.data(),
)
def test_any_numbers_are_cut_as_a_stable_sort_cuts_them(numbers, step: int, data):
    values = torch.tensor(numbers, dtype=torch.float32)
    rank = data.draw(st.integers(0, len(numbers) - 1))
    ((found,),) = find_cuts(passes_over(values, step), [[rank]])
    order = values.abs().sort(stable=True).indices
    wanted = torch.zeros(len(numbers), dtype=torch.bool)
    wanted[order[:rank]] = True
    same = before(values, found) == wanted
    assert same[values != 0].all()


def test_several_series_are_searched_in_the_same_passes():
    one, two = torch.tensor([3.0, 1.0, 2.0]), torch.tensor([0.5, 0.7, 0.6])
    counted = []

    def passes():
        counted.append(1)
        yield 0, lambda series: (one, two)[series]

    found = find_cuts(passes, [[1], [2]])
    assert [before(v, cuts[0]).tolist() for v, cuts in zip((one, two), found, strict=True)] == [
        [False, True, False],
        [True, False, True],
    ]
    assert len(counted) == 2  # 32 bits, 16 at a time


def test_numbers_of_two_bytes_without_equals_take_one_pass():
    values = torch.arange(1.0, 100.0).bfloat16()
    counted = []

    def passes():
        counted.append(1)
        yield 0, lambda _: values

    find_cuts(passes, [[50]])
    assert len(counted) == 1


def test_a_band_is_masked_the_same_however_it_is_cut():
    values = torch.randint(-3, 4, (200,), generator=torch.Generator().manual_seed(1)).float()
    ((low, high),) = find_cuts(passes_over(values, 50), [[60, 150]])
    band = Band(low, high)
    whole = band_mask(values, 0, band)
    parts = [band_mask(values[i : i + 7], i, band) for i in range(0, 200, 7)]
    assert torch.equal(torch.cat(parts), whole)
    assert int((whole != 0).sum()) == 90


def test_ranks_are_counted_as_mergekit_counts_them():
    assert top_ranks(10, 0.25) == (8, 10)
    assert top_ranks(10, 0.01) == (9, 10)
    assert middle_ranks(10, 0.5, 0.2) == (3, 8)
    assert middle_ranks(10, 0.9, 0.5) == (0, 9)  # outliers are removed only if there is room


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_tell_zero_from_all_else(dtype: torch.dtype):
    values = torch.tensor([0.0, -0.0, 1e-7, -3.0], dtype=dtype)
    assert nonzero(values).tolist() == [0, 0, -1, -1]
    assert bits_of(values).element_size() == values.element_size()
