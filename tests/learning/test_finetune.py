"""Fine-tuning is what a plain loop in PyTorch does, for every way to tune."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from finetuned import TRAIN, head_of, opened, read_split, write_world
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from atlas_cli.core.optimizers import OptimizerConfig, WeightOptimizer
from atlas_cli.datasets.dataset import open_dataset, plain_name
from atlas_cli.errors import UsageError
from atlas_cli.learning.run import RunInputs, RunOptions
from atlas_cli.learning.weights import prepared_trainer
from atlas_cli.models.clip import Opening
from atlas_cli.models.trainable import ALPHA, LoraModel, TrainableModel, names_of, start_factors
from atlas_cli.recipes.finetune import EPOCHS, FinetuneRecipe, epochs_of, warmup_of
from atlas_cli.recipes.model import check_recipe
from atlas_cli.sources.locate import locate, parse_reference

STEPS = 3
WHOLE = 3 * TRAIN  # a batch of all images


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("world"))


def tuned(world: Path, **keys: Any) -> dict[str, torch.Tensor]:
    """The weights that fine-tuning comes to in a few steps on all images at once."""
    given = {"steps": STEPS, "batch_size": WHOLE, "augment": "none", "lr": 1e-4, **keys}
    recipe = FinetuneRecipe(data=[str(world / "pets")], model=str(world / "base"), **given)
    dataset = open_dataset(recipe.data[0], split="train")
    source = locate(parse_reference(recipe.model))
    inputs = RunInputs(
        "finetune", recipe, source, (), (dataset,), (), Opening(device="cpu"), RunOptions(threads=1)
    )
    judge = open_dataset(recipe.data[0], split="val")
    with prepared_trainer(dataclasses.replace(inputs, judges=(judge,)), print) as ready:
        *_, checkpoint = ready.learn(ready.begin())
        assert checkpoint.over
        return {name: tensor.clone() for name, tensor in ready.model.load(checkpoint.kept).items()}


def by_hand(world: Path, names: list[str] | None = None) -> dict[str, torch.Tensor]:
    """A loop as one writes it: AdamW, a cosine, clipping, and open_clip's own model."""
    model = opened(world / "base")
    head, (images, labels) = head_of(model, world / "base"), read_split(world / "pets", "train")
    parameters = {n: p for n, p in model.visual.named_parameters() if names is None or n in names}
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-4, weight_decay=0.1)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 1e-4 * (1 + math.cos(math.pi * step / STEPS)) / 2
        features = F.normalize(model.encode_image(images), dim=-1)
        loss = F.cross_entropy(features @ head.T, labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        optimizer.step()
    return {f"visual.{name}": tensor.detach() for name, tensor in parameters.items()}


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    apart = torch.cat([(found[name] - tensor).abs().flatten() for name, tensor in wanted.items()])
    # Adam makes a step of a gradient that is nothing but rounding, such as that of keys' biases.
    assert (apart > 1e-6).float().mean() < 1e-3
    assert apart.max() < 1e-4


@pytest.mark.parametrize("tune", ["all", "layernorm", "projection"])
def test_three_steps_give_the_weights_of_a_plain_loop(world: Path, tune: str):
    names = names_of(opened(world / "base").visual, tune)
    assert_same(tuned(world, tune=tune), by_hand(world, names))


@pytest.mark.parametrize("more", [{"accumulate": 3}, {"checkpoint_activations": True}])
def test_what_saves_memory_changes_no_weights(world: Path, more: dict[str, Any]):
    assert_same(tuned(world, **more), tuned(world))


def test_a_linearised_tower_runs_the_expansion_at_the_base(world: Path):
    found = tuned(world, linearised=True, lr=1e-2)
    module = opened(world / "base").visual
    images, _ = read_split(world / "pets", "val")
    tower = TrainableModel(module, names_of(module, "all"), prefix="visual.", linear=True)
    tower.load(found)
    base = {name: tensor.detach() for name, tensor in module.named_parameters()}
    change = {name: found[f"visual.{name}"] - tensor for name, tensor in base.items()}
    torch.backends.mha.set_fastpath_enabled(False)  # it has no derivative
    try:
        with sdpa_kernel(SDPBackend.MATH):
            value, slope = jvp(lambda p: functional_call(module, p, (images,)), (base,), (change,))
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert slope.abs().max() > 0.1
    torch.testing.assert_close(tower.features(images), value + slope, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_gradient_of_factors_is_the_one_of_peft(world: Path):
    import peft

    model = opened(world / "base").requires_grad_(False)
    images, _ = read_split(world / "pets", "val")
    factors, pairs = start_factors(model, 2, 0)
    torch.manual_seed(0)
    factors = {name: 0.02 * torch.randn(tensor.shape) for name, tensor in factors.items()}
    tower = LoraModel(model.visual, factors, pairs, ALPHA / 2, prefix="visual.")
    tower.load(factors)
    tower.backward(images, lambda features: features.square().sum())
    ours = tower.gradient()
    config = peft.LoraConfig(r=2, lora_alpha=ALPHA, target_modules=r"visual\..*(attn|c_fc|c_proj)")
    adapted = peft.get_peft_model(model, config)
    peft.set_peft_model_state_dict(adapted, factors)
    adapted.base_model.model.encode_image(images).square().sum().backward()
    theirs = {
        name.replace(".default", ""): parameter.grad
        for name, parameter in adapted.named_parameters()
        if parameter.requires_grad and "out_proj" not in name
    }
    assert ours.keys() == theirs.keys()
    assert len(ours) == 2 * 2 * 3  # two layers of three matrices
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).norm() < 1e-4 * gradient.norm(), name


# Rates, epochs, images held out ---------------------------------------------------------------


def test_the_rate_rises_and_then_falls_along_half_a_cosine():
    optimizer_config = OptimizerConfig(rate=0.8, warmup=4)
    rates = [optimizer_config.rate_at(number, 12) for number in range(12)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8])
    assert rates[8] == pytest.approx(0.4)
    assert sorted(rates[4:], reverse=True) == rates[4:]


@pytest.mark.parametrize(("steps", "rise"), [(400, 40), (20000, 500), (5, 0)])
def test_the_rate_rises_for_500_steps_but_for_a_tenth_at_most(steps: int, rise: int):
    assert warmup_of(check_recipe(FinetuneRecipe, {"data": ["a"], "model": "b"}), steps) == rise


def test_epochs_are_those_of_the_published_vectors_by_name():
    recipe = check_recipe(FinetuneRecipe, {"data": ["a"], "model": "b"})
    names = [plain_name(name) for name in ("DTDVal", "Cars", "SUN397")]
    assert [epochs_of(recipe, name) for name in names] == [76, 35, 14]
    assert epochs_of(recipe, "photos") == 10
    assert epochs_of(recipe.model_copy(update={"epochs": 3}), "cars") == 3
    assert len(EPOCHS) == 22


def test_adapters_learn_faster_unless_told_otherwise():
    keys = {"data": ["a"], "model": "b", "lora": 4}
    assert check_recipe(FinetuneRecipe, keys).lr == 1e-3
    assert check_recipe(FinetuneRecipe, {**keys, "lr": 1e-5}).lr == 1e-5


def test_every_wrong_key_is_told_at_once():
    wrong = {"tune": "head", "select": "x", "lora": 0, "warmup": -1, "lr": math.nan, "steps": 1}
    with pytest.raises(UsageError) as problem:
        check_recipe(FinetuneRecipe, {"data": [], "model": "b", "epochs": 1, **wrong}, "--")
    told = [line.partition(":")[0] for line in str(problem.value).splitlines()]
    assert sorted(told) == sorted(["--data", *(f"--{key}" for key in wrong), "--lora"])


def test_weights_go_on_from_a_state_to_the_same_bits():
    def optimizer() -> WeightOptimizer:
        return WeightOptimizer(
            {"a": torch.ones(3), "b": torch.ones(2, 2)}, 6, OptimizerConfig(rate=0.1)
        )

    def slope(values: Any) -> dict[str, torch.Tensor]:
        return {name: tensor.square() - 0.5 for name, tensor in values.items()}

    whole, first, second = optimizer(), optimizer(), optimizer()
    for _ in range(6):
        whole.step(slope(whole.values))
    for _ in range(2):
        first.step(slope(first.values))
    second.restore({name: tensor.clone() for name, tensor in first.state().items()})
    for _ in range(4):
        second.step(slope(second.values))
    assert all(torch.equal(whole.values[name], second.values[name]) for name in "ab")
