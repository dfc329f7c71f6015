"""How a block is kept: what each form loses, and that none loses more than it says."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas_cli.core.storage import (
    BlockPart,
    Dense,
    Factors,
    Form,
    Quantised,
    bytes_of,
    decode,
    encode,
    factorise,
    norm,
    quantise,
    relative_error,
    scaled,
    storage_of,
)


def random_matrix(rows: int, columns: int, rank: int | None = None, seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    if rank is None:
        return torch.randn(rows, columns, generator=random)
    left = torch.randn(rows, rank, generator=random)
    return left @ torch.randn(rank, columns, generator=random)


def thirds(seed: int = 0) -> Factors:
    """Low-rank parts in the first and the last third of the rows."""
    up, down = random_matrix(4, 2, seed=seed), random_matrix(2, 5, seed=seed + 1)
    return Factors((12, 5), (BlockPart(0, up, down), BlockPart(8, 2 * up, down)))


# 8-bit integers -------------------------------------------------------------------------------


def test_a_row_of_whole_steps_comes_back_exactly():
    values = torch.tensor([[127.0, -3.0, 0.0], [0.5 * 127, 0.5, -1.0]])
    block = quantise(values)
    assert block.values.tolist() == [[127, -3, 0], [127, 1, -2]]
    assert block.scales.tolist() == [1.0, 0.5]
    assert torch.equal(decode(block), values)


def test_every_row_has_its_own_scale_and_an_error_of_half_a_step():
    values = random_matrix(6, 50) * torch.logspace(-6, 2, 6)[:, None]
    block = quantise(values)
    assert block.scales.shape == (6,)
    half = 0.5 * block.scales[:, None] * (1 + 1e-5)
    assert ((decode(block) - values).abs() <= half).all()


def test_quantising_is_symmetric():
    values = random_matrix(5, 9)
    assert torch.equal(quantise(-values).values, -quantise(values).values)
    assert quantise(values).values.min() >= -127


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (2, 3, 4, 5), (1, 1)])
def test_any_shape_can_be_quantised(shape: tuple[int, ...]):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    block = quantise(values)
    assert decode(block).shape == shape
    assert len(block.scales) == (shape[0] if len(shape) > 1 else 1)
    assert relative_error(values, block) < 0.02


def test_a_row_of_zeros_stays_one():
    values = torch.tensor([[0.0, 0.0], [1.0, 2.0]])
    assert decode(quantise(values))[0].tolist() == [0, 0]


# Low rank -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "columns"), [(40, 24), (24, 40), (30, 30)])
def test_a_rank_keeps_the_best_approximation(rows: int, columns: int):
    values = random_matrix(rows, columns)
    block = factorise(values, rank=5)
    assert isinstance(block, Factors)
    (part,) = block.parts
    assert part.up.shape == (rows, 5)
    assert part.down.shape == (5, columns)
    singular = torch.linalg.svdvals(values.double())
    best = (singular[5:] ** 2).sum().sqrt() / singular.norm()
    assert relative_error(values, block) == pytest.approx(best.item(), rel=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_a_matrix_of_low_rank_comes_back_whole(seed: int):
    values = random_matrix(60, 80, rank=3, seed=seed)
    for rank in (3, 4, 10):  # more terms than there are do no harm
        block = factorise(values, rank=rank)
        assert relative_error(values, block) < 1e-6
        assert all(torch.isfinite(part.up).all() for part in block.parts)


@pytest.mark.parametrize("energy", [0.3, 0.9, 0.99])
def test_energy_takes_the_fewest_terms_that_hold_it(energy: float):
    values = random_matrix(64, 48) @ torch.diag(torch.logspace(0, -3, 48))
    block = factorise(values, energy=energy)
    rank = block.parts[0].up.shape[1]
    share = torch.linalg.svdvals(values.double()) ** 2
    share = share.cumsum(0) / share.sum()
    assert share[rank - 1] >= energy > (share[rank - 2] if rank > 1 else 0)
    assert relative_error(values, block) <= math.sqrt(1 - energy) + 1e-6


def test_what_would_not_become_smaller_stays_dense():
    assert isinstance(factorise(random_matrix(8, 8), rank=4), Dense)
    assert isinstance(factorise(torch.ones(5), rank=1), Dense)
    assert isinstance(factorise(torch.ones(5, 1), rank=1), Dense)
    assert isinstance(factorise(random_matrix(8, 8), rank=3), Factors)


def test_a_convolution_is_a_matrix_of_its_rows():
    values = random_matrix(16, 3 * 4 * 4, rank=2).reshape(16, 3, 4, 4)
    block = factorise(values, rank=2)
    assert isinstance(block, Factors)
    assert decode(block).shape == values.shape
    assert relative_error(values, block) < 1e-6


def test_factors_share_the_size_of_the_product():
    block = factorise(1e6 * random_matrix(20, 30), rank=2)
    (part,) = block.parts
    assert 0.2 < part.up.norm() / part.down.norm() < 5


def test_parts_fill_their_own_rows_and_nothing_else():
    block = thirds()
    whole = decode(block)
    assert torch.equal(whole[4:8], torch.zeros(4, 5))
    torch.testing.assert_close(whole[8:], 2 * whole[:4])


def test_a_zero_matrix_has_no_directions_and_no_trouble():
    assert torch.equal(decode(factorise(torch.zeros(20, 20), rank=2)), torch.zeros(20, 20))


# Forms ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "word", "bound"),
    [
        (Form(), "fp32", 0.0),
        (Form("fp16"), "fp16", 2**-11),
        (Form("bf16"), "bf16", 2**-8),
        (Form("int8"), "int8", 0.02),
        (Form(rank=4), "factors", 1.0),
        (Form("fp16", energy=0.5), "factors", 0.71),
    ],
)
def test_a_form_decides_how_a_block_is_kept(form: Form, word: str, bound: float):
    values = random_matrix(40, 60)
    block = encode(Dense(values), form)
    assert storage_of(block) == word
    assert relative_error(values, block) <= bound
    assert form.is_low_rank == (word == "factors")
    if form.is_low_rank:
        wanted = torch.float16 if form.dtype == "fp16" else torch.float32
        assert {part.up.dtype for part in block.parts} == {wanted}


def test_fp32_is_kept_without_a_copy():
    values = random_matrix(3, 3)
    assert encode(Dense(values), Form()).values is values


def test_what_is_no_matrix_is_kept_dense_in_the_dtype():
    assert encode(Dense(torch.ones(9)), Form("bf16", rank=2)).values.dtype == torch.bfloat16


def test_factors_stay_factors_in_the_dtype_of_the_form():
    block = encode(thirds(), Form("fp16"))
    assert isinstance(block, Factors)
    assert [part.start for part in block.parts] == [0, 8]
    assert {part.down.dtype for part in block.parts} == {torch.float16}
    assert relative_error(decode(thirds()), block) < 1e-3


@pytest.mark.parametrize("scale", [1.0, -1.0, 0.3])
def test_scaling_a_block_scales_its_values(scale: float):
    values = random_matrix(12, 5)
    for block in (Dense(values), quantise(values), thirds()):
        torch.testing.assert_close(decode(scaled(block, scale)), scale * decode(block))
    assert isinstance(scaled(thirds(), scale), Factors)


def test_bytes_are_those_of_the_tensors():
    values = random_matrix(10, 20)
    assert bytes_of(Dense(values)) == 800
    assert bytes_of(quantise(values)) == 200 + 40
    assert bytes_of(encode(Dense(values), Form("fp16", rank=2))) == 2 * (10 + 20) * 2


# Norms and errors -----------------------------------------------------------------------------


@settings(max_examples=50)
@given(st.integers(0, 5000), st.floats(1e-30, 1e30))
def test_a_norm_is_that_of_float64(length: int, size: float):
    values = size * torch.randn(length, generator=torch.Generator().manual_seed(length))
    wanted = torch.linalg.vector_norm(values.double()).item()
    assert norm(values) == pytest.approx(wanted, rel=1e-6)


def test_only_zeros_have_norm_zero():
    assert norm(torch.zeros(2000)) == 0
    assert norm(torch.full((2000,), 1e-44)) > 0
    assert not math.isfinite(norm(torch.tensor([1.0, math.nan])))
    assert not math.isfinite(norm(torch.tensor([1.0, math.inf])))
    assert norm(torch.full((4,), 1e38)) == pytest.approx(2e38)


def test_an_error_is_relative_to_the_block():
    exact = torch.tensor([3.0, 4.0])
    assert relative_error(exact, Dense(torch.tensor([3.0, 3.0]))) == pytest.approx(0.2)
    assert relative_error(torch.zeros(2), Dense(torch.zeros(2))) == 0.0
    assert isinstance(quantise(exact), Quantised)
