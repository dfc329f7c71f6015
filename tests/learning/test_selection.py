"""No image both teaches and judges, and what is held out has images of every class."""

from __future__ import annotations

from collections import Counter

import pytest

from atlas_cli.datasets.dataset import Dataset, Sample
from atlas_cli.datasets.pixels import Pixels
from atlas_cli.errors import DataError
from atlas_cli.learning.selection import BestEpoch, Fold, KFold, Last, Scoring, policy_for
from atlas_cli.learning.splits import hold_out


def pixels_of(*counts: int) -> Pixels:
    """So many images of every class; one number stands for three classes. None is looked at."""
    counts = counts if len(counts) > 1 else counts * 3
    samples = tuple(
        Sample(f"{label}/{number}", label)
        for label, count in enumerate(counts)
        for number in range(count)
    )
    names = tuple(f"class {label}" for label in range(len(counts)))
    return Pixels(Dataset("colours", "train", names, ("a {}",), samples), None, 0)


def folds_of(select: str, pixels: Pixels, seed: int = 0) -> tuple[Fold, ...]:
    return policy_for(select, [pixels], seed).folds


# Policies -------------------------------------------------------------------------------------


@pytest.mark.parametrize("select", ["holdout", "kfold"])
@pytest.mark.parametrize("count", [2, 3, 4, 9])
def test_no_image_both_teaches_and_judges(select: str, count: int):
    pixels = pixels_of(count)
    for fold in folds_of(select, pixels, seed=0):
        (train,) = fold.train
        assert fold.scored_on is None or not set(train) & set(fold.scored_on[0])
        assert {pixels.labels[i].item() for i in train} == {0, 1, 2}


def test_last_learns_from_all_and_looks_once_at_the_same_images():
    policy = policy_for("last", [pixels_of(2)], 0)
    assert isinstance(policy, Last)
    assert policy.fold.train == policy.fold.scored_on == (tuple(range(6)),)
    assert policy.fold.scoring is Scoring.AT_END


def test_val_learns_from_all_images_and_other_images_judge():
    policy = policy_for("val:elsewhere", [pixels_of(2)], 0)
    assert isinstance(policy, BestEpoch)
    assert policy.fold.train == (tuple(range(6)),)
    assert policy.fold.scored_on is None
    assert policy.fold.scoring is Scoring.EVERY_EPOCH


def test_a_word_that_names_no_policy_is_refused():
    for word in ("blind", "kflod", ""):
        with pytest.raises(ValueError, match="no policy is called"):
            policy_for(word, [pixels_of(2)], 0)


@pytest.mark.parametrize(("count", "held"), [(2, 1), (4, 1), (7, 1), (8, 2), (9, 2)])
def test_holdout_keeps_a_quarter_of_every_class_and_at_least_one(count: int, held: int):
    pixels = pixels_of(count)
    (fold,) = folds_of("holdout", pixels, 0)
    assert Counter(pixels.labels[list(fold.scored_on[0])].tolist()) == {0: held, 1: held, 2: held}
    assert sorted(fold.train[0] + fold.scored_on[0]) == list(range(3 * count))


@pytest.mark.parametrize(("count", "folds"), [(2, 2), (3, 3), (4, 4), (9, 4)])
def test_folds_judge_every_image_once_and_the_last_stage_learns_from_all(count: int, folds: int):
    policy = policy_for("kfold", [pixels_of(count)], 0)
    assert isinstance(policy, KFold)
    plan = policy.folds
    assert [fold.name for fold in plan] == [f"fold {n + 1}" for n in range(folds)] + ["all"]
    judges = [index for fold in plan[:-1] for index in fold.scored_on[0]]
    assert sorted(judges) == list(range(3 * count))
    assert all(sorted(s.train[0] + s.scored_on[0]) == list(range(3 * count)) for s in plan[:-1])
    assert plan[-1].train == (tuple(range(3 * count)),)
    assert plan[-1].scored_on is None
    assert plan[-1].scoring is Scoring.NEVER


@pytest.mark.parametrize("select", ["holdout", "kfold"])
def test_a_class_of_one_image_cannot_be_divided(select: str):
    with pytest.raises(DataError, match=rf"--select {select} needs two images of every class"):
        folds_of(select, pixels_of(1), 0)


def test_the_seed_decides_who_judges():
    pixels = pixels_of(9)
    found = {folds_of("holdout", pixels, seed)[0].scored_on for seed in (0, 0, 1, 2)}
    assert len(found) == 3


# Fine-tuning ----------------------------------------------------------------------------------


def test_a_tenth_of_every_class_is_held_out_and_one_at_least():
    many = pixels_of(100, 50, 7)
    held = hold_out(many, 0)
    assert Counter(many.labels[list(held)].tolist()) == {0: 10, 1: 5, 2: 1}
    assert len(hold_out(pixels_of(60_000, 40_000), 0)) == 5000
    assert hold_out(pixels_of(1), 0) == ()
