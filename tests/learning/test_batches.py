"""Learning shows every image equally often and never judges on what it learned from."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import HALF, TINY_CONFIG
from PIL import Image

from atlas_cli.core.compose import Composition, by_block, stack_blocks
from atlas_cli.core.optimizers import OptimizerConfig
from atlas_cli.core.storage import Dense
from atlas_cli.datasets.dataset import Sample, open_dataset
from atlas_cli.datasets.pixels import Pixels, View, view_of
from atlas_cli.learning.batches import (
    LabelledData,
    LabelledObjective,
    TaskData,
    TaskScore,
    TrainingConfig,
    predict,
    score,
)
from atlas_cli.learning.fit import recognise
from atlas_cli.learning.loop import Checkpoint, CoefficientTrainer
from atlas_cli.learning.selection import (
    Fold,
    Selection,
    policy_for,
)
from atlas_cli.models.clip import build
from atlas_cli.models.composed import ComposedModel
from atlas_cli.models.folders import Blueprint

QUICK = TrainingConfig(epochs=3, batch_size=6, min_steps=2, augment="none")


def random(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def model() -> tuple[torch.nn.Module, View]:
    torch.manual_seed(0)
    module, preprocess = build(Blueprint(TINY_CONFIG, HALF))
    return module.visual.eval().requires_grad_(False), view_of(preprocess)


def tower_of(module: torch.nn.Module, size: float = 1.0) -> ComposedModel:
    """The module with two random vectors, as large as its own weights times `size`."""
    base = {f"visual.{name}": tensor for name, tensor in module.named_parameters()}
    stacks = {
        name: stack_blocks(
            {
                row: Dense(size * (0.01 + tensor.std()) * random(tensor.shape, n + 99 * row))
                for row in (0, 1)
            }
        )
        for n, (name, tensor) in enumerate(base.items())
    }
    shapes = {name: tuple(tensor.shape) for name, tensor in base.items()}
    return ComposedModel(module, Composition(base, stacks, by_block(shapes), 2), prefix="visual.")


HEAD = 10 * torch.nn.functional.normalize(random((3, 32), 4), dim=-1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three colours with noise, nine images each."""
    folder, noise = tmp_path_factory.mktemp("colours"), np.random.default_rng(0)
    for name, colour in (("blue", (0, 0, 200)), ("green", (0, 200, 0)), ("red", (200, 0, 0))):
        (folder / name).mkdir()
        for number in range(9):
            pixels = np.array(colour) + noise.integers(0, 56, (32, 32, 3))
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{number}.png")
    return folder


def colours(folder: Path, view: View, count: int = 9) -> Pixels:
    dataset = open_dataset(str(folder))
    some = tuple(s for s in dataset.samples if int(Path(s.key).stem) < count)
    return Pixels(dataclasses.replace(dataset, samples=some), view, 2**30)


def shuffled(pixels: Pixels, seed: int) -> Pixels:
    """The same images with labels that mean nothing."""
    dataset = pixels.dataset
    places = torch.randperm(len(dataset.samples), generator=torch.Generator().manual_seed(seed))
    labels = [dataset.samples[place].label for place in places.tolist()]
    samples = tuple(Sample(s.key, n) for s, n in zip(dataset.samples, labels, strict=True))
    return Pixels(dataclasses.replace(dataset, samples=samples), pixels.view, 2**30)


def objective_of(
    tower: ComposedModel,
    pixels: Pixels,
    head: torch.Tensor,
    training: TrainingConfig,
    *judges: Pixels,
) -> LabelledObjective:
    """What `fit` learns from."""
    start = torch.zeros(tower.composition.shape)
    tasks = (TaskData(pixels, head),)
    return LabelledObjective(tower, tasks, training, recognise, start, judges=judges)


def only(objective: LabelledObjective) -> Pixels:
    return objective.tasks[0].pixels


def one_task(
    pixels: Pixels, indices: Sequence[int], head: torch.Tensor, training: TrainingConfig
) -> LabelledData:
    return LabelledData([TaskData(pixels, head)], [indices], training)


def folds_of(select: str, pixels: Pixels, seed: int = 0) -> tuple[Fold, ...]:
    return policy_for(select, [pixels], seed).folds


def trainer_of(objective: LabelledObjective, select: str) -> CoefficientTrainer:
    policy = policy_for(select, [only(objective)], objective.training.seed)
    return CoefficientTrainer(objective, policy)


def run(objective: LabelledObjective, select: str) -> tuple[Selection, Checkpoint]:
    trainer = trainer_of(objective, select)
    checkpoint = trainer.begin()
    for found in trainer.learn(checkpoint):
        checkpoint = found
    return trainer.select(checkpoint), checkpoint


@pytest.fixture
def objective(model, folder: Path) -> LabelledObjective:
    module, view = model
    return objective_of(tower_of(module), colours(folder, view, 4), HEAD, QUICK)


# The order of images --------------------------------------------------------------------------


def shown(problem: LabelledData, pixels: Pixels, step: int) -> list[int]:
    """Which images a step shows, told by their pixels."""
    every = pixels.fixed(range(len(pixels.dataset.samples)))
    found = []
    for images, _ in problem.batches(step):
        for image in images:
            (index,) = [n for n, known in enumerate(every) if torch.equal(image, known)]
            found.append(index)
    return found


@pytest.mark.parametrize(
    ("images", "batch", "min_steps", "steps"),
    [
        (12, 4, 1, 3),  # one pass
        (12, 4, 6, 6),  # two passes, to have enough steps
        (12, 5, 1, 3),  # the last batch is smaller
        (12, 128, 2, 2),  # batches of more images than there are
    ],
)
def test_an_epoch_shows_every_image_equally_often_in_enough_steps(
    model, folder: Path, images: int, batch: int, min_steps: int, steps: int
):
    pixels = colours(folder, model[1], images // 3)
    training = TrainingConfig(1, batch, min_steps=min_steps, augment="none")
    problem = one_task(pixels, range(images), HEAD, training)
    assert (problem.epoch_steps, problem.steps) == (steps, steps)
    counts = Counter(index for step in range(steps) for index in shown(problem, pixels, step))
    assert len(counts) == images
    assert sum(counts.values()) == max(images, min_steps * batch)
    assert max(counts.values()) - min(counts.values()) <= 1


def test_every_epoch_has_an_order_of_its_own_and_the_seed_decides(model, folder: Path):
    pixels = colours(folder, model[1], 4)

    def order(seed: int, epoch: int) -> list[int]:
        training = TrainingConfig(2, 4, min_steps=1, augment="none", seed=seed)
        problem = one_task(pixels, range(12), HEAD, training)
        return [i for step in range(3) for i in shown(problem, pixels, 3 * epoch + step)]

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


def test_a_step_shows_the_same_crops_whatever_came_before(model, folder: Path):
    pixels = colours(folder, model[1], 4)
    fresh, used = (one_task(pixels, range(12), HEAD, TrainingConfig(2, 6)) for _ in range(2))
    for step in (0, 5, 3):
        list(used.batches(step))
    ((wanted, _),) = fresh.batches(7)
    ((found, _),) = used.batches(7)
    assert torch.equal(found, wanted)


def test_every_step_shows_other_crops_of_the_same_image(model, folder: Path):
    pixels = colours(folder, model[1], 1)
    problem = one_task(pixels, [0], HEAD, TrainingConfig(3, 1, min_steps=1, augment="crop"))
    crops = [images for step in range(3) for images, _ in problem.batches(step)]
    assert len(crops) == 3
    assert not torch.equal(crops[0], crops[1])
    assert not torch.equal(crops[1], crops[2])


@pytest.mark.parametrize("parts", [1, 2, 4, 5, 6, 100])
def test_a_batch_in_parts_has_the_images_and_the_loss_of_the_whole(model, folder: Path, parts: int):
    pixels = colours(folder, model[1], 4)
    training = TrainingConfig(1, 6, accumulate=parts, min_steps=1, augment="flip")
    whole = one_task(pixels, range(12), HEAD, dataclasses.replace(training, accumulate=1))
    split = one_task(pixels, range(12), HEAD, training)
    ((images, loss_of),) = whole.batches(0)
    features = random((6, 32), 1)
    pieces, loss, start = [], 0.0, 0
    for some, part_loss in split.batches(0):
        pieces.append(some)
        loss += part_loss(features[start : start + len(some)]).item()
        start += len(some)
    assert len(pieces) <= parts
    assert torch.cat(pieces).shape == images.shape
    assert loss == pytest.approx(loss_of(features).item(), rel=1e-6)
    assert split.accuracy() == whole.accuracy()


def test_the_loss_is_cross_entropy_and_the_accuracy_that_of_the_step(model, folder: Path):
    pixels = colours(folder, model[1], 1)
    problem = one_task(pixels, [0, 1, 2], HEAD, TrainingConfig(1, 3, min_steps=1, augment="none"))
    labels = pixels.labels[shown(problem, pixels, 0)]
    ((_, loss_of),) = problem.batches(0)
    features = HEAD[labels]  # where every image is exactly at its class
    logits = HEAD @ HEAD.T / 10
    wanted = -logits.log_softmax(dim=1).diagonal().mean().item()
    assert loss_of(features).item() == pytest.approx(wanted, rel=1e-5)
    assert problem.accuracy() == 1.0


# Checks and verdicts --------------------------------------------------------------------------


def test_a_check_is_the_accuracy_and_the_mean_logarithm_of_the_right_class(
    objective: LabelledObjective,
):
    objective.model.load(torch.zeros(objective.model.composition.shape))
    everything = range(12)
    logits = predict(objective.model, only(objective), everything, HEAD)
    labels = only(objective).labels
    found = score(objective.model, only(objective), everything, HEAD)
    assert found.accuracy == (logits.argmax(1) == labels).float().mean().item()
    gain = logits.double().log_softmax(1)[range(12), labels].mean().item()
    assert found.gain == pytest.approx(gain, rel=1e-12)


def test_checks_are_ordered_by_accuracy_first():
    assert TaskScore(0.5, -9.0) > TaskScore(0.4, -1.0)
    assert TaskScore(0.5, -1.0) > TaskScore(0.5, -2.0)
    assert max([TaskScore(0.5, -1.0), TaskScore(0.5, -1.0)]) == TaskScore(0.5, -1.0)


def test_logits_that_are_not_finite_classify_nothing(model, folder: Path):
    """The index of the largest of three NaNs is 0, and blue is class 0."""
    pixels = colours(folder, model[1], 2)
    tower = tower_of(model[0], size=math.inf)
    tower.load(torch.ones(tower.composition.shape))
    assert not predict(tower, pixels, range(6), HEAD).isfinite().any()
    found = score(tower, pixels, range(6), HEAD)
    assert found.accuracy == 0
    assert found < TaskScore(0.0, -1e30)


@pytest.mark.parametrize("select", ["last", "holdout", "kfold"])
def test_colours_are_learned_and_the_verdict_is_what_judging_again_gives(
    objective: LabelledObjective, select: str
):
    selection, _ = run(objective, select)
    assert selection.improved
    assert selection.after > selection.before
    assert selection.after.values["accuracy"] > 0.6
    if select != "kfold":
        (fold,) = folds_of(select, only(objective), 0)
        assert objective.judge(fold, selection.coefficients) == selection.after
        assert objective.judge(fold, torch.zeros_like(selection.coefficients)) == selection.before


@pytest.mark.parametrize("select", ["last", "holdout"])
@pytest.mark.parametrize("seed", range(4))
def test_with_labels_that_mean_nothing_the_verdict_is_never_below_zero_shot(
    model, folder: Path, select: str, seed: int
):
    pixels = shuffled(colours(folder, model[1], 4), seed)
    training = dataclasses.replace(QUICK, seed=seed, optimizer_config=OptimizerConfig(rate=0.5))
    objective = objective_of(tower_of(model[0]), pixels, HEAD, training)
    selection, _ = run(objective, select)
    (fold,) = folds_of(select, pixels, seed)
    zero = objective.judge(fold, torch.zeros_like(selection.coefficients))
    chosen = objective.judge(fold, selection.coefficients)
    assert selection.before == zero
    assert selection.after == chosen >= zero
    assert selection.improved == (chosen > zero)
    assert torch.isfinite(selection.coefficients).all()


def test_what_overflows_at_the_last_step_is_not_chosen(model, folder: Path):
    """One step from zero to where the tower gives NaN, which would be right for class 0."""
    pixels = colours(folder, model[1], 4)
    blue = tuple(Sample(sample.key, 0) for sample in pixels.dataset.samples)
    pixels = Pixels(dataclasses.replace(pixels.dataset, samples=blue), model[1], 2**30)
    head = HEAD.clone()
    training = TrainingConfig(epochs=1, batch_size=12, min_steps=1, augment="none")
    tower = tower_of(model[0], size=1e18)
    tower.load(torch.zeros(tower.composition.shape))
    logits = predict(tower, pixels, range(12), head)
    worst = logits.sum(0).argmin().item()
    head[[0, worst]] = head[[worst, 0]]  # class 0 is now the one that zero-shot never names
    selection, _ = run(objective_of(tower, pixels, head, training), "last")
    assert not selection.improved
    assert selection.after == selection.before


@pytest.mark.parametrize("select", ["last", "holdout", "kfold"])
def test_vectors_of_zeros_improve_nothing_and_get_zero_coefficients(
    model, folder: Path, select: str
):
    """Every check is that of zero-shot; with folds, no epoch at all is best."""
    objective = objective_of(tower_of(model[0], 0.0), colours(folder, model[1], 4), HEAD, QUICK)
    selection, checkpoint = run(objective, select)
    assert not selection.improved
    assert not selection.coefficients.any()
    assert selection.before == selection.after
    if select == "kfold":
        assert checkpoint.fold == 4  # the last stage took no step
        assert {len(scores) for scores in checkpoint.scores.values()} == {1 + QUICK.epochs}


def test_folds_choose_how_long_the_last_stage_learns(objective: LabelledObjective):
    trainer = trainer_of(objective, "kfold")
    moments = list(trainer.learn(trainer.begin()))
    checks = moments[-1].scores
    assert checks.keys() == {"fold 1", "fold 2", "fold 3", "fold 4"}
    means = [
        (
            sum(found[epoch].rank[0] for found in checks.values()) / 4,
            sum(found[epoch].rank[1] for found in checks.values()) / 4,
        )
        for epoch in range(1 + QUICK.epochs)
    ]
    best = means.index(max(means))
    data = objective.training_data(trainer.policy.folds[-1])
    assert len(moments) == 4 * data.steps + best * data.epoch_steps
    selection = trainer.select(moments[-1])
    assert selection.after.rank == pytest.approx(max(means))


def test_other_images_judge_after_every_epoch(model, folder: Path):
    pixels = colours(folder, model[1], 4)
    every = pixels.dataset
    rest = tuple(s for s in open_dataset(str(folder)).samples if int(Path(s.key).stem) >= 4)
    judges = Pixels(dataclasses.replace(every, samples=rest), model[1], 2**30)
    objective = objective_of(tower_of(model[0]), pixels, HEAD, QUICK, judges)
    selection, checkpoint = run(objective, "val:rest")
    assert len(checkpoint.scores["val"]) == 1 + QUICK.epochs
    objective.model.load(selection.coefficients)
    found = score(objective.model, judges, range(15), HEAD)
    assert (found.accuracy, found.gain) == selection.after.rank
    assert selection.after == max(checkpoint.scores["val"])


@pytest.mark.parametrize("select", ["last", "holdout", "kfold"])
def test_the_same_seed_comes_to_the_same_verdict(model, folder: Path, select: str):
    training = dataclasses.replace(QUICK, augment="flip")
    found = [
        run(objective_of(tower_of(model[0]), colours(folder, model[1], 4), HEAD, training), select)[
            0
        ]
        for _ in range(2)
    ]
    assert torch.equal(found[0].coefficients, found[1].coefficients)
    assert found[0].before == found[1].before
    assert found[0].after == found[1].after


def test_the_test_images_of_a_dataset_are_never_looked_at(model, folder: Path, tmp_path: Path):
    """The images that judge and teach are all that there need be on disk."""
    pixels = colours(folder, model[1], 2)
    used = {s.key for s in pixels.dataset.samples}
    for path in folder.rglob("*.png"):
        if str(path.relative_to(folder)) in used:
            target = tmp_path / path.relative_to(folder)
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(path.read_bytes())
    alone = Pixels(open_dataset(str(tmp_path)), model[1], 2**30)
    first, second = (
        run(objective_of(tower_of(model[0]), some, HEAD, QUICK), "holdout")[0]
        for some in (pixels, alone)
    )
    assert torch.equal(first.coefficients, second.coefficients)


# Stopping and going on ------------------------------------------------------------------------


@pytest.mark.parametrize("select", ["last", "holdout", "kfold"])
def test_going_on_from_any_moment_comes_to_the_same_bits(objective: LabelledObjective, select: str):
    training = dataclasses.replace(QUICK, augment="crop")
    objective = dataclasses.replace(objective, training=training)
    trainer = trainer_of(objective, select)
    moments = list(trainer.learn(trainer.begin()))
    wanted = trainer.select(moments[-1])
    for stop in (0, 1, len(moments) // 2, len(moments) - 2):
        rest = list(trainer.learn(moments[stop]))
        assert len(rest) == len(moments) - stop - 1
        found = trainer.select(rest[-1])
        assert torch.equal(found.coefficients, wanted.coefficients)
        assert (found.before, found.after) == (wanted.before, wanted.after)
        assert rest[-1].step == moments[-1].step


@pytest.mark.parametrize("select", ["last", "holdout", "kfold"])
def test_a_run_that_is_stopped_keeps_the_best_so_far(objective: LabelledObjective, select: str):
    trainer = trainer_of(objective, select)
    for checkpoint in trainer.learn(trainer.begin()):
        selection = trainer.select(checkpoint)
        assert selection.after >= selection.before
        if select != "kfold":
            assert (
                objective.judge(trainer.policy.folds[0], selection.coefficients) == selection.after
            )
