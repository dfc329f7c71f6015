"""Heads on fixed features against their formulas, written out in float64 and numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import atlas_cli.core.adapters as adapters
from atlas_cli.core.adapters import Head, Shots, check_count
from atlas_cli.errors import AtlasError, DataError
from atlas_cli.registry import ADAPTERS, adapter

CLASSES, WIDTH, POOLED, SCALE = 3, 8, 12, 20.0


@pytest.fixture(autouse=True)
def twenty_steps(monkeypatch):
    monkeypatch.setattr(adapters, "_STEPS", 20)


def world(per_class: int = 4) -> tuple[Shots, torch.Tensor]:
    """Shots in float64, and features of other images."""
    random = torch.Generator().manual_seed(1)
    labels = torch.arange(CLASSES).repeat(per_class)
    centres = torch.randn(CLASSES, WIDTH, generator=random, dtype=torch.float64)
    features = centres[labels] + torch.randn(
        len(labels), WIDTH, generator=random, dtype=torch.float64
    )
    text = torch.randn(CLASSES, WIDTH, generator=random, dtype=torch.float64)
    text = SCALE * text / text.norm(dim=1, keepdim=True)
    others = torch.randn(5, WIDTH, generator=random, dtype=torch.float64)
    return Shots(features, labels, text), others


def pooled_world() -> tuple[Shots, torch.Tensor]:
    shots, _ = world()
    random = torch.Generator().manual_seed(2)
    features = torch.randn(len(shots.labels), POOLED, generator=random, dtype=torch.float64)
    projection = torch.randn(POOLED, WIDTH, generator=random, dtype=torch.float64)
    others = torch.randn(5, POOLED, generator=random, dtype=torch.float64)
    return Shots(features, shots.labels, shots.text, projection), others


def unit(values: np.ndarray) -> np.ndarray:
    return values / np.linalg.norm(values, axis=1, keepdims=True)


def softmax(logits: np.ndarray) -> np.ndarray:
    raised = np.exp(logits - logits.max(axis=1, keepdims=True))
    return raised / raised.sum(axis=1, keepdims=True)


def errors(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """dL/dlogits of the mean cross-entropy."""
    return (softmax(logits) - np.eye(CLASSES)[labels]) / len(labels)


class Adam:
    """AdamW on numpy arrays, from its paper."""

    def __init__(self, rate: float, decay: float = 0.0, epsilon: float = 1e-8) -> None:
        self.rate, self.decay, self.epsilon = rate, decay, epsilon
        self.first = self.second = 0.0

    def step(self, value: np.ndarray, gradient: np.ndarray, number: int) -> np.ndarray:
        rate = self.rate * (1 + math.cos(math.pi * (number - 1) / 20)) / 2
        value = value * (1 - rate * self.decay)
        self.first = 0.9 * self.first + 0.1 * gradient
        self.second = 0.999 * self.second + 0.001 * gradient**2
        first, second = self.first / (1 - 0.9**number), self.second / (1 - 0.999**number)
        return value - rate * first / (np.sqrt(second) + self.epsilon)


def close(found: torch.Tensor, wanted: np.ndarray) -> bool:
    return np.allclose(found.numpy(), wanted, rtol=1e-9, atol=1e-9)


def test_every_head_gives_the_zero_shot_logits_at_its_zero():
    for name, kind in ADAPTERS.items():
        shots, others = pooled_world() if kind.pooled else world()
        z = others @ shots.projection if kind.pooled else others
        wanted = unit(z.numpy()) @ shots.text.numpy().T
        head = Head(name, kind.zero(shots), shots.text)
        assert close(head(others), wanted), name
        assert len(head) == CLASSES


def test_a_probe_descends_from_the_texts_and_is_drawn_to_them():
    shots, others = world()
    z, labels = unit(shots.features.numpy()), shots.labels.numpy()
    start = shots.text.numpy()
    weight, adam = start.copy(), Adam(1.0)
    for number in range(1, 21):
        pull = 2 * 0.01 / len(labels) * (weight - start)
        slope = errors(z @ weight.T, labels).T @ z
        weight = adam.step(weight, slope + pull, number)
    found = ADAPTERS["probe"].train(shots)
    assert close(found["weight"], weight)
    head = Head("probe", found, shots.text)
    assert close(head(others), unit(others.numpy()) @ weight.T)


def test_lpp_takes_steps_from_the_data_and_moves_alpha_along_all_gradients_so_far():
    shots, others = world()
    z, labels = unit(shots.features.numpy()), shots.labels.numpy()
    t = shots.text.numpy() / SCALE
    weight = np.stack([z[labels == c].sum(axis=0) for c in range(CLASSES)])
    bias = np.zeros(CLASSES)
    alpha = np.full(CLASSES, 250 * np.mean([(z[labels == c] @ t[c]).mean() for c in range(3)]))
    assert close(ADAPTERS["lpp"].start(shots)["alpha"], alpha)
    rate = 4 * len(z) / np.linalg.eigvalsh(z.T @ z).max()
    rate_of_alpha = len(z) / (4 * ((z @ t.T) ** 2).sum(axis=0).max())
    speed_of_weight, speed_of_bias, pressed = 0.0, 0.0, 0.0
    for number in range(1, 21):
        slope = errors(z @ weight.T + bias + alpha * (z @ t.T), labels)
        speed_of_weight = 0.9 * speed_of_weight + slope.T @ z
        speed_of_bias = 0.9 * speed_of_bias + slope.sum(axis=0)
        pressed = pressed + (slope * (z @ t.T)).sum(axis=0)
        weight, bias = weight - rate * speed_of_weight, bias - rate * speed_of_bias
        if number % 10 == 0:
            alpha = alpha - rate_of_alpha * pressed
    found = ADAPTERS["lpp"].train(shots)
    for name, wanted in (("weight", weight), ("bias", bias), ("alpha", alpha)):
        assert close(found[name], wanted), name
    z_other = unit(others.numpy())
    wanted = z_other @ weight.T + bias + alpha * (z_other @ t.T)
    head = Head("lpp", found, shots.text)
    assert close(head(others), wanted)
    flat_weight, flat_bias = head.linear()
    assert close(torch.from_numpy(z_other) @ flat_weight.T + flat_bias, wanted)


def cache_logits(z, keys, labels, text, alpha, beta):
    return z @ text.T + alpha * np.exp(-beta * (1 - z @ keys.T)) @ np.eye(CLASSES)[labels]


def test_tip_is_the_best_of_its_grid_for_images_left_out_of_the_cache():
    shots, others = world()
    z, labels, text = unit(shots.features.numpy()), shots.labels.numpy(), shots.text.numpy()
    found = ADAPTERS["tip"].train(shots)
    scores = {}
    for beta in (0.5, 1, 2, 4, 8, 16):
        for alpha in (0, 0.5, 1, 2, 4, 8, 16, 32, 64, 128):
            hits, losses = [], []
            for left in range(len(z)):
                rest = np.arange(len(z)) != left
                logits = cache_logits(z[left : left + 1], z[rest], labels[rest], text, alpha, beta)
                hits.append(logits.argmax() == labels[left])
                losses.append(-np.log(softmax(logits)[0, labels[left]]))
            scores[alpha, beta] = (np.mean(hits), -np.mean(losses))
    best = scores[found["alpha"].item(), found["beta"].item()]
    assert best[0] == max(hit for hit, _ in scores.values())
    assert best[1] >= max(loss for hit, loss in scores.values() if hit == best[0]) - 1e-9
    assert len(found["keys"]) == len(shots.labels)  # every shot once, however often it is shown
    wanted = cache_logits(
        unit(others.numpy()), z, labels, text, found["alpha"].item(), found["beta"].item()
    )
    assert close(Head("tip", found, shots.text)(others), wanted)


def test_tip_f_trains_keys_alpha_and_beta_each_at_its_rate():
    shots, _ = world()
    z, labels, text = unit(shots.features.numpy()), shots.labels.numpy(), shots.text.numpy()
    keys, alpha, beta = z.copy(), np.array(2.0), np.array(1.0)
    member = np.eye(CLASSES)[labels]
    steps = [Adam(rate, 0.01, 1e-4) for rate in (1e-3, 0.1, 0.1)]
    for number in range(1, 21):
        likeness = z @ keys.T
        near = np.exp(-beta * (1 - likeness))
        slope = errors(cache_logits(z, keys, labels, text, alpha, beta), labels)
        onto = slope @ member.T  # dL/d(alpha near)
        slopes = (
            (alpha * beta * onto * near).T @ z,
            (onto * near).sum(),
            (-alpha * onto * near * (1 - likeness)).sum(),
        )
        moved = zip(steps, (keys, alpha, beta), slopes, strict=True)
        keys, alpha, beta = (one.step(value, by, number) for one, value, by in moved)
    found = ADAPTERS["tip-f"].train(shots)
    assert close(found["keys"], keys)
    assert close(found["alpha"], alpha)
    assert close(found["beta"], beta)


def test_prolip_moves_the_projection_and_is_drawn_to_it_by_one_over_the_shots():
    shots, others = pooled_world()
    h, labels, text = shots.features.numpy(), shots.labels.numpy(), shots.text.numpy()
    start = shots.projection.numpy()
    projection, adam = start.copy(), Adam(1e-3)
    for number in range(1, 21):
        raw = h @ projection
        length = np.linalg.norm(raw, axis=1, keepdims=True)
        z = raw / length
        onto = errors(z @ text.T, labels) @ text
        slope = h.T @ ((onto - z * (onto * z).sum(axis=1, keepdims=True)) / length)
        projection = adam.step(projection, slope + 2 * (projection - start) / 4, number)
    found = ADAPTERS["prolip"].train(shots)
    assert close(found["projection"], projection)
    wanted = unit(others.numpy() @ projection) @ text.T
    assert close(Head("prolip", found, shots.text)(others), wanted)


def test_training_lowers_the_loss_of_every_head_that_is_trained(monkeypatch):
    monkeypatch.setattr(adapters, "_STEPS", 100)
    for name, kind in ADAPTERS.items():
        shots, _ = pooled_world() if kind.pooled else world()
        if kind.rates:
            before, after = (
                torch.nn.functional.cross_entropy(
                    kind.logits(numbers, shots.features, shots.text), shots.labels
                )
                for numbers in (kind.start(shots), kind.train(shots))
            )
            assert after < before, name


def test_a_head_that_looks_at_images_left_out_needs_two_of_every_class():
    with pytest.raises(DataError, match=r"photos: adapter tip .* needs 2 of every class"):
        check_count("tip", ADAPTERS["tip"], 1, "photos")
    check_count("tip", ADAPTERS["tip"], 2, "photos")
    check_count("tip-f", ADAPTERS["tip-f"], 1, "photos")


def test_the_name_of_a_head_is_taken_once():
    with pytest.raises(AtlasError, match="adapter 'probe' is registered twice"):

        @adapter("probe")
        class Other(adapters.Probe):
            pass
