"""Budgets of a fit: slopes are derivatives, what is kept is learned with and merged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from learned_runs import QUICK, learn, write_world
from PIL import Image

from atlas_cli.core.budget import RANKINGS
from atlas_cli.datasets.dataset import load, open_dataset
from atlas_cli.learning.batches import score
from atlas_cli.learning.fit import Fitting
from atlas_cli.learning.ranking import gradient_at_base, measure, similarities
from atlas_cli.learning.run import RunOptions, prepare
from atlas_cli.recipes import fit as recipes
from atlas_cli.recipes.model import check_recipe
from atlas_cli.vectors.format import open_checked


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("world"))


def write_white(folder: Path) -> None:
    for name in ("snow", "paper"):
        (folder / name).mkdir(parents=True)
        Image.new("RGB", (40, 40), "white").save(folder / name / "0.png")


def test_slopes_are_the_derivatives_of_the_loss_by_the_coefficients_at_zero(world):
    given = {"data": str(world / "photos"), "model": str(world / "base")}
    recipe = check_recipe(recipes.FitRecipe, {**given, "vectors": [str(world / "v")]})
    with prepare(Fitting(recipe), RunOptions(threads=1, device="cpu")) as ready:
        setup = ready.setup
        gradient = gradient_at_base(ready.inputs)
        found = measure(ready.pool.members, ready.pool.names, gradient)
        every = range(len(setup.tasks[0].dataset.samples))

        def loss(step: torch.Tensor) -> float:
            setup.model.load(step)
            return -score(setup.model, setup.tasks[0], every, setup.heads[0]).gain

        # Along a random direction, so that one difference checks all slopes at once.
        random = torch.Generator().manual_seed(0)
        direction = torch.randn(found.slopes.shape, generator=random)
        step = 1e-3 * direction
        slope = (loss(step) - loss(-step)) / 2e-3
    assert slope == pytest.approx((found.slopes * direction).sum().item(), rel=1e-2)


@pytest.mark.slow
def test_what_is_kept_fits_and_is_learned_with_and_merged(call, world, tmp_path):
    whole = sum(path.stat().st_size for path in (world / "v").iterdir())
    for rank_by in RANKINGS:
        run, merged = tmp_path / rank_by, tmp_path / f"{rank_by}-model"
        more = ["--budget", f"{whole // 3}B", "--rank-by", rank_by]
        if rank_by == "features":
            more += ["--images-of", *(f"{name}={world / 'photos'}" for name in ("birds", "<cars>"))]
        learn(world, "fit", run, *more, "--select", f"val:{world / 'photos'}")
        kept = sorted((run / "vectors").glob("*.safetensors"))
        assert sum(path.stat().st_size for path in kept) < whole / 2  # with their headers
        assert all(open_checked(path).header.blocks for path in kept)
        assert call("merge", run / "recipe.yaml", "-o", merged, "--memory", "4GB").code == 0
        scored = json.loads(call("eval", merged, "--data", world / "photos", "--json").out)
        told = json.loads((run / "result.json").read_text())
        assert scored["results"][0]["top1"] == pytest.approx(told["learned"])


def test_features_take_the_vectors_whose_images_look_most_like_the_data(call, world, tmp_path):
    given = ["fit", world / "photos", "--model", world / "base", "--pool", world / "v"]
    ranked = [*given, "--rank-by", "features", "--keep-vectors", "1", "--rank-only", "--json"]
    write_white(tmp_path / "others")
    for own, other in (("birds", "<cars>"), ("<cars>", "birds")):
        images = [f"{own}={world / 'photos'}", f"{other}={tmp_path / 'others'}"]
        told = json.loads(call(*ranked, "--images-of", *images).out)
        assert told["vectors"] == [own]
        assert told["rank_by"] == "features"
    found = call(*ranked, "--images-of", f"birds={world / 'photos'}")
    assert found.code == 2
    assert "--images-of <cars>=DATA" in found.err
    assert "no such vector" in call(*ranked, "--images-of", f"bird={world / 'photos'}").err
    unused = call(*given, "--keep-vectors", "1", "--rank-only", "--images-of", "birds=x")
    assert "is for rank_by features" in unused.err


def test_similarities_are_cosines_of_mean_features(world, tmp_path):
    write_white(tmp_path / "others")
    texts = {"birds": str(tmp_path / "others"), "<cars>": str(world / "photos")}
    given = {"data": str(world / "photos"), "model": str(world / "base"), "budget": "1MB"}
    images = [f"{name}={text}" for name, text in texts.items()]
    recipe = check_recipe(
        recipes.FitRecipe,
        {**given, "vectors": [str(world / "v")], "rank_by": "features", "images_of": images},
    )
    plain = recipe.model_copy(update={"budget": None})
    with prepare(Fitting(plain), RunOptions(threads=1, device="cpu")) as ready:
        inputs = replace(ready.inputs, recipe=recipe)
        found = similarities(inputs, ready.pool.members)
        clip = ready.setup.clip

        def mean(text: str) -> torch.Tensor:
            dataset, total = open_dataset(text, preferred=("train",)), 0.0
            for sample in dataset.samples:
                with torch.no_grad():
                    feature = clip.module.visual(clip.preprocess(load(dataset, sample))[None])[0]
                total = total + feature.double() / feature.double().norm()
            return total / len(dataset.samples)

        own = mean(given["data"])
        for member, value in zip(ready.pool.members, found.tolist(), strict=True):
            other = mean(texts[member.name])
            wanted = (own @ other / own.norm() / other.norm()).item()
            assert value == pytest.approx(wanted, rel=1e-5)


def test_a_ranking_is_shown_without_learning(call, world):
    given = ["fit", world / "photos", "--model", world / "base", "--pool", world / "v"]
    found = call(*given, "--keep-vectors", "1", "--rank-only", "--json")
    told = json.loads(found.out)
    blocks = [pick["block"] for pick in told["picks"]]
    assert len(blocks) == len(set(blocks))
    assert told["bytes"] < told["of_bytes"]
    assert set(told["vectors"]) <= {"birds", "<cars>"}
    rows = call(*given, "--budget", "20kB", "--rank-only").out.splitlines()
    assert rows[0] == "vector,block,storage,bytes,gain"
    assert sum(int(row.split(",")[3]) for row in rows[1:]) <= 20_000


def test_bad_input_is_one_line_and_nothing_is_written(call, world, tmp_path):
    assert tuple(RANKINGS) == recipes.RANKINGS
    run = tmp_path / "run"
    given = ["fit", world / "photos", "--model", world / "base", "--vectors", world / "v", *QUICK]
    cases = [
        (["--budget", "1B", "-o", run], "the smallest block of the vectors takes"),
        (["--budget", "many", "-o", run], "expected a size such as 500MB"),
        (["--budget", "1MB", "--keep-vectors", "1", "-o", run], "give one of them"),
        (["--budget", "1MB", "--basis", "random", "-o", run], "another basis"),
        (["--rank-by", "random", "-o", run], "needs budget or keep_vectors"),
        (["--rank-by", "size", "--budget", "1MB", "-o", run], "greedy"),
        (["--budget", "1MB"], "use -o DIR"),
        (["--rank-only"], "ranks what --budget or --keep-vectors keeps"),
    ]
    for more, words in cases:
        found = call(*given, *more)
        assert (found.code, len(found.error_lines)) == (2, 1), found.err
        assert words in found.err
        assert not run.exists(), words
