"""Learning without labels: what is trusted, what has a gradient, and what SAR's steps are."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from composing import compose
from conftest import HALF, TINY_CONFIG
from PIL import Image

from atlas_cli.core.compose import Composition, by_block, stack_blocks
from atlas_cli.core.losses import sharpen
from atlas_cli.core.optimizers import RADIUS, OptimizerConfig
from atlas_cli.core.storage import Dense
from atlas_cli.datasets.dataset import open_dataset
from atlas_cli.datasets.pixels import Pixels, View, view_of
from atlas_cli.errors import UsageError
from atlas_cli.learning.batches import TrainingConfig
from atlas_cli.learning.loop import Checkpoint, CoefficientTrainer
from atlas_cli.learning.selection import BestEpoch, Fold, Scoring, Selection
from atlas_cli.learning.tta import decision
from atlas_cli.learning.unlabelled import SelfTraining, UnlabelledConfig, UnlabelledObjective
from atlas_cli.models.clip import build, logits_of
from atlas_cli.models.composed import ComposedModel, LayerNormModel, norm_names
from atlas_cli.models.folders import Blueprint

IMAGES, CLASSES = 24, 3
QUICK = TrainingConfig(
    epochs=3, batch_size=8, min_steps=1, augment="mild", optimizer_config=OptimizerConfig(rate=0.05)
)
POLICY = BestEpoch(Fold("all", ((),), ((),), Scoring.EVERY_EPOCH))


def random(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


HEAD = 10 * torch.nn.functional.normalize(random((CLASSES, 32), 4), dim=-1)


@pytest.fixture(scope="module")
def model() -> tuple[torch.nn.Module, View]:
    torch.manual_seed(0)
    module, preprocess = build(Blueprint(TINY_CONFIG, HALF))
    return module.visual.eval().requires_grad_(False), view_of(preprocess)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Noise around three colours, in one folder."""
    folder, noise = tmp_path_factory.mktemp("colours"), np.random.default_rng(0)
    for number in range(IMAGES):
        colour = np.eye(3)[number % 3] * 150
        pixels = colour + noise.integers(0, 100, (32, 32, 3))
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number:02d}.png")
    return folder


def tower_of(module: torch.nn.Module) -> ComposedModel:
    """The module with two random vectors."""
    base = {f"visual.{name}": tensor for name, tensor in module.named_parameters()}
    stacks = {
        name: stack_blocks(
            {row: Dense(0.3 * tensor.std() * random(tensor.shape, n + 99 * row)) for row in (0, 1)}
        )
        for n, (name, tensor) in enumerate(base.items())
    }
    shapes = {name: tuple(tensor.shape) for name, tensor in base.items()}
    return ComposedModel(module, Composition(base, stacks, by_block(shapes), 2), prefix="visual.")


@pytest.fixture
def adaptation(model, folder: Path) -> UnlabelledObjective:
    module, view = model
    tower = tower_of(module)
    pixels = Pixels(open_dataset(str(folder)).unlabelled(), view, 2**30)
    start = torch.zeros(tower.composition.shape)
    prior = torch.full((CLASSES,), 1 / CLASSES)
    return UnlabelledObjective(tower, pixels, HEAD, prior, QUICK, UnlabelledConfig(), start)


def aiming(
    adaptation: UnlabelledObjective, objective: str, **changes: object
) -> UnlabelledObjective:
    config = dataclasses.replace(adaptation.config, objective=objective, **changes)
    return dataclasses.replace(adaptation, config=config, _known=[], _statistics={})


def run(adaptation: UnlabelledObjective) -> tuple[Selection, Checkpoint]:
    trainer = CoefficientTrainer(adaptation, POLICY)
    *_, checkpoint = trainer.learn(trainer.begin())
    return trainer.select(checkpoint), checkpoint


# UFM ------------------------------------------------------------------------------------------


def test_a_quarter_of_a_batch_is_trusted_and_the_rest_are_those_sure_enough(adaptation):
    found = aiming(adaptation, "ufm", threshold=(1.0, 1.0), per_class=2)
    problem = found.training_data()
    found.model.load(found.start)
    (images, _), *others = problem.batches(0)
    assert not others
    assert len(images) == QUICK.batch_size // 4  # nothing is surer than certain
    everyone = aiming(adaptation, "ufm", threshold=(0.0, 0.0)).training_data()
    ((images, _),) = everyone.batches(0)
    assert len(images) == QUICK.batch_size


def test_what_is_trusted_is_found_anew_every_epoch(adaptation):
    problem = SelfTraining(aiming(adaptation, "ufm", per_class=2))
    tower = adaptation.model
    tower.load(adaptation.start)
    list(problem.batches(0))
    first = problem.trusted
    assert 1 <= len(first.images) <= 2 * CLASSES
    tower.load(random(adaptation.start.shape, 8))
    list(problem.batches(1))
    assert torch.equal(problem.trusted.images, first.images)
    list(problem.batches(problem.epoch_steps))
    assert not torch.equal(problem.trusted.images, first.images)
    rows = adaptation.probabilities()
    assert torch.equal(problem.trusted.labels, rows[problem.trusted.images].argmax(dim=1))


def test_the_weak_view_has_no_gradient(adaptation, model):
    """Without crops both views are one image, so all of it can be written out for autograd."""
    plain = dataclasses.replace(adaptation.training, augment="none")
    found = dataclasses.replace(adaptation, training=plain)
    problem = SelfTraining(aiming(found, "ufm", threshold=(0.0, 0.0)))
    table = 0.1 * random(adaptation.start.shape, 3)
    tower = adaptation.model
    tower.load(table)
    ((images, loss_of),) = problem.batches(0)
    tower.backward(images, loss_of)
    ours = tower.gradient()
    trusted = QUICK.batch_size // 4
    chosen = problem.trusted
    labels = dict(zip(chosen.images.tolist(), chosen.labels.tolist(), strict=True))

    def written_out(constant: bool) -> torch.Tensor:
        coefficients = table.clone().requires_grad_()
        tensors = compose(tower.composition, coefficients)
        own = {name.removeprefix("visual."): tensor for name, tensor in tensors.items()}
        features = torch.func.functional_call(model[0], own, (images,))
        logits = logits_of(features, HEAD)
        weak = logits.detach() if constant else logits
        targets = sharpen(weak[:-trusted].softmax(dim=1), found.config.power)
        sure = F.one_hot(torch.tensor([labels_of(image) for image in images[-trusted:]]), CLASSES)
        wanted = torch.cat([targets, sure.to(targets)])
        loss = -(wanted * logits.log_softmax(dim=1)).sum() / len(images)
        return torch.autograd.grad(loss, coefficients)[0]

    def labels_of(image: torch.Tensor) -> int:
        return next(
            label for n, label in labels.items() if torch.equal(found.pixels.fixed([n])[0], image)
        )

    torch.testing.assert_close(ours.float(), written_out(True), rtol=1e-4, atol=1e-6)
    assert (ours.float() - written_out(False)).norm() > 0.1 * ours.norm()


@pytest.mark.parametrize("objective", ["ufm", "entropy", "balanced-entropy", "sar", "simclr"])
def test_a_run_that_is_stopped_anywhere_goes_on_to_the_same_bits(adaptation, objective: str):
    found = aiming(adaptation, objective)
    if objective == "sar":
        optimizer_config = dataclasses.replace(QUICK.optimizer_config, sharp=True, decay=0.0)
        found = dataclasses.replace(
            found, training=dataclasses.replace(QUICK, optimizer_config=optimizer_config)
        )
    whole, _ = run(found)
    trainer = CoefficientTrainer(found, POLICY)
    moments = list(trainer.learn(trainer.begin()))
    for checkpoint in moments[:-1]:
        again = dataclasses.replace(found, _known=[], _statistics={})
        trainer = CoefficientTrainer(again, POLICY)
        *_, last = trainer.learn(checkpoint)
        assert torch.equal(trainer.select(last).coefficients, whole.coefficients)
        assert last.scores == moments[-1].scores


@pytest.mark.parametrize("objective", ["ufm", "entropy", "balanced-entropy", "sar", "simclr"])
def test_a_loss_is_a_number_even_if_nothing_passes(adaptation, objective: str):
    for count in (1, 2):
        dataset = adaptation.pixels.dataset
        few = dataclasses.replace(dataset, samples=dataset.samples[:count])
        pixels = Pixels(few, adaptation.pixels.view, 2**30)
        found = aiming(dataclasses.replace(adaptation, pixels=pixels), objective, threshold=(1, 1))
        selection, checkpoint = run(found)
        assert math.isfinite(checkpoint.step.loss)
        assert selection.coefficients.isfinite().all()


def test_batches_in_parts_have_the_gradient_of_whole_ones(adaptation):
    gradients = []
    for parts in (1, 3):
        found = aiming(adaptation, "ufm", threshold=(0.0, 0.0))
        found = dataclasses.replace(found, training=dataclasses.replace(QUICK, accumulate=parts))
        problem = found.training_data()
        found.model.load(found.start)
        found_parts = list(problem.batches(0))
        assert len(found_parts) == parts
        for images, loss_of in found_parts:
            found.model.backward(images, loss_of)
        gradients.append(found.model.gradient())
    # Noise is drawn part by part, so the views differ; what is learned is nearly the same.
    assert torch.nn.functional.cosine_similarity(*map(torch.flatten, gradients), dim=0) > 0.5


# Guarding -------------------------------------------------------------------------------------


def test_if_an_objection_is_raised_against_every_epoch_all_coefficients_are_zero(adaptation):
    slow = dataclasses.replace(QUICK, optimizer_config=OptimizerConfig(rate=1e-9))
    selection, _ = run(dataclasses.replace(adaptation, training=slow))
    assert not selection.improved
    kept = "zero-shot is kept, all coefficients are 0: adapted predictions are not clearly better"
    assert decision(selection, guarded=True).startswith(kept)


def test_without_the_guard_the_last_step_is_kept(adaptation):
    slow = dataclasses.replace(QUICK, optimizer_config=OptimizerConfig(rate=1e-6))
    blind = dataclasses.replace(adaptation, training=slow, guarded=False)
    selection, _ = run(blind)
    assert selection.improved
    assert decision(selection, guarded=False) == (
        "the last step is kept, unchecked, since --select is last"
    )


# SAR ------------------------------------------------------------------------------------------


def sar_by_hand(
    module: torch.nn.Module, batches: list[torch.Tensor], rate: float, limit: float
) -> torch.Tensor:
    """The published algorithm with plain torch: the LayerNorms' changes after some steps."""
    names = norm_names(module)
    weights = {name: module.get_parameter(name).clone() for name in names}
    start = {name: tensor.clone() for name, tensor in weights.items()}
    buffers: dict[str, torch.Tensor] = {}
    mean = None

    def gradients(images: torch.Tensor, at: dict, chosen: torch.Tensor | None):
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in at.items()}
        features = torch.func.functional_call(module, leaves, (images,))
        rows = logits_of(features, HEAD).softmax(dim=1)
        entropy = -(rows * rows.log()).sum(dim=1)
        reliable = entropy < limit if chosen is None else (entropy < limit) & chosen
        loss = entropy[reliable].mean()
        found = torch.autograd.grad(loss, list(leaves.values()))
        return dict(zip(at, found, strict=True)), reliable, entropy.detach()

    for images in batches:
        first, chosen, _ = gradients(images, weights, None)
        norm = torch.cat([g.flatten() for g in first.values()]).norm()
        above = {name: weights[name] + RADIUS * first[name] / (norm + 1e-12) for name in names}
        second, _, entropy = gradients(images, above, chosen)
        value = entropy[chosen].mean().item()
        mean = value if mean is None else 0.9 * mean + 0.1 * value
        for name in names:
            buffers[name] = 0.9 * buffers.get(name, 0) + second[name]
            weights[name] = weights[name] - rate * buffers[name]
        if mean < 0.2:
            weights, buffers, mean = {n: t.clone() for n, t in start.items()}, {}, None
    return torch.cat([(weights[name] - start[name]).flatten() for name in names])


@pytest.mark.parametrize("sureness", [4.0, 30.0])
def test_sars_steps_are_those_of_the_published_algorithm(model, folder, sureness, monkeypatch):
    """Three steps on the LayerNorms of a small network; a sure head makes it begin anew."""
    module, view = model
    head = sureness / 10 * HEAD
    monkeypatch.setitem(globals(), "HEAD", head)
    pixels = Pixels(open_dataset(str(folder)).unlabelled(), view, 2**30)
    tower = LayerNormModel(module, prefix="visual.")
    optimizer_config = OptimizerConfig(rate=0.01, decay=0.0, schedule="constant", sharp=True)
    training = TrainingConfig(
        epochs=1, batch_size=8, min_steps=1, augment="mild", optimizer_config=optimizer_config
    )
    prior = torch.full((CLASSES,), 1 / CLASSES)
    start = torch.zeros(tower.composition.shape)
    found = UnlabelledObjective(
        tower, pixels, head, prior, training, UnlabelledConfig("sar"), start, guarded=False
    )
    problem = found.training_data()
    assert problem.steps == 3
    batches = [pixels.fixed(problem._sampler.batch(0, step)) for step in range(3)]
    wanted = sar_by_hand(module, batches, 0.01, 0.4 * math.log(CLASSES))
    trainer = CoefficientTrainer(found, POLICY)
    states = [m.state for m in trainer.learn(trainer.begin()) if m.state is not None]
    selection, checkpoint = run(found)
    assert checkpoint.step.number == 3
    last = selection.coefficients.flatten()
    torch.testing.assert_close(last, wanted, rtol=1e-3, atol=1e-7)
    assert len(states) == 2


def test_tuned_norms_are_the_only_tensors_that_change(model):
    module, _ = model
    tower = LayerNormModel(module, prefix="visual.")
    loaded = tower.load(torch.ones(tower.composition.shape))
    assert set(loaded) == {f"visual.{name}" for name in norm_names(module)}
    for name, tensor in loaded.items():
        assert torch.equal(tensor, module.get_parameter(name.removeprefix("visual.")) + 1)


# Objectives -----------------------------------------------------------------------------------


def test_an_objective_that_nobody_knows_is_refused_with_the_nearest_word(adaptation):
    """It does not train something else."""
    for word, hint in (("entrop", "; did you mean 'entropy'?"), ("labels", ""), ("", "")):
        with pytest.raises(UsageError, match=re.escape(f"unknown objective '{word}' of tta{hint}")):
            aiming(adaptation, word).training_data()
