"""Singular values, angles and spectra against numpy, and by laws one can check by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from makers import FORMS, lora

from atlas_cli.core import spectra, storage
from atlas_cli.core.storage import Block, BlockPart, Dense, Factors, decode


def matrix(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def by_numpy(block: Block) -> np.ndarray:
    values = decode(block).double().numpy()
    return np.linalg.svd(values.reshape(len(values), -1), compute_uv=False)


def stacked(blocks: list[Block]) -> np.ndarray:
    return np.stack([decode(block).double().flatten().numpy() for block in blocks])


# One block ------------------------------------------------------------------------------------


def test_the_effective_rank_of_a_rank_one_matrix_is_one():
    block = Dense(matrix(0, 30, 1) @ matrix(1, 1, 20))
    assert spectra.effective_rank(spectra.singular_values(block)) == pytest.approx(1, abs=1e-4)
    exact = Factors((30, 20), (BlockPart(0, matrix(0, 30, 1), matrix(1, 1, 20)),))
    assert spectra.effective_rank(spectra.singular_values(exact)) == 1


@pytest.mark.parametrize("size", [2, 7, 64])
def test_the_effective_rank_of_an_orthogonal_matrix_is_its_size(size: int):
    orthogonal = torch.linalg.qr(matrix(0, size, size).double()).Q
    singular = spectra.singular_values(Dense(orthogonal.float()))
    assert spectra.effective_rank(singular) == pytest.approx(size, rel=1e-6)


def test_the_effective_rank_of_two_values_by_hand():
    shares = (0.75, 0.25)  # of the singular values 3 and 1
    wanted = math.exp(-sum(share * math.log(share) for share in shares))
    singular = spectra.singular_values(Dense(torch.diag(torch.tensor([1.0, 3.0]))))
    assert spectra.effective_rank(singular) == pytest.approx(wanted, rel=1e-12)
    assert spectra.energy(singular, 1) == pytest.approx(0.9, rel=1e-12)


def test_a_zero_block_has_neither_rank_nor_energy():
    singular = spectra.singular_values(Dense(torch.zeros(4, 3)))
    assert spectra.effective_rank(singular) == spectra.energy(singular, 1) == 0
    assert storage.block_norm(Dense(torch.zeros(3))) == 0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(40, 12), (12, 40), (16, 3, 4, 4)])
def test_rank_and_energy_are_those_of_a_direct_decomposition(form: str, shape: tuple[int, ...]):
    block = FORMS[form](matrix(3, *shape))
    singular, wanted = spectra.singular_values(block), by_numpy(block)
    for count in (1, 4, 16, 64):
        direct = (wanted[:count] ** 2).sum() / (wanted**2).sum()
        assert spectra.energy(singular, count) == pytest.approx(direct, abs=1e-6)
    shares = wanted / wanted.sum()
    shares = shares[shares > 1e-6]
    direct = np.exp(-(shares * np.log(shares)).sum())
    assert spectra.effective_rank(singular) == pytest.approx(direct, rel=1e-4)
    assert storage.block_norm(block) == pytest.approx(np.sqrt((wanted**2).sum()), rel=1e-6)


def test_a_long_block_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch):
    block = Dense(matrix(0, 100, 7))
    whole = spectra.singular_values(block), storage.gram([block, block])
    monkeypatch.setattr(storage, "CHUNK", 11)
    monkeypatch.setattr(spectra, "CHUNK", 11)
    assert torch.allclose(spectra.singular_values(block), whole[0], rtol=1e-12)
    assert torch.allclose(storage.gram([block, block]), whole[1], rtol=1e-12)


@st.composite
def factors(draw: st.DrawFn) -> Factors:
    """Parts of any rank in any rows: apart, touching, overlapping, or of too high a rank."""
    rows, columns = draw(st.integers(1, 12)), draw(st.integers(1, 9))
    parts = []
    for seed in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, rows - 1))
        height, rank = draw(st.integers(1, rows - start)), draw(st.integers(1, 6))
        parts.append(BlockPart(start, matrix(seed, height, rank), matrix(seed + 9, rank, columns)))
    return Factors((rows, columns), tuple(parts))


@settings(max_examples=150)
@given(factors(), factors())
def test_factors_measure_as_their_product_does(left: Factors, right: Factors):
    singular, wanted = spectra.singular_values(left), by_numpy(left)
    count = min(len(singular), len(wanted))
    assert np.allclose(singular.numpy()[:count], wanted[:count], atol=1e-5 * wanted[0])
    assert np.allclose(wanted[count:], 0, atol=1e-5 * wanted[0])
    dense_norm = storage.block_norm(Dense(decode(left)))
    assert storage.block_norm(left) == pytest.approx(dense_norm, rel=1e-5)
    if left.shape == right.shape:
        dense = storage.gram([Dense(decode(left)), Dense(decode(right))])
        assert torch.allclose(storage.gram([left, right]), dense, atol=1e-5 * dense.max().item())


def test_which_shapes_are_matrices():
    shapes = [(), (5,), (5, 1), (1, 5), (5, 2), (5, 1, 1, 2), (1, 5, 5)]
    assert [storage.is_matrix(shape) for shape in shapes] == [False] * 4 + [True, True, False]


# Several vectors ------------------------------------------------------------------------------


def test_a_vector_is_parallel_to_itself_and_against_its_negation():
    values = matrix(0, 6, 5)
    found = spectra.cosines(storage.gram([Dense(values), Dense(3 * values), Dense(-values)]))
    assert torch.allclose(found, torch.tensor([[1, 1, -1], [1, 1, -1], [-1, -1, 1]]).double())
    assert found.abs().max() <= 1


def test_orthogonal_vectors_have_cosine_zero():
    blocks = [Dense(row) for row in torch.eye(3)]
    assert torch.equal(spectra.cosines(storage.gram(blocks)), torch.eye(3).double())


def test_a_dropped_block_counts_as_zero():
    found = storage.gram([Dense(torch.tensor([3.0, 4.0])), None, Dense(torch.tensor([1.0, 0.0]))])
    assert found.tolist() == [[25, 0, 3], [0, 0, 0], [3, 0, 1]]
    assert spectra.cosines(found)[1].isnan().all()
    assert storage.gram([None, None]).tolist() == [[0, 0], [0, 0]]


def test_every_form_of_storage_has_an_angle_with_every_other():
    values = matrix(5, 24, 8)
    blocks = [*(form(values) for form in FORMS.values()), lora(1)]
    rows = stacked(blocks)
    assert np.allclose(storage.gram(blocks).numpy(), rows @ rows.T, rtol=1e-6)


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("count", [2, 5, 40])
def test_the_spectrum_is_that_of_the_stacked_vectors(centred: bool, count: int):
    blocks: list[Block] = [Dense(matrix(seed, 6, 5) * (seed + 1)) for seed in range(count)]
    rows = stacked(blocks)
    rows = rows - rows.mean(axis=0) if centred else rows
    wanted = np.zeros(count)  # more vectors than dimensions: the rest are zero
    direct = np.linalg.svd(rows, compute_uv=False)
    wanted[: len(direct)] = direct
    found = spectra.spectrum(storage.gram(blocks), centred=centred)
    assert np.allclose(found.singular_values, wanted, atol=1e-6 * wanted[0])
    assert np.allclose(found.share, wanted**2 / (wanted**2).sum(), atol=1e-9)
    ratio = (wanted**2).sum() ** 2 / (wanted**4).sum()
    assert found.participation_ratio == pytest.approx(ratio, rel=1e-9)


def test_the_participation_ratio_counts_directions():
    assert spectra.spectrum(torch.eye(4).double(), centred=False).participation_ratio == 4
    parallel = torch.ones(3, 3).double()
    assert spectra.spectrum(parallel, centred=False).participation_ratio == pytest.approx(1)
    nothing = spectra.spectrum(parallel, centred=True)
    assert (nothing.participation_ratio, nothing.share) == (0, (0, 0, 0))
