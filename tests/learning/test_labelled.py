"""Several tasks at once: the losses of a plain loop, fair shares of a batch, rules that hold."""

from __future__ import annotations

import dataclasses
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from composing import compose
from hypothesis import given, settings
from hypothesis import strategies as st
from test_batches import HEAD, colours, folder, model, random, shown, shuffled, tower_of  # noqa: F401
from torch.func import functional_call

from atlas_cli.core.losses import Loss, ascent, cross_entropy, entropy, to_uniform, unlikelihood
from atlas_cli.core.optimizers import OptimizerConfig
from atlas_cli.datasets.dataset import Sample
from atlas_cli.datasets.pixels import Pixels
from atlas_cli.learning.add import combine
from atlas_cli.learning.baselines import search_tables
from atlas_cli.learning.batches import (
    LabelledData,
    LabelledObjective,
    TaskData,
    TaskScore,
    TrainingConfig,
    predict,
    score,
)
from atlas_cli.learning.loop import CoefficientTrainer
from atlas_cli.learning.negate import forget
from atlas_cli.learning.selection import Score, policy_for

OTHER = 10 * F.normalize(random((3, 32), 5), dim=-1)
QUICK = TrainingConfig(epochs=4, batch_size=8, min_steps=2, augment="none")


# One batch, one composition, as many heads as there are tasks ----------------------------------


def naive_loss(losses: list[Loss], logits: list[torch.Tensor], labels: list[torch.Tensor]):
    """The sum over tasks of the mean over images, written out."""
    total = 0.0
    for loss, rows, targets in zip(losses, logits, labels, strict=True):
        for row, target in zip(rows, targets, strict=True):
            total = total + loss(row[None], target[None]) / len(rows)
    return total


@pytest.mark.parametrize(
    "losses",
    [
        [cross_entropy, cross_entropy],
        [entropy, entropy],
        *([loss, cross_entropy] for loss in (ascent, unlikelihood, to_uniform)),
    ],
)
@pytest.mark.parametrize("parts", [1, 3])
def test_loss_and_gradient_are_those_of_a_loop_over_tasks(
    model,  # noqa: F811
    folder: Path,  # noqa: F811
    losses: list[Loss],
    parts: int,
):
    module, view = model
    tasks = [colours(folder, view, 2), colours(folder, view, 9)]
    heads = [HEAD, OTHER]
    streams = [
        TaskData(pixels, head, loss, 0.5)
        for pixels, head, loss in zip(tasks, heads, losses, strict=True)
    ]
    training = dataclasses.replace(QUICK, accumulate=parts)
    problem = LabelledData(streams, [range(6), range(27)], training)
    tower = tower_of(module)
    table = 0.1 * random(tower.composition.shape, 1)
    tower.load(table)
    found = 0.0
    for some, loss_of in problem.batches(0):
        found += tower.backward(some, loss_of).item()
    gradient = tower.gradient()

    every = [pixels.fixed(range(len(pixels.dataset.samples))) for pixels in tasks]
    leaf = table.clone().requires_grad_()
    composed = compose(tower.composition, leaf)
    parameters = {name.removeprefix("visual."): t for name, t in composed.items()}
    logits, labels = [], []
    for task, (known, head) in enumerate(zip(every, heads, strict=True)):
        places = sorted_by_task(problem, task)
        features = functional_call(module, parameters, (known[places],))
        logits.append(F.normalize(features, dim=-1) @ head.T)
        labels.append(tasks[task].labels[places])
    wanted = naive_loss(losses, logits, labels)
    (slope,) = torch.autograd.grad(wanted, leaf)
    assert found == pytest.approx(wanted.item(), rel=1e-5)
    assert (gradient - slope).norm() / slope.norm() < 1e-5


def sorted_by_task(problem: LabelledData, task: int) -> list[int]:
    """The images of the first step, as the task's own sampler deals them."""
    return problem._samplers[task].batch(0, 0)


def test_entropy_looks_at_no_label(model, folder: Path):  # noqa: F811
    pixels = colours(folder, model[1], 4)
    features, losses = random((8, 32), 3), []
    for some in (pixels, shuffled(pixels, 1)):
        ((_, loss_of),) = LabelledData([TaskData(some, HEAD, entropy)], [range(12)], QUICK).batches(
            0
        )
        losses.append(loss_of(features).item())
    assert losses[0] == losses[1]


@pytest.mark.parametrize(("first", "second"), [(2, 9), (9, 2), (4, 4), (1, 9)])
def test_streams_of_any_length_come_equally_often_in_every_batch(
    model,  # noqa: F811
    folder: Path,  # noqa: F811
    first: int,
    second: int,
):
    """A target larger than the control, and the other way round: the shorter one comes again."""
    tasks = [colours(folder, model[1], first), colours(folder, model[1], second)]
    streams = [TaskData(pixels, HEAD, share=0.5) for pixels in tasks]
    indices = [range(3 * first), range(3 * second)]
    problem = LabelledData(streams, indices, dataclasses.replace(QUICK, min_steps=1))
    assert problem.epoch_steps == max(-(-3 * first // 4), -(-3 * second // 4))
    for task, count in enumerate((first, second)):
        hands = [problem._samplers[task].batch(0, step) for step in range(problem.epoch_steps)]
        counts = Counter(index for hand in hands for index in hand)
        assert set(counts) == set(range(3 * count))
        assert max(counts.values()) - min(counts.values()) <= 1
        assert all(len(hand) == 4 for hand in hands[:-1])
        assert hands[-1]


def test_one_task_alone_is_few_shot_learning(model, folder: Path):  # noqa: F811
    pixels = colours(folder, model[1], 4)
    streams = [TaskData(pixels, HEAD)]
    problem = LabelledData(streams, [range(12)], QUICK)
    assert sum(len(shown(problem, pixels, step)) for step in range(problem.epoch_steps)) == 16


def test_more_tasks_than_images_in_a_batch_give_one_image_each(model, folder: Path):  # noqa: F811
    pixels = colours(folder, model[1], 2)
    streams = [TaskData(pixels, HEAD, share=0.1) for _ in range(10)]
    training = dataclasses.replace(QUICK, batch_size=4)
    ((images, _),) = LabelledData(streams, [range(6)] * 10, training).batches(0)
    assert len(images) == 10


# The rules of choosing -------------------------------------------------------------------------

accuracies = st.floats(0, 1)


@given(st.lists(accuracies, min_size=4, max_size=4), accuracies, accuracies, st.floats(0.01, 1.5))
def test_forgetting_is_valid_only_if_the_control_holds_and_the_targets_fall(
    targets: list[float], control: float, zero_shot: float, keep: float
):
    before = [TaskScore(a, 0.0) for a in (*targets[:2], zero_shot)]
    found = forget(keep, [TaskScore(a, 0.0) for a in (*targets[2:], control)], before)
    lower = sum(targets[2:]) / 2 < sum(targets[:2]) / 2
    assert found.valid == (control >= keep * zero_shot and lower)
    assert found.values == {"target": sum(targets[2:]) / 2, "control": control}


def test_the_lowest_target_wins_and_then_the_highest_control():
    zero_shot = [TaskScore(0.8, 0.0), TaskScore(0.9, 0.0)]

    def check(target: float, control: float) -> Score:
        return forget(0.95, [TaskScore(target, 0.0), TaskScore(control, 0.0)], zero_shot)

    assert check(0.1, 0.9) > check(0.2, 0.9)
    assert check(0.1, 0.95) > check(0.1, 0.9)
    assert check(0.7, 0.9) > check(0.0, 0.5)  # which breaks the rule


def test_combining_is_judged_relative_to_each_own_model():
    individual = [TaskScore(0.5, 0.0), TaskScore(1.0, 0.0)]
    found = combine([None, None], [TaskScore(0.25, -1.0), TaskScore(0.5, -2.0)], individual)
    assert found.values == {"accuracy": 0.375, "normalised": 0.5}
    given_one = combine([0.25, None], [TaskScore(0.25, -1.0), TaskScore(0.5, -2.0)], individual)
    assert given_one.values["normalised"] == 0.75


def negation(
    tower, target: Pixels, control: Pixels, keep: float, training: TrainingConfig
) -> LabelledObjective:
    zero = torch.zeros(tower.composition.shape)
    streams = (
        TaskData(target, HEAD, unlikelihood, 0.5),
        TaskData(control, OTHER, share=0.5),
    )
    return LabelledObjective(
        tower, streams, training, partial(forget, keep), zero, references=(zero, zero)
    )


@settings(max_examples=12)
@given(
    seed=st.integers(0, 999),
    rate=st.floats(0.01, 2.0),
    keep=st.floats(0.3, 1.2),
    counts=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    select=st.sampled_from(["same", "last"]),
)
def test_whatever_is_chosen_keeps_the_control_on_the_images_that_judge(
    model,  # noqa: F811
    folder: Path,  # noqa: F811
    seed: int,
    rate: float,
    keep: float,
    counts: tuple[int, int],
    select: str,
):
    target, control = (colours(folder, model[1], count) for count in counts)
    training = dataclasses.replace(
        QUICK, epochs=2, seed=seed, optimizer_config=OptimizerConfig(rate=rate)
    )
    objective = negation(tower_of(model[0]), target, control, keep, training)
    trainer = CoefficientTrainer(objective, policy_for(select, [target, control], seed))
    for checkpoint in trainer.learn(trainer.begin()):
        selection = trainer.select(checkpoint)
        if selection.improved:
            objective.model.load(selection.coefficients)
            after = score(objective.model, control, range(3 * counts[1]), OTHER)
            lower = score(objective.model, target, range(3 * counts[0]), HEAD)
            before = objective.reference(trainer.policy.folds[0])
            assert after.accuracy >= keep * before[1].accuracy
            assert lower.accuracy < before[0].accuracy
        else:
            assert not selection.coefficients.any()


def test_a_search_that_finds_nothing_leaves_zero(model, folder: Path):  # noqa: F811
    target = colours(folder, model[1], 2)
    objective = negation(tower_of(model[0]), target, target, 5.0, QUICK)
    (fold,) = policy_for("same", [target, target], 0).folds
    tables = (torch.full_like(objective.start, -scale / 4) for scale in range(1, 5))
    selection = search_tables(objective, fold, tables)
    assert not selection.improved
    assert selection.after is selection.before


def as_it_sees(tower, pixels: Pixels, head: torch.Tensor) -> Pixels:
    """The images with the classes that zero-shot gives them."""
    tower.load(torch.zeros(tower.composition.shape))
    samples = pixels.dataset.samples
    labels = predict(tower, pixels, range(len(samples)), head).argmax(dim=1).tolist()
    named = tuple(Sample(s.key, label) for s, label in zip(samples, labels, strict=True))
    return Pixels(dataclasses.replace(pixels.dataset, samples=named), pixels.view, 2**30)


def test_where_no_epoch_keeps_the_control_a_smaller_step_in_the_same_direction_is_tried(
    model,  # noqa: F811
    folder: Path,  # noqa: F811
):
    """With so high a rate the only epoch ends far away."""
    tower = tower_of(model[0])
    target = as_it_sees(tower, colours(folder, model[1], 9), HEAD)
    control = as_it_sees(tower, colours(folder, model[1], 9), OTHER)
    training = dataclasses.replace(QUICK, epochs=1, optimizer_config=OptimizerConfig(rate=30.0))
    policy = policy_for("same", [target, control], 0)
    plain = negation(tower, target, control, 0.9, training)
    shares = (0.5, *(0.2 * 0.8**power for power in range(30)))
    chosen = []
    for objective in (plain, dataclasses.replace(plain, backtrack=shares)):
        trainer = CoefficientTrainer(objective, policy)
        *_, checkpoint = trainer.learn(trainer.begin())
        chosen.append(trainer.select(checkpoint))
    without, retreated = chosen
    assert not without.improved
    assert retreated.improved
    assert retreated.after == plain.judge(policy.folds[0], retreated.coefficients)
    assert retreated.after.valid
