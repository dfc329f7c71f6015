"""What predictions tell without labels, and when it speaks against a model."""

from __future__ import annotations

import math

import pytest
import torch

from atlas_cli.core.losses import PredictionStatistics, objection, prediction_statistics

UNIFORM = torch.full((4,), 0.25)


def test_sure_predictions_of_all_classes_have_the_most_merit():
    found = prediction_statistics(torch.eye(4), torch.eye(4), UNIFORM)
    assert (found.agreement, found.entropy, found.information) == (1, 0, pytest.approx(1))
    assert found.imbalance == pytest.approx(0, abs=1e-6)


def test_predictions_of_one_class_have_no_merit_however_sure_they_are():
    one = torch.eye(4)[[2, 2, 2]]
    found = prediction_statistics(one, one, UNIFORM)
    assert found.imbalance == pytest.approx(math.log(4))
    assert found.information == pytest.approx(0, abs=1e-6)


def test_predictions_that_say_nothing_have_no_merit():
    found = prediction_statistics(UNIFORM.expand(5, 4), UNIFORM.expand(5, 4), UNIFORM)
    assert found.entropy == pytest.approx(math.log(4))
    assert found.information == pytest.approx(0, abs=1e-6)


def test_a_prior_says_what_is_no_skew():
    one = torch.eye(4)[[2, 2, 2, 1]]
    often = torch.tensor([1e-6, 0.25, 0.75 - 2e-6, 1e-6])
    assert (
        prediction_statistics(one, one, often).imbalance
        < 1e-3
        < prediction_statistics(one, one, UNIFORM).imbalance
    )


def test_agreement_is_the_share_of_images_with_the_same_class_in_both_views():
    weak, strong = torch.eye(4), torch.eye(4)[[0, 1, 3, 2]]
    assert prediction_statistics(weak, strong, UNIFORM).agreement == 0.5


BEFORE = PredictionStatistics(agreement=0.7, entropy=0.5, imbalance=0.3, information=0.6)


@pytest.mark.parametrize(
    ("after", "rule"),
    [
        (PredictionStatistics(0.7, 0.4, 0.2, 0.7), None),
        (PredictionStatistics(0.9, 0.1, 0.9, 0.6), "collapse"),
        (PredictionStatistics(0.5, 0.4, 0.2, 0.7), "disagreement"),
        (PredictionStatistics(0.7, 0.5, 0.3, 0.61), "doubt"),
    ],
)
def test_the_rule_that_speaks_against_a_model_is_named(
    after: PredictionStatistics, rule: str | None
):
    assert objection(BEFORE, after) == rule
