"""Distances and ink agree with numbers one can check by hand."""

from __future__ import annotations

import numpy as np

from atlas_cli.datasets.builtin import canvas, figures

ORIGIN = canvas.Points(np.zeros((1, 1)), np.zeros((1, 1)))


def test_the_distance_to_a_line_is_that_to_its_nearest_point() -> None:
    pieces = canvas.segments([(-1.0, 0.5), (1.0, 0.5)], [(3.0, 4.0), (6.0, 8.0)])
    assert canvas.stroke(ORIGIN, pieces).item() == 0.5
    assert canvas.stroke(ORIGIN, pieces[1:]).item() == 5.0


def test_a_distance_is_negative_inside_and_positive_outside() -> None:
    square = figures.polygon((-0.5, -0.5), (0.5, -0.5), (0.5, 0.5), (-0.5, 0.5))
    assert square.distance(ORIGIN).item() == -0.5
    outside = canvas.Points(np.full((1, 1), 2.0), np.zeros((1, 1)))
    assert square.distance(outside).item() == 1.5
    assert figures.disc(0, 0, 0.25).distance(outside).item() == 1.75


def test_a_cut_takes_away_from_a_figure() -> None:
    ring = (figures.disc(0, 0, 0.8), figures.disc(0, 0, 0.5, cut=True))
    assert figures.distance(ORIGIN, ring).item() > 0.0


def test_ink_covers_the_area_of_a_figure() -> None:
    cover = canvas.ink(figures.disc(0, 0, 0.5).distance(canvas.GRID), canvas.GRID)
    assert abs(cover.sum() * canvas.PIXEL**2 - np.pi * 0.25) < 0.01


def test_placing_moves_turns_and_scales() -> None:
    corner = canvas.Points(np.ones((1, 1)), np.full((1, 1), 2.0))
    seen = canvas.place(corner, (1.0, 0.0), 2.0, turn=np.pi / 2)
    assert np.allclose([seen.x.item(), seen.y.item(), seen.unit], [1.0, 0.0, 2.0])


def test_no_wobble_leaves_the_points_alone() -> None:
    assert canvas.wobble(canvas.GRID, np.random.default_rng(0), 0.0) is canvas.GRID


def test_blurring_keeps_a_plain_picture() -> None:
    image = canvas.plain((0.2, 0.4, 0.6))
    assert np.allclose(canvas.blur(image, 1.0), image)


def test_finishing_clips_to_bytes() -> None:
    image = canvas.finish(canvas.plain((-1.0, 0.5, 2.0)))
    assert image[0, 0].tolist() == [0, 128, 255]
