"""Merge methods agree with PEFT and FusionBench once their conventions are chosen."""

from __future__ import annotations

import contextlib
import copy
import io

import pytest
import torch
from tiles import merge

from atlas_cli.models.clip import import_open_clip

import_open_clip()  # mends torchvision, which the libraries below import too
peft = pytest.importorskip("peft.utils.merge_utils")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

BASE = torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
VECTORS = [
    0.1 * torch.randn(40, 30, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2, 3)
]
MODELS = [BASE + vector for vector in VECTORS]
DELTAS = [model - BASE for model in MODELS]
WEIGHTS = [0.7, 0.4, 0.9]
PEFT = {"weight": WEIGHTS, "weigh": "after", "divisor": "count", "normalize": True}


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_task_arithmetic_is_that_of_peft():
    wanted = peft.task_arithmetic(DELTAS, torch.tensor(WEIGHTS))
    close(merge("task_arithmetic", BASE, MODELS, {"weight": WEIGHTS}), BASE + wanted)


@pytest.mark.parametrize("density", [0.2, 0.5, 0.9])
@pytest.mark.parametrize(("theirs", "ours"), [("total", "sum"), ("frequency", "count")])
def test_ties_is_that_of_peft(density: float, theirs: str, ours: str):
    wanted = peft.ties(DELTAS, torch.tensor(WEIGHTS), density, majority_sign_method=theirs)
    asked = PEFT | {"density": density, "elect": ours}
    close(merge("ties", BASE, MODELS, asked, rows=7), BASE + wanted)


@pytest.mark.parametrize("name", ["dare_linear", "dare_ties"])
def test_dare_is_that_of_peft_given_what_was_dropped(name: str, monkeypatch: pytest.MonkeyPatch):
    density = 0.5
    masks = []
    for number, delta in enumerate(DELTAS):
        asked = {"density": density, "rescale": False}
        alone = [1.0 if number == i else 0.0 for i in range(3)]
        merged = merge("dare_linear", 0 * BASE, DELTAS, asked | {"weight": alone})
        masks.append((merged != 0).to(delta.dtype))
    drawn = iter(masks)
    monkeypatch.setattr(torch, "bernoulli", lambda probabilities: next(drawn))
    wanted = getattr(peft, name)(DELTAS, torch.tensor(WEIGHTS), density)
    monkeypatch.undo()
    conventions = PEFT if name == "dare_ties" else {"weight": WEIGHTS}
    asked = conventions | {"density": density, "rescale_by": "density"}
    close(merge(name, BASE, MODELS, asked), BASE + wanted)


# FusionBench ----------------------------------------------------------------------------------


class Net(torch.nn.Module):
    """A matrix, a wide matrix, a vector and a kernel."""

    def __init__(self, seed: int, size: float) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        shapes = {"tall": (40, 30), "wide": (16, 50), "bias": (9,), "kernel": (4, 3, 2, 2)}
        for name, shape in shapes.items():
            noise = size * torch.randn(shape, generator=generator)
            self.register_parameter(name, torch.nn.Parameter(noise))


@pytest.fixture(scope="module")
def nets() -> list[Net]:
    base = Net(0, 1.0)
    tuned = [copy.deepcopy(base) for _ in range(3)]
    for number, net in enumerate(tuned):
        for mine, noise in zip(net.parameters(), Net(number + 1, 0.1).parameters(), strict=True):
            mine.data += noise.data
    return [base, *tuned]


def fused(algorithm: object, nets: list[Net]) -> dict[str, torch.Tensor]:
    """What an algorithm of FusionBench makes of the models; it talks and works in place."""
    pool = pytest.importorskip("fusion_bench").BaseModelPool(
        {"_pretrained_": copy.deepcopy(nets[0])}
        | {f"t{i}": copy.deepcopy(net) for i, net in enumerate(nets[1:])}
    )
    with contextlib.redirect_stdout(io.StringIO()):
        return {name: t.detach() for name, t in algorithm.run(pool).state_dict().items()}


def ours(name: str, nets: list[Net], parameters: dict) -> dict[str, torch.Tensor]:
    states = [{key: t.detach() for key, t in net.state_dict().items()} for net in nets]
    return {
        key: merge(name, base, [state[key] for state in states[1:]], parameters)
        for key, base in states[0].items()
    }


def compare(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-4, atol=1e-5)


def test_task_singular_vectors_are_those_of_fusion_bench(nets: list[Net]):
    module = pytest.importorskip("fusion_bench.method.task_singular_vector.TSVM")
    algorithm = module.TaskSingularVectorMerging(alpha=1.0, exclude_keys=[])
    compare(ours("tsv", nets, {}), fused(algorithm, nets))


def test_weighted_task_singular_vectors_are_those_of_fusion_bench(nets: list[Net]):
    module = pytest.importorskip("fusion_bench.method.task_singular_vector.TSVM")
    algorithm = module.TaskSingularVectorMerging(alpha=WEIGHTS, exclude_keys=[])
    compare(ours("tsv", nets, {"weight": WEIGHTS}), fused(algorithm, nets))


def test_isotropic_merging_is_that_of_fusion_bench(nets: list[Net]):
    module = pytest.importorskip("fusion_bench.method.isotropic_merging.iso")
    algorithm = module.ISO_C_Merge(scaling_factor=1.5, exclude_keys=[])
    compare(ours("iso_c", nets, {"lambda": 1.5}), fused(algorithm, nets))


@pytest.mark.parametrize("fraction", [0.8, 0.5])
def test_isotropic_merging_with_task_directions_is_that_of_fusion_bench(
    nets: list[Net], fraction: float
):
    module = pytest.importorskip("fusion_bench.method.isotropic_merging.iso")
    algorithm = module.ISO_CTS_Merge(1.5, fraction, exclude_keys=[])
    asked = {"lambda": 1.5, "common_space_fraction": fraction}
    compare(ours("iso_cts", nets, asked), fused(algorithm, nets))


def test_ties_over_one_vector_is_that_of_fusion_bench(nets: list[Net]):
    """It takes the model as one vector: here a model of one tensor."""
    ties = pytest.importorskip("fusion_bench.method.ties_merging.ties_merging")
    base, *tuned = [{"tall": net.state_dict()["tall"].clone()} for net in nets]
    singles = [torch.nn.ParameterDict(state) for state in (base, *tuned)]
    algorithm = ties.TiesMergingAlgorithm(
        scaling_factor=0.3, threshold=20, remove_keys=[], merge_func="mean"
    )
    wanted = fused(algorithm, singles)["tall"]
    asked = {
        **{"weight": 1.0, "density": 0.2, "rounding": "above", "lambda": 0.3},
        **{"zero_sign": "majority", "divisor": "count"},
    }
    found = merge("ties", base["tall"], [state["tall"] for state in tuned], asked)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
