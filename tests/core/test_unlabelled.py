"""Which predictions are trusted: as many as asked, of every class, each for its own class."""

from __future__ import annotations

import math

import pytest
import torch

from atlas_cli.core.losses import divergence, sharpen, threshold_at, trust, trusted_count


def predictions(images: int, classes: int, seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(images, classes, generator=random)).softmax(dim=1)


def test_as_many_images_of_every_class_are_trusted_as_asked_and_no_more():
    rows = predictions(1000, 10)
    found = trust(rows, 10)
    assert len(found.images) == 100
    assert torch.bincount(found.labels, minlength=10).tolist() == [10] * 10


def test_the_trusted_label_is_the_class_that_the_image_was_ranked_for():
    """For class 1, image 0 would rank above image 2; but it is predicted to be of class 0."""
    rows = torch.tensor([[0.55, 0.45, 0.0], [0.9, 0.1, 0.0], [0.3, 0.4, 0.3], [0.2, 0.2, 0.6]])
    found = trust(rows, 1)
    assert found.images.tolist() == [1, 2, 3]
    assert found.labels.tolist() == [0, 1, 2]
    many = predictions(500, 7)
    assert torch.equal(trust(many, 5).labels, many[trust(many, 5).images].argmax(dim=1))


def test_the_most_confident_of_a_class_are_trusted():
    rows = predictions(300, 4)
    found = set(trust(rows, 6).images.tolist())
    confidence, predicted = rows.max(dim=1)
    for label in range(4):
        members = (predicted == label).nonzero().flatten().tolist()
        best = sorted(members, key=lambda i: -confidence[i])[:6]
        assert set(best) == found & set(members)


@pytest.mark.parametrize(("images", "classes"), [(1, 2), (5, 1000), (50, 1000), (99, 10)])
def test_the_number_per_class_is_never_zero(images: int, classes: int):
    assert trusted_count(images, classes) >= 1
    assert len(trust(predictions(images, classes), trusted_count(images, classes)).images) >= 1


def test_the_number_per_class_grows_with_the_images_up_to_a_limit():
    assert trusted_count(1000, 10) == 25
    assert trusted_count(10**6, 10) == 100


@pytest.mark.parametrize("per_class", [1, 3, 10**6])
def test_never_are_all_of_several_images_trusted(per_class: int):
    for rows in (predictions(20, 3), predictions(50, 1000), torch.eye(4)):
        assert 1 <= len(trust(rows, per_class).images) < len(rows)
    assert len(trust(predictions(1, 2), per_class).images) == 1


def test_trusting_no_image_is_refused():
    with pytest.raises(ValueError, match="cannot trust 0"):
        trust(predictions(5, 2), 0)


def test_a_power_below_one_flattens_and_above_one_sharpens():
    rows = torch.tensor([[0.64, 0.36]])
    assert sharpen(rows, 0.5).tolist()[0] == pytest.approx([0.8 / 1.4, 0.6 / 1.4])
    assert sharpen(rows, 2.0).tolist()[0] == pytest.approx([0.4096 / 0.5392, 0.1296 / 0.5392])
    assert sharpen(rows, 1.0).tolist()[0] == pytest.approx([0.64, 0.36])


@pytest.mark.parametrize(("classes", "needed"), [(10, 0.9986), (100, 0.99988), (1000, 0.99999)])
def test_what_passes_a_threshold_after_flattening_was_nearly_certain_before(classes, needed):
    """The remainder is spread evenly; the figures are of the square root and a threshold of 0.9."""

    def flattened(top: float) -> float:
        rest = (1 - top) / (classes - 1)
        row = torch.tensor([[top, *[rest] * (classes - 1)]], dtype=torch.float64)
        return sharpen(row, 0.5)[0, 0].item()

    margin = (1 - needed) / 2
    assert flattened(needed - margin) < 0.9 < flattened(needed + margin)


def test_a_probability_of_zero_stays_a_number():
    assert sharpen(torch.tensor([[1.0, 0.0]]), 0.5).isfinite().all()


def test_the_threshold_moves_over_the_epochs():
    found = [threshold_at((0.9, 1.0), epoch, 10) for epoch in range(10)]
    assert found == pytest.approx([0.90, 0.91, 0.92, 0.93, 0.94, 0.95, 0.96, 0.97, 0.98, 0.99])


def test_the_divergence_is_zero_for_the_same_and_finite_for_a_class_that_is_never_predicted():
    half = torch.tensor([0.5, 0.5])
    assert divergence(half, half).item() == 0
    assert divergence(torch.tensor([0.5, 0.5]), torch.tensor([0.8, 0.2])).item() == pytest.approx(
        0.5 * math.log(0.5 / 0.8) + 0.5 * math.log(0.5 / 0.2)
    )
    assert divergence(half, torch.tensor([1.0, 0.0])).isfinite()
