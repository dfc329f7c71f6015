"""A learned head stays with the result: in the run, its recipe, the merged model, eval and tta."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from conftest import write_images
from learned_runs import write_world
from safetensors.torch import load_file

import atlas_cli
from atlas_cli.core.adapters import Head
from atlas_cli.errors import AtlasError, CheckpointError, DataError, MismatchError, UsageError
from atlas_cli.learning.fit import Fitting
from atlas_cli.learning.heads import candidates, chosen, label_of, mean_head
from atlas_cli.learning.loop import CoefficientTrainer
from atlas_cli.learning.run import RunOptions, prepare
from atlas_cli.learning.selection import Last, Scoring
from atlas_cli.models.clip import HEAD
from atlas_cli.recipes.fit import FitRecipe
from atlas_cli.recipes.model import check_recipe

QUICK = {"batch_size": 8, "epochs": 2, "min_steps": 2, "lr": 0.3}
JOINT = ("probe", "tip-f", "prolip")
ALL = (*JOINT, "lpp", "tip")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("world"))


def keys(world: Path, **more: object) -> dict[str, object]:
    return {"model": world / "base", "vectors": [world / "v"], **QUICK, **more}


def texts(given: dict[str, object]) -> dict[str, object]:
    """The same as a recipe has it."""
    return json.loads(json.dumps(given, default=str))


def merged(recipe, folder: Path):
    return atlas_cli.merge(recipe, folder, memory="4GB")


def accuracy(world: Path, *models: Path) -> list[float]:
    return [one.top1 for one in atlas_cli.evaluate(list(models), world / "photos")]


@pytest.mark.slow
def test_eval_of_the_merged_model_is_what_the_run_says_of_its_images(world, tmp_path):
    """Joint with the coefficients, after them, and alone on the base."""
    zero_shot = accuracy(world, world / "base")[0]
    for name in ALL:
        for stage in ("joint", "after", "alone"):
            if stage == "joint" and name not in JOINT:
                continue
            given = {"vectors": []} if stage == "alone" else {"adapter_stage": stage}
            place = tmp_path / f"{name}-{stage}"
            found = atlas_cli.fit(
                world / "photos", output=place, **keys(world, adapter=name, **given)
            )
            model = merged(found, tmp_path / f"{name}-{stage}-model")
            told = json.loads((place / "result.json").read_text())
            assert found.before["accuracy"] == zero_shot, (name, stage)
            (scored,) = accuracy(world, Path(str(model)))
            assert scored == pytest.approx(told["learned"]), (name, stage)
            classes = told["classes"][0]["classes"].values()
            hits = sum(one["images"] * one["learned"] for one in classes)
            assert hits / sum(one["images"] for one in classes) == pytest.approx(scored)
            assert (Path(str(model)) / HEAD).exists() == (name != "prolip")
            assert (
                found.coefficients is None
                or stage != "joint"
                or any(value for row in found.coefficients.values() for value in row.values())
            )


def test_a_joint_run_resumes_to_the_same_coefficients_and_head(world, tmp_path):
    given = keys(world, adapter="tip-f")
    whole = atlas_cli.fit(world / "photos", output=tmp_path / "whole", **given)
    recipe = check_recipe(
        FitRecipe,
        {
            "data": str(world / "photos"),
            **{
                key: [str(v) for v in value]
                if isinstance(value, list)
                else str(value)
                if isinstance(value, Path)
                else value
                for key, value in given.items()
            },
        },
    )
    from atlas_cli.learning.fit import fit

    steps: list[object] = []
    options = RunOptions(folder=tmp_path / "parts")
    fit(recipe, options, on_event=steps.append, stop=lambda: len(steps) > 2)
    resumed = fit(recipe, RunOptions(folder=tmp_path / "parts", resume=True))
    assert resumed.coefficients == whole.coefficients
    heads = [load_file(tmp_path / name / "head.safetensors") for name in ("whole", "parts")]
    assert heads[0].keys() == heads[1].keys() == {"alpha", "beta", "classes", "keys", "text"}
    assert all(torch.equal(heads[0][key], heads[1][key]) for key in heads[0])


def test_a_recipe_without_a_folder_holds_the_head_itself(world, tmp_path):
    given = keys(world, adapter="probe")
    text = str(atlas_cli.fit(world / "photos", **given))
    assert yaml.safe_load(text)["head"].keys() == {"adapter", "data"}
    atlas_cli.fit(world / "photos", output=tmp_path / "run", **given)
    merged(text, tmp_path / "a")
    merged(tmp_path / "run" / "recipe.yaml", tmp_path / "b")
    assert (tmp_path / "a" / HEAD).read_bytes() == (tmp_path / "b" / HEAD).read_bytes()


def test_tta_classifies_by_the_head_of_its_model_and_hands_it_on(world, tmp_path):
    found = atlas_cli.fit(world / "photos", **keys(world, adapter="lpp", vectors=[]))
    model = Path(str(merged(found, tmp_path / "model")))
    given = keys(world, model=model, select="last", lr=1e-6)
    adapted = atlas_cli.tta(world / "photos", predictions=tmp_path / "p.jsonl", **given)
    zero = atlas_cli.tta(
        world / "photos", predictions=tmp_path / "z.jsonl", **{**given, "model": world / "base"}
    )
    ours, theirs = (
        [json.loads(line)["prediction"] for line in (tmp_path / name).read_text().splitlines()]
        for name in ("p.jsonl", "z.jsonl")
    )
    wanted = ["cat"] * 4 + ["dog & <fox>"] * 4
    right = [sum(a == b for a, b in zip(some, wanted, strict=True)) for some in (ours, theirs)]
    assert right == [round(8 * top1 / 100) for top1 in accuracy(world, model, world / "base")]
    assert right[0] > right[1]
    assert "head" not in yaml.safe_load(str(zero))
    again = Path(str(merged(adapted, tmp_path / "again")))
    assert (again / HEAD).read_bytes() == (model / HEAD).read_bytes()


def test_a_head_for_other_classes_is_left_aside_and_that_is_said(world, tmp_path):
    found = atlas_cli.fit(world / "photos", **keys(world, adapter="probe", vectors=[]))
    model = Path(str(merged(found, tmp_path / "model")))
    write_images(tmp_path / "others", ("sun", "moon"), 2)
    said: list[str] = []
    scores = atlas_cli.evaluate([world / "base", model], tmp_path / "others", warn=said.append)
    assert scores[0].top1 == scores[1].top1
    assert said == [
        f"{model}: its learned head is for other classes (cat, dog & <fox>, ...): zero-shot here"
    ]


def test_the_images_of_a_cache_are_counted_once_however_often_they_are_shown(world, tmp_path):
    given = keys(world, adapter="tip-f", min_steps=20)
    atlas_cli.fit(world / "photos", output=tmp_path / "run", **given)
    assert len(load_file(tmp_path / "run" / "head.safetensors")["keys"]) == 8


def test_zero_shot_is_scored_on_the_images_that_score_the_head(world, tmp_path):
    """Held out, not learned from."""
    recipe = check_recipe(
        FitRecipe,
        {
            "data": str(world / "photos"),
            "model": str(world / "base"),
            "vectors": [str(world / "v")],
            "adapter": "probe",
            "select": "holdout",
            **QUICK,
        },
    )
    with prepare(Fitting(recipe), RunOptions()) as ready:
        (fold,) = ready.policy.folds
        zero = ready.objective.judge(fold, torch.zeros_like(ready.objective.start))
        from atlas_cli.learning.batches import score

        setup = ready.setup
        setup.model.load(setup.table())
        held = score(setup.model, setup.tasks[0], fold.scored_on[0], setup.heads[0])
    assert zero.values["accuracy"] == held.accuracy
    assert not set(fold.scored_on[0]) & set(fold.train[0])


def test_folds_of_the_shots_decide_which_head_is_kept(world, tmp_path):
    run = tmp_path / "run"
    given = {**keys(world, preset="best"), "epochs": 1}
    found = atlas_cli.fit(world / "photos", output=run, **given)
    told = json.loads((run / "result.json").read_text())
    names = [label_of(one) for one in candidates()]
    assert told["folds"].keys() >= {*names, *(f"{name} loss" for name in names)}
    shares = {k: v if k.endswith("loss") else v / 100 for k, v in told["folds"].items()}
    assert told["choice"] == label_of(chosen(shares, 8))
    assert told["learned"] == told["folds"][told["choice"]]
    model = Path(str(merged(found, tmp_path / "model")))
    composed, head = told["choice"].split()
    assert (model / HEAD).exists() == (head != "text")
    assert composed == "composed" or not any(
        value for row in found.coefficients.values() for value in row.values()
    )


def test_the_mean_head_stays_unless_another_is_clearly_better_on_images_held_out():
    names = [label_of(one) for one in candidates()]
    level = dict.fromkeys(names, 0.5) | {f"{name} loss": 1.0 for name in names}
    assert chosen(level, 100) == (True, "mean")
    # One of eight candidates that are no better is often as far ahead on a hundred images.
    assert chosen({**level, "base lpp": 0.65}, 100) == (True, "mean")
    assert chosen({**level, "base lpp": 0.7}, 100) == (False, "lpp")
    tied = {**level, "base lpp": 0.7, "composed tip-f": 0.7, "composed tip-f loss": 0.9}
    assert chosen(tied, 100) == (True, "tip-f")


def test_candidates_that_are_equally_good_seldom_replace_the_mean_head():
    """Forty images held out, on which every candidate is right as often, by chance."""
    random = torch.Generator().manual_seed(0)
    names, images, draws = [label_of(one) for one in candidates()], 40, 500
    losses = {f"{name} loss": 1.0 for name in names}
    drawn = torch.rand(draws, len(names), images, generator=random)
    shares = (drawn < 0.6).double().mean(dim=2).tolist()
    found = [chosen({**dict(zip(names, row, strict=True)), **losses}, images) for row in shares]
    assert sum(one != (True, "mean") for one in found) < 0.08 * draws


def test_the_mean_of_a_head_and_a_longer_one_of_the_same_direction_is_that_head():
    text = torch.zeros(3, 4)
    weight = torch.arange(12.0).view(3, 4).square()
    common = torch.tensor([5.0, -1.0, 0.0, 2.0])  # of all classes: no prediction shows it
    left, right = (Head("probe", {"weight": w}, text) for w in (weight, 7 * weight + common))
    wanted = weight - weight.mean(0)
    torch.testing.assert_close(mean_head(left, right).parameters["weight"], wanted)
    torch.testing.assert_close(mean_head(left, left).parameters["weight"], wanted)


def test_what_is_kept_is_the_mean_of_all_training_passes(world):
    recipe = check_recipe(
        FitRecipe, {"data": str(world / "photos"), **texts(keys(world, preset="best")), "epochs": 1}
    )
    with prepare(Fitting(recipe), RunOptions()) as ready:
        trainer = CoefficientTrainer(ready.objective, ready.policy)
        single = [
            CoefficientTrainer(ready.objective, Last(replace(fold, scoring=Scoring.NEVER)))
            for fold in ready.policy.folds
        ]
        passes = [[*one.learn(one.begin())][-1].best for one in single]
        found = [*trainer.learn(trainer.begin())][-1].best
    assert len(passes) > 2
    torch.testing.assert_close(found, torch.stack(passes).mean(0))


def test_one_image_of_a_class_leaves_nothing_to_validate_on(world, tmp_path):
    write_images(tmp_path / "single", ("cat", "dog"), 1)
    given = {**keys(world, adapter="auto"), "epochs": 1}
    found = atlas_cli.fit(tmp_path / "single", **given)
    assert found.facts["choice"] == "composed mean"
    assert found.recipe.head.adapter == "probe"


def test_a_preset_fills_in_what_is_not_given(world):
    def made(**more):
        given = {"data": "d", "model": "m", "vectors": ["v"]}
        return check_recipe(FitRecipe, {**given, **more})

    assert (made().adapter, made().batch_size) == ("none", 128)
    fast = made(preset="fast", batch_size=32)
    assert (fast.adapter, fast.adapter_stage, fast.batch_size) == ("probe", "joint", 32)
    assert (made(preset="best").adapter, made(preset="best").epochs) == ("auto", 6)


def test_bad_input_is_one_line_and_nothing_is_written(world, tmp_path):
    write_images(tmp_path / "single", ("cat", "dog"), 1)
    photos, run = world / "photos", tmp_path / "run"
    cases = [
        (tmp_path / "single", {"adapter": "tip"}, DataError, "tip .* needs 2 of every class"),
        (photos, {"adapter": "tipp"}, UsageError, r"adapter: .* 'tipp'; did you mean 'tip'"),
        (photos, {"adapter": "tip", "adapter_stage": "joint"}, UsageError, "nothing to train"),
        (photos, {"adapter_stage": "joint"}, UsageError, "there is no adapter"),
        (photos, {"vectors": []}, UsageError, "names no task vector"),
        (
            photos,
            {"adapter": "probe", "vectors": [], "adapter_stage": "joint"},
            UsageError,
            "no vectors",
        ),
        (photos, {"adapter": "probe", "penalty": "l1:0.1"}, UsageError, "coefficients alone"),
        (photos, {"adapter": "auto", "select": "kfold"}, UsageError, "folds of its own"),
        (photos, {"preset": "fats"}, UsageError, "paper, fast or best, found 'fats'"),
        (photos, {"adapter": "prolip", "linearised": True}, UsageError, "first-order"),
    ]
    for data, more, kind, words in cases:
        with pytest.raises(kind, match=words):
            atlas_cli.fit(data, output=run, **keys(world, **more))
        assert not run.exists(), words
    with pytest.raises(UsageError, match="prolip writes a task vector; give a folder"):
        atlas_cli.fit(photos, **keys(world, adapter="prolip"))


def test_a_head_that_was_changed_or_is_none_is_refused(world, tmp_path):
    atlas_cli.fit(world / "photos", output=tmp_path / "run", **keys(world, adapter="probe"))
    file, recipe = tmp_path / "run" / "head.safetensors", tmp_path / "run" / "recipe.yaml"
    shutil.copy(world / "v" / "0.safetensors", file)
    with pytest.raises(MismatchError, match=r"head.safetensors: is not the head"):
        merged(recipe, tmp_path / "model")
    table = yaml.safe_load(recipe.read_text())
    del table["head"]["sha256"]
    with pytest.raises(CheckpointError, match=r"head.safetensors: is no head that atlas can use"):
        merged(table, tmp_path / "model")
    for head, words in (
        ({"adapter": "probe"}, "either 'file' or 'data'"),
        ({"adapter": "probe", "file": "gone"}, "no such file: gone"),
        ({"adapter": "probe", "data": "?"}, "no base64"),
    ):
        with pytest.raises(AtlasError, match=words):
            merged({**table, "head": head}, tmp_path / "model")
    assert not (tmp_path / "model").exists()
