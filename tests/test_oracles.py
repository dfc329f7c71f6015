"""What is kept in tests/fixtures is what mergekit, PEFT, FusionBench and clip-benchmark give."""

from __future__ import annotations

import pytest
import torch
from make_fixtures import MAKERS, run_methods
from mergekit_cases import DTYPES, Case, fixture
from tiles import merge

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        *("ignore::UserWarning", "ignore::FutureWarning"),
        # clip-benchmark calls float() on arrays of one element
        "ignore:Conversion of an array with ndim:DeprecationWarning",
    ),
]


@pytest.mark.parametrize("name", MAKERS)
def test_the_fixtures_are_what_the_oracles_give(name: str):
    kept = fixture(name)
    for draw, make in MAKERS[name]:
        given = {label: kept.pop(label) for label in draw()}
        for label, tensor in make(given).items():
            torch.testing.assert_close(tensor, kept.pop(label), rtol=1e-5, atol=1e-6)
    assert not kept  # nothing is kept that nobody makes


FREE = [Case("dare_linear", {"weight": [1.0], "density": [0.3], "rescale": False}, 1)] + [
    Case("della_linear", {"weight": [1.0], "density": [0.4], "epsilon": e, "rescale": False}, 1)
    for e in (0.05, 0.3)
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_random_methods_keep_as_much_and_where_as_mergekit(dtype: str):
    """Shares of ten classes of rank, of 600 000 elements without zeros: within 5 deviations."""
    model = torch.randn(600, 1000, generator=torch.Generator().manual_seed(99)).to(DTYPES[dtype])
    model[model == 0] = 1
    asked = [vars(case) | {"key": str(case), "set": "s"} for case in FREE]
    theirs = run_methods(asked, {"s/base": torch.zeros_like(model), "s/0": model})
    ranks = model.abs().float().argsort(1).argsort(1)
    for case in FREE:
        wanted = theirs[str(case)] != 0
        found = merge(case.method, torch.zeros_like(model), [model], case.parameters) != 0
        shares = [
            torch.zeros(600, 1000).scatter_(1, ranks, kept.float()).view(600, 10, -1).mean((0, 2))
            for kept in (found, wanted)
        ]
        # bfloat16 rounds mergekit's ranks and probabilities to three digits
        slack = 0.003 if dtype == "bfloat16" else 0.0
        deviation = (2 * 0.25 / 60_000) ** 0.5
        assert (shares[0] - shares[1]).abs().max() < 5 * deviation + slack
        assert abs(shares[0].mean() - shares[1].mean()) < 5 * deviation / 10**0.5 + slack
