"""Mistakes that few-shot code of this method has made elsewhere, each as what happens here instead.

Heads that are trained at all, with their own rates, on features that are counted once, and judged
on the images that judge zero-shot: see test_adapters.py and test_heads.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import write_images
from learned_runs import QUICK, learn, write_world

import atlas_cli
from atlas_cli.core.compose import Composition, by_partition, compose_block, indices, stack_blocks
from atlas_cli.core.storage import Dense
from atlas_cli.datasets.dataset import open_dataset
from atlas_cli.learning.fit import Fitting
from atlas_cli.learning.run import RunOptions, prepare
from atlas_cli.recipes.fit import FitRecipe
from atlas_cli.recipes.model import check_recipe


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("world"))


def test_parts_reach_blocks_of_every_shape_and_blocks_of_one_shape_are_split_apart():
    shapes = {"bias": (50,), "weight": (10, 5), "other": (10, 5), "filter": (5, 2, 5, 1)}
    layout = by_partition(shapes, 7, seed=0)
    base = {name: torch.zeros(shape) for name, shape in shapes.items()}
    stacks = {name: stack_blocks({0: Dense(torch.ones(shape))}) for name, shape in shapes.items()}
    composition = Composition(base, stacks, layout, 1)
    coefficients = torch.arange(1.0, 1 + len(layout.labels))[None]
    assert composition.shape == (1, 28)  # seven of every block, however few elements it has
    for number, name in enumerate(shapes):
        found = compose_block(composition, name, coefficients).flatten()
        assert set(found.tolist()) <= set(range(7 * number + 1, 7 * number + 8))
        assert (found > 0).all()
    same = [indices(layout.placements[name], 50) for name in ("weight", "other")]
    assert not torch.equal(*same)


@pytest.mark.slow
def test_a_share_of_the_images_is_learned_from(world, tmp_path):
    learn(world, "fit", tmp_path / "run", "--shots", "0.5")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["data"][0]["images"] == 4


@pytest.mark.slow
def test_coefficients_are_kept_beside_a_head_that_is_fitted_after_them(world, tmp_path):
    given = {"model": world / "base", "vectors": [world / "v"], "batch_size": 8, "epochs": 1}
    plain = atlas_cli.fit(world / "photos", **given)
    headed = atlas_cli.fit(world / "photos", adapter="lpp", **given)
    assert plain.coefficients == headed.coefficients
    assert any(value for row in headed.coefficients.values() for value in row.values())
    assert headed.recipe.head is not None


@pytest.mark.slow
def test_steps_are_counted_once(world, tmp_path):
    learn(world, "fit", tmp_path / "run", "--adapter", "probe", "--accumulate", "2")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["number"] for row in rows] == [1, 2, 3, 4]  # two epochs of two steps
    assert [row["epoch"] for row in rows] == [1, 1, 2, 2]


def test_shots_are_drawn_by_their_labels_without_opening_an_image(tmp_path):
    folder = write_images(tmp_path / "photos", ("cat", "dog"), 5) or tmp_path / "photos"
    for path in Path(folder).rglob("*.png"):
        path.write_bytes(b"no image at all")
    found = open_dataset(str(tmp_path / "photos"), shots=2, seed=0)
    assert sorted(sample.label for sample in found.samples) == [0, 0, 1, 1]


@pytest.mark.slow
def test_a_run_starts_where_another_ended(call, world, tmp_path):
    first = learn(world, "fit", tmp_path / "first")
    given = ["fit", world / "photos", "--model", world / "base", "--vectors", world / "v", *QUICK]
    still = [*given, "--init", first, "--lr", "1e-9", "--epochs", "1", "-o", tmp_path / "second"]
    assert call(*still).code == 0
    before, after = (
        json.loads((tmp_path / run / "coefficients.json").read_text())
        for run in ("first", "second")
    )
    for vector, row in before.items():
        assert after[vector] == pytest.approx(row, abs=1e-6)
    joint = {"data": str(world / "photos"), "model": str(world / "base"), "init": str(first)}
    joint |= {"vectors": [str(world / "v")], "adapter": "probe"}
    with prepare(Fitting(check_recipe(FitRecipe, joint)), RunOptions(threads=1)) as ready:
        table, _ = ready.setup.model.parts(ready.objective.start)
        assert ready.table(table)["birds"] == pytest.approx(before["birds"], abs=1e-6)
    for init, words in ((tmp_path / "gone", "no coefficients.json"), (world / "v", "no coeff")):
        found = call(*given, "--init", init, "-o", tmp_path / "third")
        assert (found.code, words in found.err, len(found.error_lines)) == (2, True, 1)
        assert not (tmp_path / "third").exists()
