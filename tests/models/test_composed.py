"""A tower runs with composed tensors: the features and gradients of plain autograd."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from composing import compose
from conftest import HALF, TINY_CONFIG
from torch.func import functional_call

from atlas_cli.core.compose import Composition, by_block, by_qkv, by_vector, stack_blocks
from atlas_cli.core.optimizers import CoefficientOptimizer, OptimizerConfig
from atlas_cli.core.storage import Dense
from atlas_cli.errors import AtlasError
from atlas_cli.learning.batches import StatelessData, generator_of
from atlas_cli.learning.loop import descend
from atlas_cli.models.clip import build
from atlas_cli.models.composed import ComposedModel, LossOf, key_biases
from atlas_cli.models.folders import Blueprint
from atlas_cli.models.trainable import TrainableModel
from atlas_cli.parallel import thread_pool_for

RESNET = {
    **TINY_CONFIG,
    "vision_cfg": {"image_size": 64, "layers": [1, 1, 1, 1], "width": 8, "head_width": 64},
}
CONFIGS = {"transformer": (TINY_CONFIG, 32), "resnet": (RESNET, 64)}
PREFIX = "visual."


def random(shape: Sequence[int], seed: int) -> torch.Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))


def make_tower(kind: str) -> tuple[torch.nn.Module, torch.Tensor]:
    """An image tower and nine images for it: more than one for each part, and not equally many."""
    config, size = CONFIGS[kind]
    torch.manual_seed(0)
    module, _ = build(Blueprint(config, {**HALF, "size": size}))
    visual = module.visual.eval().requires_grad_(False)
    return visual, random((9, 3, size, size), 1)


@pytest.fixture(scope="module", params=CONFIGS)
def tower(request: pytest.FixtureRequest) -> tuple[torch.nn.Module, torch.Tensor]:
    return make_tower(request.param)


@pytest.fixture(scope="module")
def vit() -> tuple[torch.nn.Module, torch.Tensor]:
    return make_tower("transformer")


def scale_of(tensor: torch.Tensor) -> float:
    """How large a vector is: a tenth of the weights, and something also where they are all one."""
    return 0.02 + 0.1 * tensor.std(correction=0).item()


def composition_of(
    module: torch.nn.Module, vectors: int = 2, layout: Any = by_block
) -> Composition:
    base = {f"{PREFIX}{name}": tensor for name, tensor in module.named_parameters()}
    shapes = {name: tuple(tensor.shape) for name, tensor in base.items()}
    stacks = {
        name: stack_blocks(
            {
                row: Dense(scale_of(tensor) * random(tensor.shape, 97 * row + n))
                for row in range(vectors)
            }
        )
        for n, (name, tensor) in enumerate(base.items())
    }
    return Composition(base, stacks, layout(shapes), vectors)


def coefficients_of(composition: Composition, seed: int = 5) -> torch.Tensor:
    return 0.3 * random(composition.shape, seed)


def plain(module: torch.nn.Module, composed: dict[str, torch.Tensor], images: torch.Tensor):
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in composed.items()}
    return functional_call(module, tensors, (images,))


def loss_of(features: torch.Tensor) -> torch.Tensor:
    """Something curved, so that the gradient depends on where the features are."""
    target = random(features.shape, 11)
    return (F.normalize(features, dim=-1) - F.normalize(target, dim=-1)).square().sum(1).mean()


def through_autograd(module: torch.nn.Module, composition: Composition, images: torch.Tensor):
    table = coefficients_of(composition).requires_grad_()
    features = plain(module, compose(composition, table), images)
    loss = loss_of(features)
    return features.detach(), loss.item(), torch.autograd.grad(loss, table)[0].double()


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("threads", [None, 2], ids=["whole batches", "in parts"])
def test_features_and_gradient_are_those_of_autograd_through_the_composition(
    tower: tuple[torch.nn.Module, torch.Tensor], threads: int | None
):
    module, images = tower
    composition = composition_of(module)
    features, loss, gradient = through_autograd(module, composition, images)
    with thread_pool_for(module, threads or 1) as thread_pool:
        ours = ComposedModel(
            module, composition, prefix=PREFIX, thread_pool=thread_pool if threads else None
        )
        ours.load(coefficients_of(composition))
        assert relative(ours.features(images), features) < 1e-6
        assert ours.backward(images, loss_of).item() == pytest.approx(loss, rel=1e-6)
        found = ours.gradient()
    assert found.dtype == torch.float64
    assert relative(found, gradient) < 1e-6


def test_biases_of_keys_that_no_output_depends_on_have_no_gradient(vit):
    module, images = vit
    composition = composition_of(module, layout=by_qkv)
    labels = composition.layout.labels
    keys = [n for n, label in enumerate(labels) if label.endswith("in_proj_bias[k]")]
    assert len(keys) == len(key_biases(module)) == 2
    table = coefficients_of(composition)
    other = table.clone()
    other[:, keys] += 1
    ours = ComposedModel(module, composition, prefix=PREFIX)
    features = [(ours.load(one), ours.features(images))[1] for one in (table, other)]
    assert relative(*features) < 1e-5
    ours.backward(images, loss_of)
    gradient = ours.gradient()
    assert [n for n in range(len(labels)) if not gradient[:, n].any()] == keys
    trained = TrainableModel(copy.deepcopy(module), [n for n, _ in module.named_parameters()])
    trained.backward(images, loss_of)
    found = trained.gradient()
    for name, keys_of in key_biases(module).items():
        assert not found[name][keys_of].any()
        assert found[name].count_nonzero() == found[name].numel() * 2 // 3


def test_one_coefficient_per_vector_gathers_the_gradients_of_all_blocks(vit):
    module, images = vit
    composition = composition_of(module, layout=by_vector)
    _, _, gradient = through_autograd(module, composition, images)
    ours = ComposedModel(module, composition, prefix=PREFIX)
    ours.load(coefficients_of(composition))
    ours.backward(images, loss_of)
    found = ours.gradient()
    assert found.shape == (2, 1)
    assert relative(found, gradient) < 1e-6


def test_with_zero_coefficients_the_module_is_itself(tower):
    module, images = tower
    composition = composition_of(module)
    ours = ComposedModel(module, composition, prefix=PREFIX)
    ours.load(torch.zeros(composition.shape))
    assert torch.equal(ours.features(images), module(images))


def test_any_number_of_threads_gives_the_same_bits(tower):
    module, images = tower
    composition = composition_of(module)
    found = []
    for threads in (1, 2, 3):
        with thread_pool_for(module, threads) as thread_pool:
            ours = ComposedModel(module, composition, prefix=PREFIX, thread_pool=thread_pool)
            ours.load(coefficients_of(composition))
            loss = ours.backward(images, loss_of)
            found.append((ours.features(images), loss, ours.gradient()))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_a_batch_may_have_fewer_images_than_there_are_parts(vit, count: int):
    module, images = vit
    composition = composition_of(module)
    wanted, _, gradient = through_autograd(module, composition, images[:count])
    with thread_pool_for(module, 2) as thread_pool:
        ours = ComposedModel(module, composition, prefix=PREFIX, thread_pool=thread_pool)
        ours.load(coefficients_of(composition))
        assert relative(ours.features(images[:count]), wanted) < 1e-6
        ours.backward(images[:count], loss_of)
        assert relative(ours.gradient(), gradient) < 1e-6


def test_many_images_come_back_in_their_order(vit):
    module, images = vit
    composition = composition_of(module)
    many = images.repeat(40, 1, 1, 1)[:300]  # several forward passes
    with thread_pool_for(module, 2) as thread_pool:
        ours = ComposedModel(module, composition, prefix=PREFIX, thread_pool=thread_pool)
        ours.load(coefficients_of(composition))
        found = ours.features(many)
    assert len(found) == 300
    torch.testing.assert_close(found[:9], found[9:18])
    torch.testing.assert_close(found[288:297], found[:9])


def test_the_number_of_threads_of_torch_is_as_before(vit):
    before = torch.get_num_threads()
    with thread_pool_for(vit[0], 2) as thread_pool:
        assert thread_pool is not None
    assert torch.get_num_threads() == before


# What is left alone ---------------------------------------------------------------------------


def test_the_module_and_the_base_keep_their_tensors(tower):
    module, images = tower
    before = copy.deepcopy(module.state_dict())
    composition = composition_of(module)
    with thread_pool_for(module, 2) as thread_pool:
        ours = ComposedModel(module, composition, prefix=PREFIX, thread_pool=thread_pool)
        ours.load(coefficients_of(composition))
        ours.backward(images, loss_of)
        ours.gradient()
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert not any(parameter.requires_grad for parameter in module.parameters())


def test_batch_normalisation_uses_the_statistics_of_the_base_and_does_not_update_them():
    module, images = make_tower("resnet")
    for name, buffer in module.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            buffer += random(buffer.shape, 3).abs()
    wanted = module(images)
    statistics = {name: buffer.clone() for name, buffer in module.named_buffers()}
    assert any(name.endswith("running_var") for name in statistics)
    module.train()  # as a caller may have left it
    composition = composition_of(module)
    ours = ComposedModel(module, composition, prefix=PREFIX)
    ours.load(torch.zeros(composition.shape))
    torch.testing.assert_close(ours.features(images), wanted)
    ours.backward(images, loss_of)
    ours.gradient()
    assert all(torch.equal(buffer, statistics[name]) for name, buffer in module.named_buffers())


def test_tensors_without_a_vector_stay_those_of_the_module(vit):
    module, images = vit
    whole = composition_of(module)
    some = {name: stack for name, stack in whole.stacks.items() if "resblocks.1" in name}
    base = {name: whole.base[name] for name in some}
    shapes = {name: tuple(tensor.shape) for name, tensor in base.items()}
    composition = Composition(base, some, by_block(shapes), 2)
    features, _, gradient = through_autograd(module, composition, images)
    ours = ComposedModel(module, composition, prefix=PREFIX)
    ours.load(coefficients_of(composition))
    assert relative(ours.features(images), features) < 1e-6
    ours.backward(images, loss_of)
    assert relative(ours.gradient(), gradient) < 1e-6


def test_gradients_are_let_go_once_they_are_given(vit):
    module, images = vit
    ours = ComposedModel(module, composition_of(module), prefix=PREFIX)
    ours.load(coefficients_of(ours.composition))
    ours.backward(images, loss_of)
    assert ours.gradient().any()
    assert not ours.gradient().any()


# Steps ----------------------------------------------------------------------------------------


class Counted(dict):
    """Tensors by name that count how often they are looked up: once per composed block."""

    looked_up = 0

    def __getitem__(self, name: str) -> torch.Tensor:
        self.looked_up += 1
        return super().__getitem__(name)


class Regression(StatelessData):
    """Features shall be those of a target; a step's batch comes in some number of parts."""

    epoch_steps, steps = 2, 4

    def __init__(self, images: torch.Tensor, parts: int) -> None:
        self._images, self._parts = images, parts
        self._target = F.normalize(random((len(images), 32), 11), dim=-1)

    def batches(self, step: int) -> Iterator[tuple[torch.Tensor, LossOf]]:
        for some in torch.arange(len(self._images)).chunk(self._parts):
            yield self._images[some], self._loss_of(some)

    def _loss_of(self, some: torch.Tensor) -> LossOf:
        def loss_of(features: torch.Tensor) -> torch.Tensor:
            apart = F.normalize(features, dim=-1) - self._target[some]
            return apart.square().sum() / len(self._images)

        return loss_of

    def accuracy(self) -> float:
        return 0.5


def learn(tower: ComposedModel, images: torch.Tensor, parts: int):
    optimizer = CoefficientOptimizer(torch.zeros(tower.composition.shape), 4, OptimizerConfig())
    steps = list(descend(tower, optimizer, Regression(images, parts)))
    return steps, optimizer.coefficients.detach()


def test_a_batch_in_parts_gives_the_gradient_of_the_whole(vit):
    module, images = vit
    composition, found = composition_of(module), []
    for parts in (1, 2):
        ours = ComposedModel(module, composition, prefix=PREFIX)
        ours.load(coefficients_of(composition))
        for some, loss in Regression(images, parts).batches(0):
            ours.backward(some, loss)
        found.append(ours.gradient())
    assert relative(found[1], found[0]) < 1e-6


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_vectors_are_composed_once_per_step_whatever_the_parts(vit, parts: int):
    module, images = vit
    plain_one = composition_of(module)
    base = Counted(plain_one.base)
    ours = ComposedModel(
        module, Composition(base, plain_one.stacks, plain_one.layout, 2), prefix=PREFIX
    )
    base.looked_up = 0
    steps, _ = learn(ours, images, parts)
    assert len(steps) == 4
    assert base.looked_up == 4 * len(base)


def test_accumulated_steps_learn_what_whole_batches_learn(vit):
    module, images = vit
    composition = composition_of(module)
    whole_steps, whole = learn(ComposedModel(module, composition, prefix=PREFIX), images, 1)
    steps, found = learn(ComposedModel(module, composition, prefix=PREFIX), images, 3)
    torch.testing.assert_close(found, whole, atol=1e-4, rtol=1e-3)  # AdamW divides small by small
    assert [s.loss for s in steps] == pytest.approx([s.loss for s in whole_steps], rel=1e-4)


def test_steps_tell_where_they_are_and_the_loss_falls(vit):
    module, images = vit
    steps, _ = learn(ComposedModel(module, composition_of(module), prefix=PREFIX), images, 1)
    assert [(step.number, step.epoch) for step in steps] == [(1, 1), (2, 1), (3, 2), (4, 2)]
    assert [step.rate for step in steps][:1] == [0.1]
    assert steps[-1].loss < steps[0].loss


def test_a_loss_that_is_not_finite_stops_with_the_step_and_the_rate(vit):
    module, images = vit
    broken = images.clone()
    broken[0, 0, 0, 0] = float("nan")
    ours = ComposedModel(module, composition_of(module), prefix=PREFIX)
    with pytest.raises(
        AtlasError, match=r"^the loss became nan at step 1; .* \(it is 0\.1 there\)"
    ):
        learn(ours, broken, 1)


def test_generators_depend_on_the_seed_and_the_purpose_alone():
    def first(*what: object) -> float:
        return torch.rand(1, generator=generator_of(*what)).item()

    assert first(0, "crops", 1) == first(0, "crops", 1)
    others = {
        first(0, "crops", 1),
        first(0, "crops", 2),
        first(1, "crops", 1),
        first(0, "order", 1),
    }
    assert len(others) == 4


# The linearised tower -------------------------------------------------------------------------


def linear_tower(module: torch.nn.Module) -> ComposedModel:
    ours = ComposedModel(module, composition_of(module), prefix=PREFIX, linear=True)
    ours.load(coefficients_of(ours.composition))
    return ours


def along(module: torch.nn.Module, composition: Composition, images: torch.Tensor, step: float):
    """Features at base + step * (composed - base), in float64."""
    double = copy.deepcopy(module).double()
    composed = compose(composition, coefficients_of(composition))
    moved = {
        name: base.double() + step * (composed[name].double() - base.double())
        for name, base in composition.base.items()
    }
    return plain(double, moved, images.double())


def test_linearised_features_equal_finite_differences(tower):
    module, images = tower
    composition = composition_of(module)
    step = 1e-8  # so small that hardly any unit of the ResNet is switched on or off by it
    above, below = (along(module, composition, images, sign * step) for sign in (1, -1))
    wanted = along(module, composition, images, 0.0) + (above - below) / (2 * step)
    found = linear_tower(module).features(images).double()
    assert relative(found, wanted) < 1e-5
    assert relative(along(module, composition, images, 1.0), wanted) > 1e-3  # it is curved


def test_linearised_features_are_linear_in_the_coefficients(tower):
    module, images = tower
    ours = ComposedModel(module, composition_of(module), prefix=PREFIX, linear=True)
    table = coefficients_of(ours.composition)
    found = []
    for scale in (0.0, 1.0, 3.0):
        ours.load(scale * table)
        found.append(ours.features(images))
    torch.testing.assert_close(found[0], module(images), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[2] - found[0], 3 * (found[1] - found[0]), atol=1e-4, rtol=1e-4)


def test_the_gradient_of_a_linearised_tower_equals_finite_differences(vit):
    """The loss along single coefficients, by central differences; in features it is curved."""
    module, images = vit
    ours = linear_tower(module)
    ours.backward(images, loss_of)
    gradient = ours.gradient()
    table, step = coefficients_of(ours.composition), 1e-2
    for row, column in ((0, 0), (1, 3), (0, 7), (1, 20)):
        losses = []
        for sign in (1, -1):
            moved = table.clone()
            moved[row, column] += sign * step
            ours.load(moved)
            losses.append(loss_of(ours.features(images).double()).item())
        slope = (losses[0] - losses[1]) / (2 * step)
        assert gradient[row, column].item() == pytest.approx(slope, rel=1e-2, abs=1e-5)


def test_a_linearised_tower_descends(vit):
    module, images = vit
    ours = ComposedModel(module, composition_of(module), prefix=PREFIX, linear=True)
    steps, coefficients = learn(ours, images, 2)
    assert steps[-1].loss < steps[0].loss
    assert coefficients.all()
