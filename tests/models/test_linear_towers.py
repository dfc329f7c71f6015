"""A linear tower is the first-order expansion of its module at the base."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import write_open_clip
from torch.func import functional_call

from atlas_cli.core.compose import Composition, by_block, stack_blocks
from atlas_cli.core.storage import Dense, quantise
from atlas_cli.models.clip import Opening, open_model
from atlas_cli.models.composed import ComposedModel
from atlas_cli.sources.locate import locate, parse_reference


@pytest.fixture
def tower(tmp_path: Path) -> torch.nn.Module:
    reference = parse_reference(str(write_open_clip(tmp_path / "model")))
    return open_model(locate(reference), Opening(device="cpu")).module.visual


def composition_of(module: torch.nn.Module, store=Dense, vectors: int = 2) -> Composition:
    random = torch.Generator().manual_seed(0)
    base = {name: tensor.detach() for name, tensor in module.named_parameters()}
    stacks = {
        name: stack_blocks(
            {i: store(0.05 * torch.randn(t.shape, generator=random)) for i in range(vectors)}
        )
        for name, t in base.items()
    }
    layout = by_block({name: tuple(tensor.shape) for name, tensor in base.items()})
    return Composition(base, stacks, layout, vectors)


def exact_features(
    module: torch.nn.Module, composition: Composition, table: torch.Tensor, images: torch.Tensor
) -> torch.Tensor:
    """f(x; theta0 + sum of coefficient * tau), all in float64."""
    tensors = {}
    for column, (name, (stack,)) in enumerate(composition.stacks.items()):
        moved = (table[:, column].double() @ stack.values.double()).view_as(composition.base[name])
        tensors[name] = composition.base[name].double() + moved
    with torch.no_grad():
        return functional_call(module.double(), tensors, (images.double(),))


def test_the_derivative_equals_finite_differences(tower: torch.nn.Module):
    composition = composition_of(tower)
    random = torch.Generator().manual_seed(1)
    table = 0.1 * torch.randn(composition.shape, generator=random)
    images = torch.randn(5, 3, 32, 32, generator=random)
    linear = ComposedModel(tower, composition, linear=True)
    linear.load(table)
    found = linear.features(images).double()
    step = 1e-4
    ahead = exact_features(tower, composition, step * table, images)
    behind = exact_features(tower, composition, -step * table, images)
    start = exact_features(tower, composition, 0 * table, images)
    wanted = (ahead - behind) / (2 * step)
    assert (found - start - wanted).norm() / wanted.norm() < 2e-6


@pytest.mark.parametrize("store", [Dense, quantise])
def test_its_gradient_is_that_of_a_linear_function(tower: torch.nn.Module, store):
    """features are linear in the coefficients, so differences of any size give their Jacobian."""
    composition = composition_of(tower, store)
    random = torch.Generator().manual_seed(2)
    images = torch.randn(4, 3, 32, 32, generator=random)
    head = torch.randn(3, 32, generator=random)
    labels = torch.tensor([0, 1, 2, 0])
    linear = ComposedModel(tower, composition, linear=True)
    table = 0.1 * torch.randn(composition.shape, generator=random)

    def features(where: torch.Tensor) -> torch.Tensor:
        linear.load(where)
        return linear.features(images).double()

    linear.load(table)
    loss = linear.backward(images, lambda found: F.cross_entropy(found @ head.T, labels))
    gradient = linear.gradient()
    there = features(table).requires_grad_()
    wanted_loss = F.cross_entropy(there @ head.double().T, labels)
    wanted_loss.backward()
    assert loss.item() == pytest.approx(wanted_loss.item(), rel=1e-5)
    for row, column in [(0, 0), (1, 3), (0, 9), (1, 30)]:
        moved = torch.zeros_like(table)
        moved[row, column] = 1.0
        change = features(table + moved) - features(table)
        wanted = (there.grad * change).sum().item()
        assert gradient[row, column].item() == pytest.approx(wanted, rel=1e-3, abs=1e-6)


def test_without_coefficients_it_is_the_module_itself(tower: torch.nn.Module):
    composition = composition_of(tower)
    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(3))
    linear = ComposedModel(tower, composition, linear=True)
    linear.load(torch.zeros(composition.shape))
    with torch.no_grad():
        wanted = tower(images)
    assert torch.allclose(linear.features(images), wanted, atol=1e-5)


def test_running_a_linear_tower_leaves_torch_as_it_was(tower: torch.nn.Module):
    composition = composition_of(tower)
    linear = ComposedModel(tower, composition, linear=True)
    linear.load(torch.ones(composition.shape))
    for enabled in (True, False):
        torch.backends.mha.set_fastpath_enabled(enabled)
        try:
            linear.features(torch.zeros(2, 3, 32, 32))
            assert torch.backends.mha.get_fastpath_enabled() is enabled
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
