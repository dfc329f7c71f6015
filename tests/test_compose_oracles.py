"""Composition agrees with other implementations: FusionBench's layer-wise merging, and PEFT."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from adapters import adapt, clip, small_config
from composing import compose
from conftest import HALF
from extracting import run
from makers import rewrite_header

from atlas_cli.core.compose import Composition, by_block, stack_blocks
from atlas_cli.core.losses import entropy
from atlas_cli.core.optimizers import CoefficientOptimizer
from atlas_cli.core.stacks import FactorStack
from atlas_cli.core.storage import Dense
from atlas_cli.learning.batches import StatelessData
from atlas_cli.learning.loop import descend
from atlas_cli.learning.setup import training_of
from atlas_cli.models import transformers_config
from atlas_cli.models.clip import build, fill, logits_of
from atlas_cli.models.composed import ComposedModel
from atlas_cli.models.folders import Blueprint, read_tensors
from atlas_cli.models.open_clip_import import import_open_clip
from atlas_cli.recipes.learning import AddRecipe, parse_clamp
from atlas_cli.sources.locate import locate, parse_reference
from atlas_cli.vectors.differences import Choice
from atlas_cli.vectors.pool import compose_pool, open_pool

import_open_clip()  # mends torchvision, which the libraries below import too
import peft  # noqa: E402
import transformers  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def random(shape: Sequence[int], seed: int) -> torch.Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))


IMAGES = random((5, 3, 32, 32), 0)


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


# FusionBench ----------------------------------------------------------------------------------


class Pooled(torch.nn.Module):
    """The image tower of transformers, giving its pooled output alone."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = transformers.CLIPVisionModel(small_config().vision_config)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.tower(pixel_values=images).pooler_output


@pytest.fixture(scope="module")
def base() -> Pooled:
    torch.manual_seed(0)
    return Pooled().eval()


def tuned(base: Pooled, seed: int) -> Pooled:
    """The same tower after some training."""
    found = copy.deepcopy(base)
    with torch.no_grad():
        for number, parameter in enumerate(found.parameters()):
            parameter += 0.02 * random(parameter.shape, 100 * seed + number)
    return found


def loss_of(features: torch.Tensor) -> torch.Tensor:
    return (features - random(features.shape, 1)).square().mean()


@pytest.fixture(scope="module")
def both(base: Pooled):
    """Three fine-tuned towers, composed by FusionBench and by us with the same coefficients."""
    from fusion_bench.models.wrappers import layer_wise_fusion as fusion

    finetuned = [tuned(base, seed) for seed in (1, 2, 3)]
    parameters = {name: tensor.detach() for name, tensor in base.named_parameters()}
    stacks = {
        name: stack_blocks(
            {
                row: Dense(model.get_parameter(name).detach() - tensor)
                for row, model in enumerate(finetuned)
            }
        )
        for name, tensor in parameters.items()
    }
    shapes = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
    ours = Composition(parameters, stacks, by_block(shapes), 3)
    coefficients = 0.5 * random(ours.shape, 7)
    theirs = fusion.LayerWiseMergedModel(
        coefficients.clone(),
        copy.deepcopy(base),
        copy.deepcopy(finetuned),
        clamp_weights=False,
        strict=False,  # position_ids is a buffer that no state dict holds
    )
    theirs.merge_weights()
    return theirs, ours, coefficients


@pytest.mark.slow
def test_composed_weights_are_those_of_fusion_bench(both):
    theirs, ours, coefficients = both
    composed = compose(ours, coefficients)
    wanted = {name: t for name, t in theirs.merge_weights().items() if name in composed}
    assert wanted.keys() == composed.keys()
    for name, tensor in composed.items():
        assert relative(tensor, wanted[name].detach()) < 1e-6


@pytest.mark.slow
def test_features_loss_and_gradient_are_those_of_fusion_bench(both, base: Pooled):
    theirs, ours, coefficients = both
    theirs.merge_weights()
    theirs.zero_grad()
    features = theirs(IMAGES)
    loss = loss_of(features)
    loss.backward()
    tower = ComposedModel(base, ours)
    tower.load(coefficients)
    assert relative(tower.features(IMAGES), features.detach()) < 1e-6
    assert tower.backward(IMAGES, loss_of).item() == pytest.approx(loss.item(), rel=1e-6)
    found = tower.gradient()
    assert found.shape == theirs.merge_weight.shape
    assert theirs.merge_weight.grad.count_nonzero() > 0.9 * found.numel()
    assert relative(found, theirs.merge_weight.grad) < 1e-6


@pytest.mark.slow
def test_ten_steps_of_descent_reach_the_coefficients_that_fusion_bench_reaches(both, base: Pooled):
    """One set of plain gradient steps with each: errors would add up."""
    theirs, ours, coefficients = both
    table = coefficients.clone()
    tower = ComposedModel(base, ours)
    theirs.merge_weight.data.copy_(coefficients)
    for _ in range(10):
        tower.load(table)
        tower.backward(IMAGES, loss_of)
        table -= 0.5 * tower.gradient().float()
        theirs.merge_weights()
        theirs.zero_grad()
        loss_of(theirs(IMAGES)).backward()
        theirs.merge_weight.data -= 0.5 * theirs.merge_weight.grad
    assert relative(table, coefficients) > 0.01  # it went somewhere
    assert relative(table, theirs.merge_weight.detach()) < 1e-5
    theirs.merge_weight.data.copy_(coefficients)


@dataclasses.dataclass
class Fixed(StatelessData):
    """Two tasks whose images are the same in every step."""

    images: tuple[torch.Tensor, ...]
    heads: tuple[torch.Tensor, ...]
    steps: int = 5
    epoch_steps: int = 5

    def batches(self, step: int):
        def loss_of(features: torch.Tensor) -> torch.Tensor:
            pieces = features.split([len(some) for some in self.images])
            return sum(entropy(logits_of(p, h)) for p, h in zip(pieces, self.heads, strict=True))

        yield torch.cat(self.images), loss_of

    def accuracy(self) -> float:
        return 0.0


@pytest.mark.slow
@pytest.mark.parametrize("rate", [1e-3, 0.2])
def test_entropy_follows_the_layer_wise_adamerging_of_fusion_bench(both, base: Pooled, rate: float):
    """Five steps; at the higher rate coefficients reach both bounds.

    The bias of keys changes no attention: Adam makes steps of the rounding of a gradient that is
    zero, which is another for them.
    """
    from fusion_bench.method.adamerging.entropy_loss import entropy_loss

    theirs, ours, coefficients = both
    tasks = Fixed(
        (random((5, 3, 32, 32), 3), random((3, 3, 32, 32), 4)),
        tuple(20 * random((n, base(IMAGES).shape[1]), n) for n in (4, 7)),
    )
    keys = {"model": "m", "vectors": ["v"], "data": ["a"], "objective": "entropy", "lr": rate}
    recipe = AddRecipe(**keys)
    config = training_of(recipe, parse_clamp(recipe.clamp)).optimizer_config
    own = CoefficientOptimizer(torch.full(ours.shape, recipe.init), tasks.steps, config)
    for _ in descend(ComposedModel(base, ours), own, tasks):
        pass

    theirs.clamp_weights = True
    theirs.merge_weight.data.fill_(0.3)
    optimizer = torch.optim.Adam([theirs.merge_weight], lr=rate)
    for _ in range(5):
        theirs.merge_weights()
        losses = (
            entropy_loss(logits_of(theirs(some), head))
            for some, head in zip(tasks.images, tasks.heads, strict=True)
        )
        optimizer.zero_grad()
        sum(losses).backward()
        optimizer.step()
    wanted = theirs.merge_weight.detach().clamp(0, 1)
    theirs.clamp_weights = False
    theirs.merge_weight.data.copy_(coefficients)
    free = torch.tensor(["k_proj.bias" not in label for label in ours.layout.labels])
    assert relative(own.values[:, free], wanted[:, free]) < (1e-5 if rate < 0.1 else 1e-4)
    if rate > 0.1:
        assert {0.0, 1.0} <= set(wanted.flatten().tolist())
    else:
        assert (wanted != 0.3).float().mean() > 0.9


# PEFT -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("base")
    transformers.CLIPModel(small_config()).save_pretrained(folder)
    return folder


def image_tower(folder: Path) -> torch.nn.Module:
    """The image tower of a folder of transformers, as open_clip builds it."""
    config = json.loads((folder / "config.json").read_text())
    module, _ = build(Blueprint(transformers_config.model_config(config, str(folder)), HALF))
    fill(module, read_tensors(locate(parse_reference(str(folder)))), str(folder))
    return module.visual.eval().requires_grad_(False)


def tower_of(folder: Path, *vectors: Path) -> ComposedModel:
    module = image_tower(folder)
    base = {f"visual.{name}": tensor for name, tensor in module.named_parameters()}
    tensors = read_tensors(locate(parse_reference(str(folder))))
    pool = open_pool([str(path) for path in vectors], tensors, list(base))
    composition = compose_pool(pool, base, by_block(pool.shapes), torch.device("cpu"))
    return ComposedModel(module, composition, prefix="visual.")


def projected(model: torch.nn.Module) -> torch.Tensor:
    """What a CLIP model of transformers gives for the images, before normalisation."""
    inner = model.base_model.model if hasattr(model, "peft_config") else model
    with torch.no_grad():
        images = IMAGES.to(inner.visual_projection.weight.dtype)
        pooled = inner.vision_model(pixel_values=images).pooler_output
        return inner.visual_projection(pooled)


def adapted(folder: Path, adapter: Path, scale: float) -> torch.nn.Module:
    """The model with the adapter of PEFT, its scaling multiplied by a number."""
    model = peft.PeftModel.from_pretrained(clip(folder), adapter).eval()
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            module.scale_layer(scale)
    return model


ADAPTERS = {
    "all": {},
    "queries and values": {"target_modules": ["q_proj", "v_proj"], "r": 3, "lora_alpha": 7},
    "projection": {"target_modules": ["visual_projection", "fc1"]},
    "rslora": {"use_rslora": True},
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_composed_with_a_coefficient_is_the_adapter_of_peft_at_that_scale(
    folder: Path, tmp_path: Path, name: str
):
    adapt(clip(folder), tmp_path / "adapter", **ADAPTERS[name])
    run(folder, tmp_path / "adapter", tmp_path / "v.safetensors", Choice("visual"))
    tower = tower_of(folder, tmp_path / "v.safetensors")
    assert tower.composition.stacks
    unchanged = projected(clip(folder).eval())
    for scale in (1.0, 0.4, -1.5, 0.0):
        tower.load(torch.full(tower.composition.shape, scale))
        wanted = projected(adapted(folder, tmp_path / "adapter", scale))
        torch.testing.assert_close(tower.features(IMAGES), wanted, atol=1e-5, rtol=1e-5)
        assert (relative(wanted, unchanged) > 0.01) == (scale != 0)


def test_adapters_stay_factors_and_two_of_them_add_up_as_peft_concatenates_them(
    folder: Path, tmp_path: Path
):
    adapt(clip(folder), tmp_path / "first")
    adapt(clip(folder), tmp_path / "second", r=2, target_modules=["q_proj", "fc2"])
    for name in ("first", "second"):
        path = tmp_path / f"{name}.safetensors"
        run(folder, tmp_path / name, path, Choice("visual"))
        rewrite_header(path, lambda header, name=name: header.update(name=name))
    tower = tower_of(folder, tmp_path / "first.safetensors", tmp_path / "second.safetensors")
    for stacks in tower.composition.stacks.values():
        assert all(isinstance(stack, FactorStack) for stack in stacks)
    tower.load(torch.tensor([[0.7], [-0.5]]).expand(tower.composition.shape))
    model = peft.PeftModel.from_pretrained(clip(folder), tmp_path / "first", "first")
    model.load_adapter(tmp_path / "second", "second")
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            module.set_scale("first", 0.7)
            module.set_scale("second", -0.5)
    model.base_model.set_adapter(["first", "second"])
    torch.testing.assert_close(tower.features(IMAGES), projected(model), atol=1e-5, rtol=1e-5)


def test_the_gradient_of_a_coefficient_is_that_of_the_scale_of_peft(folder: Path, tmp_path: Path):
    """d/dc of the loss at coefficient c, by central differences of PEFT's own forward pass."""
    adapt(clip(folder), tmp_path / "adapter")
    run(folder, tmp_path / "adapter", tmp_path / "v.safetensors", Choice("visual"))
    tower = tower_of(folder, tmp_path / "v.safetensors")
    tower.load(torch.full(tower.composition.shape, 0.8))
    tower.backward(IMAGES, loss_of)
    found = tower.gradient().sum().item()  # all coefficients move together
    step = 1e-4
    above, below = (
        loss_of(projected(adapted(folder, tmp_path / "adapter", 0.8 + sign * step).double()))
        for sign in (1, -1)
    )
    assert found == pytest.approx((above - below).item() / (2 * step), rel=1e-3)
