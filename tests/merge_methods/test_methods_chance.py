"""Elements dropped by chance: how many, which, and that nothing but the seed decides."""

from __future__ import annotations

import math

import pytest
import torch
from tiles import cut, merge

from atlas_cli.errors import UsageError
from atlas_cli.merge_methods.method import Values
from atlas_cli.merge_methods.sparsify import (
    AT_RANDOM,
    BY_RANK,
    LEVELS,
    Dice,
    Sparsifier,
    delta_of,
    draw,
)
from atlas_cli.merge_methods.tiling import tile_of

DICE = Dice(3, "layer.weight", 1)
ROWS, COLUMNS = 400, 1000


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def kept(sparsifier: Sparsifier, model: torch.Tensor, seed: int = 0, **own: float) -> torch.Tensor:
    """Where the elements of a task vector without zeros are kept."""
    (tile,) = cut(torch.zeros_like(model), [model], len(model))
    values = Values((own,), {}, seed)
    delta = delta_of(tile, 0)
    sparsifier.keep_(delta, tile, sparsifier.statistics(lambda: iter([tile]), values)[0])
    return delta != 0


def test_draws_belong_to_positions():
    whole = draw(DICE, 0, 200_000)
    assert torch.equal(draw(DICE, 70_001, 100_000), whole[70_001:170_001])
    assert torch.equal(draw(DICE, 65_535, 2), whole[65_535:65_537])


@pytest.mark.parametrize(
    "other", [Dice(4, "layer.weight", 1), Dice(3, "x", 1), Dice(3, "layer.weight", 0)]
)
def test_draws_depend_on_seed_name_and_model(other: Dice):
    one, two = (draw(dice, 0, 50_000).double() for dice in (DICE, other))
    assert abs(torch.corrcoef(torch.stack([one, two]))[0, 1]) < 0.02


def test_draws_are_uniform_and_have_an_independent_sign():
    found = draw(DICE, 0, 1 << 20)
    sizes = (found & (LEVELS - 1)).double() / LEVELS
    assert abs(sizes.mean() - 0.5) < 0.002
    assert abs(sizes.var() - 1 / 12) < 0.001
    assert abs((found < 0).double().mean() - 0.5) < 0.002
    assert abs(torch.corrcoef(torch.stack([sizes, (found < 0).double()]))[0, 1]) < 0.005


@pytest.mark.parametrize("density", [0.5, 0.1, 0.95, 0.0003, 0.0])
def test_as_many_are_kept_as_the_density_says(density: float):
    found = kept(AT_RANDOM, torch.ones(ROWS, COLUMNS), density=density)
    size = ROWS * COLUMNS
    spread = math.sqrt(size * density * (1 - density))
    assert abs(int(found.sum()) - size * density) <= 4 * spread


def test_a_density_that_no_draw_can_express_is_right_on_average():
    """15 bits know multiples of 1/32768; the offset of each tensor makes up for the rest."""
    share = 0.4 / LEVELS
    counts = [
        kept(AT_RANDOM, torch.ones(64, 1024), seed, density=share).sum() for seed in range(300)
    ]
    assert sum(counts) / 300 == pytest.approx(share * 64 * 1024, abs=0.3)


def test_dropping_does_not_look_at_values():
    one, two = (kept(AT_RANDOM, random(50, 60, seed=s), density=0.4) for s in (1, 2))
    assert torch.equal(one, two)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_della_keeps_the_large_more_often_than_the_small(dtype: torch.dtype):
    model = random(ROWS, COLUMNS, dtype=dtype)
    found = kept(BY_RANK, model, density=0.5, epsilon=0.3).double()
    ranks = model.abs().float().argsort(1).argsort(1)
    ordered = torch.empty_like(found).scatter_(1, ranks, found)
    shares = ordered.view(ROWS, 10, -1).mean((0, 2))
    wanted = 0.2 + 0.6 * (torch.arange(10) + 0.5) / 10
    assert (shares - wanted).abs().max() < 0.012  # four deviations
    assert abs(found.mean() - 0.5) < 0.004


def test_della_has_the_exact_probability_at_both_ends_of_a_row():
    model = torch.arange(1.0, 6.0).expand(60_000, 5).contiguous()
    shares = kept(BY_RANK, model, density=0.5, epsilon=0.4).double().mean(0)
    assert shares.tolist() == pytest.approx([0.1, 0.3, 0.5, 0.7, 0.9], abs=0.01)


def test_della_treats_equal_elements_alike():
    model = torch.tensor([1.0, 2.0, 2.0, 2.0, 5.0]).expand(60_000, 5).contiguous()
    shares = kept(BY_RANK, model, density=0.5, epsilon=0.4).double().mean(0)
    assert shares.tolist() == pytest.approx([0.1, 0.5, 0.5, 0.5, 0.9], abs=0.01)


def test_della_ranks_kernels_along_their_second_dimension_and_vectors_as_one_row():
    model = torch.arange(1.0, 6.0)[None, :, None].expand(20_000, 5, 3).contiguous()
    shares = kept(BY_RANK, model, density=0.5, epsilon=0.4).double().mean((0, 2))
    assert shares.tolist() == pytest.approx([0.1, 0.3, 0.5, 0.7, 0.9], abs=0.01)
    vector = torch.arange(1.0, 100_001.0)
    shares = kept(BY_RANK, vector, density=0.5, epsilon=0.4).double().view(5, -1).mean(1)
    assert shares.tolist() == pytest.approx([0.18, 0.34, 0.5, 0.66, 0.82], abs=0.015)


def test_della_of_rows_with_one_element_keeps_them_with_the_density():
    found = kept(BY_RANK, torch.ones(50_000, 1), density=0.3, epsilon=0.1)
    assert found.double().mean().item() == pytest.approx(0.3, abs=0.01)


@pytest.mark.parametrize(("density", "epsilon"), [(0.1, 0.1), (0.9, 0.2), (0.05, 0.15)])
def test_della_refuses_a_probability_outside_zero_and_one(density: float, epsilon: float):
    model = random(4, 5)
    asked = {"weight": 1.0, "density": density, "epsilon": epsilon}
    with pytest.raises(UsageError, match="must stay between 0 and 1"):
        merge("della", torch.zeros(4, 5), [model], asked)


@pytest.mark.parametrize("name", ["dare_linear", "della_linear"])
def test_rescaling_keeps_the_sum_of_magnitudes(name: str):
    model = random(300, 200)
    asked = {"weight": 1.0, "density": 0.3}
    found = merge(name, torch.zeros_like(model), [model], asked)
    torch.testing.assert_close(found.abs().sum(), model.abs().sum())
    plain = merge(name, torch.zeros_like(model), [model], asked | {"rescale": False})
    assert torch.equal(plain[plain != 0], model[plain != 0])
    torch.testing.assert_close(found, plain * (model.abs().sum() / plain.abs().sum()))


def test_rescaling_by_density_is_that_of_the_paper():
    model = random(300, 200)
    asked = {"weight": 1.0, "density": 0.25, "rescale_by": "density"}
    found = merge("dare_linear", torch.zeros_like(model), [model], asked)
    torch.testing.assert_close(found[found != 0], 4 * model[found != 0])


def test_models_of_one_tensor_are_dropped_independently():
    model = torch.ones(100, 100)
    asked = {"weight": 1.0, "density": 0.5, "rescale": False}
    found = merge("dare_linear", torch.zeros_like(model), [model, model], asked)
    for count, share in enumerate((0.25, 0.5, 0.25)):
        assert abs((found == count).double().mean() - share) < 0.02


def test_another_seed_drops_other_elements():
    base, model = torch.zeros(50, 50), torch.ones(50, 50)
    asked = {"weight": 1.0, "density": 0.5}
    one, same, other = (merge("dare_linear", base, [model], asked, seed=s) for s in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_a_tile_alone_knows_its_draws():
    model = torch.ones(1000, 300)
    whole = kept(AT_RANDOM, model, density=0.5)
    chance = AT_RANDOM.statistics(
        lambda: cut(model * 0, [model], 1000), Values(({"density": 0.5},), {})
    )[0]
    part = model[700:800].clone()
    tile = tile_of("weight", 700 * 300, (1000, 300), part * 0, (part,))
    AT_RANDOM.keep_(part, tile, chance)
    assert torch.equal(part != 0, whole[700:800])
