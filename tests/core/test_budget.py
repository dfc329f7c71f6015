"""Which blocks are kept within a budget: matching pursuit written out, and laws of the others."""

from __future__ import annotations

import pytest
import torch

from atlas_cli.core.budget import KEPT, STORED, Budget, Slopes, by_chance, by_gradient, by_greed
from atlas_cli.core.packed import FEW, pack, packed_bytes, unpacked

NAMES = ("a", "b", "c")
SHAPES = {"a": (16, 16), "b": (32, 16), "c": (24,)}


def pool(gradients: dict[str, torch.Tensor], vectors: list[dict[str, torch.Tensor]]) -> Slopes:
    def table(of) -> torch.Tensor:
        rows = [
            [of(name, vector[name]) if name in vector else 0.0 for name in NAMES]
            for vector in vectors
        ]
        return torch.tensor(rows, dtype=torch.float64)

    return Slopes(
        NAMES,
        SHAPES,
        table(lambda name, tau: (gradients[name] * tau).sum().item()),
        table(lambda name, tau: tau.square().sum().item()),
        table(lambda name, tau: 4 * tau.numel()),
        [{name: tau.flatten() for name, tau in vector.items()} for vector in vectors],
    )


def drawn(seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {name: torch.randn(SHAPES[name], generator=random).double() for name in NAMES}


def test_greed_is_matching_pursuit_on_the_gradient():
    gradients, vectors = drawn(0), [drawn(seed) for seed in (1, 2, 3, 4)]
    del vectors[3]["c"]
    picks = by_greed(pool(gradients, vectors), Budget(vectors=3))
    left = {name: tensor.clone() for name, tensor in gradients.items()}
    wanted = []
    for _ in range(9):
        offers = [
            (
                (left[name] * tau).sum().item() ** 2 / tau.square().sum().item() / tau.numel(),
                number,
                name,
            )
            for number, vector in enumerate(vectors)
            for name, tau in vector.items()
            if (number, name) not in wanted and sum(n == name for _, n in wanted) < 3
        ]
        _, number, name = max(offers)
        tau = vectors[number][name]
        left[name] -= (left[name] * tau).sum() / tau.square().sum() * tau
        wanted.append((number, name))
    assert [(pick.vector, NAMES[pick.block]) for pick in picks] == wanted
    assert {pick.storage for pick in picks} == {STORED}


def test_a_vector_is_not_kept_twice_under_another_name():
    gradients, (first, other) = drawn(0), (drawn(1), drawn(2))
    twins = [first, {name: -2 * tau for name, tau in first.items()}, other]
    picks = by_greed(pool(gradients, twins), Budget(vectors=2))
    kept = {name: {p.vector for p in picks if NAMES[p.block] == name} for name in NAMES}
    assert all(2 in vectors for vectors in kept.values())


def test_a_budget_is_kept_and_more_of_it_gives_more_bits():
    found = pool(drawn(0), [drawn(seed) for seed in (1, 2, 3)])
    everything = int(found.bytes.sum().item())
    before = 0.0
    for share in (1 / 16, 1 / 4, 1 / 2, 1):
        picks = by_greed(found, Budget(bytes=int(share * everything)))
        assert sum(pick.bytes for pick in picks) <= share * everything
        gain = sum(pick.gain for pick in picks)
        assert gain > before
        before = gain
        for pick in picks:
            size = SHAPES[NAMES[pick.block]]
            if pick.storage != STORED:
                assert pick.bytes == packed_bytes(size, FEW[pick.storage])
            assert pick.storage == STORED or NAMES[pick.block] != "c"  # few bits are for matrices
    assert {pick.storage for pick in picks} == {STORED}
    assert len(picks) == 9


def test_few_bits_leave_the_share_that_is_counted_with():
    values = torch.randn(512, 512, generator=torch.Generator().manual_seed(0))
    for word, share in KEPT.items():
        lost = (values - unpacked(pack(values, FEW[word]))).square().sum() / values.square().sum()
        assert 1 - lost.item() == pytest.approx(share, abs=0.01)


def test_gradient_takes_the_steepest_and_chance_whole_vectors():
    found = pool(drawn(0), [drawn(seed) for seed in (1, 2, 3)])
    steepest = by_gradient(found, Budget(vectors=1))
    for pick in steepest:
        column = found.slopes[:, pick.block].abs()
        assert column[pick.vector] == column.max()
    assert len(steepest) == 3
    whole = by_chance(found, Budget(vectors=1, seed=1))
    assert len({pick.vector for pick in whole}) == 1
    assert [pick.block for pick in whole] == [0, 1, 2]
    for choose in (by_gradient, by_chance):
        assert sum(pick.bytes for pick in choose(found, Budget(bytes=3000))) <= 3000
