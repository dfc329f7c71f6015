"""The verbs are functions: typed values go in, events come on the way, a typed result comes out."""

from __future__ import annotations

import collections
import dataclasses
import io
import json
from pathlib import Path

import pytest
import yaml
from learned_runs import write_world

from atlas_cli.datasets import dataset
from atlas_cli.errors import ClosedError, UsageError
from atlas_cli.learning import events
from atlas_cli.learning.add import add
from atlas_cli.learning.finetune import VectorOutput, finetune
from atlas_cli.learning.fit import fit
from atlas_cli.learning.negate import negate
from atlas_cli.learning.run import RunOptions
from atlas_cli.learning.tta import tta, tta_online
from atlas_cli.recipes.finetune import FinetuneRecipe
from atlas_cli.recipes.fit import FitRecipe
from atlas_cli.recipes.learning import AddRecipe, NegateRecipe
from atlas_cli.recipes.tta import TtaRecipe

QUICK = {"batch_size": 8, "epochs": 2, "min_steps": 2, "lr": 0.3}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("world"))


def keys(world: Path) -> dict[str, object]:
    return {"model": str(world / "base"), "vectors": [str(world / "v")], **QUICK}


def fit_recipe(world: Path, **more: object) -> FitRecipe:
    return FitRecipe(data=str(world / "photos"), **{**keys(world), **more})


def test_every_verb_gives_a_recipe_that_merges_and_says_nothing(world, capfd):
    photos = str(world / "photos")
    results = [
        fit(fit_recipe(world)),
        negate(NegateRecipe(data=[photos], control=photos, **keys(world))),
        add(AddRecipe(data=[photos], **keys(world)), compare=["ties"]),
        tta(TtaRecipe(data=photos, **{**keys(world), "select": "last"})),
    ]
    for result in results:
        assert yaml.safe_load(str(result))["merge_method"] == result.recipe.merge_method == "atlas"
        assert result.coefficients == yaml.safe_load(result.text)["coefficients"]
        assert result.folder is None
        assert not result.stopped
    assert results[0].improved
    assert results[1].failed.startswith("nothing lowered")  # the control is the target
    assert [row["training top-1 in percent"] for row in results[2].rows][-1] == "ties"
    assert results[3].before.keys() == {"agreement", "entropy", "skew", "merit"}
    assert capfd.readouterr() == ("", "")


def test_a_search_without_labels_is_refused(world):
    recipe = AddRecipe(
        data=[str(world / "photos")], objective="entropy", method="search", **keys(world)
    )
    with pytest.raises(UsageError, match="--objective entropy looks at no labels"):
        add(recipe)


def test_a_listener_gets_what_happens_in_order(world):
    heard: list[events.Event] = []
    fit(fit_recipe(world), on_event=heard.append)
    phases = [event.name for event in heard if isinstance(event, events.PhaseStarted)]
    assert phases == [
        "finding the model and the images",
        "opening the model and the vectors",
        "hashing the images",
        "scoring what was learned",
    ]
    heard = [event for event in heard if not isinstance(event, events.PhaseStarted)]
    kinds = [type(event) for event in heard]
    steps = kinds.count(events.StepTaken)
    assert kinds == [
        events.Planned,
        events.TrainingStarted,
        *[events.StepTaken] * steps,
        events.TrainingEnded,
    ]
    assert heard[1].steps == steps == 4
    assert [event.step.number for event in heard[2:-1]] == [1, 2, 3, 4]


def test_a_run_that_is_stopped_goes_on_to_the_same_result(world, tmp_path):
    whole = fit(fit_recipe(world), RunOptions(folder=tmp_path / "whole"))
    taken: list[events.Event] = []

    def listen(event: events.Event) -> None:
        if isinstance(event, events.StepTaken):
            taken.append(event)

    options = RunOptions(folder=tmp_path / "run")
    recipe = fit_recipe(world)
    stopped = fit(recipe, options, on_event=listen, stop=lambda: len(taken) == 3)
    assert stopped.stopped
    assert len(taken) == 3
    resumed = fit(recipe, dataclasses.replace(options, resume=True))
    assert resumed.text == whole.text
    for name in ("metrics.jsonl", "coefficients.json", "result.json"):
        assert (tmp_path / "run" / name).read_text() == (tmp_path / "whole" / name).read_text()


def test_a_listener_that_raises_ends_training_and_hears_that_it_ended(world):
    heard: list[type] = []

    def listen(event: events.Event) -> None:
        heard.append(type(event))
        if isinstance(event, events.StepTaken):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(fit_recipe(world), on_event=listen)
    assert heard[-2:] == [events.StepTaken, events.TrainingEnded]


def reads_of_images(monkeypatch: pytest.MonkeyPatch) -> collections.Counter[str]:
    """Counts how often the whole content of an image is read, as hashing does."""
    reads: collections.Counter[str] = collections.Counter()
    open_regular = dataset.open_regular

    class Counted(io.BufferedReader):
        def __init__(self, path: Path):
            super().__init__(open_regular(path).detach())
            self.path = path

        def read(self, size: int | None = -1, /) -> bytes:
            if size == -1:
                reads[str(self.path)] += 1
            return super().read(size)

    monkeypatch.setattr(dataset, "open_regular", Counted)
    return reads


def test_images_are_hashed_once_in_a_run(world, tmp_path, monkeypatch):
    reads = reads_of_images(monkeypatch)
    found = fit(fit_recipe(world), RunOptions(folder=tmp_path / "fit"))
    assert json.loads((tmp_path / "fit" / "config.json").read_text()) == found.facts["config"]
    assert set(reads.values()) == {1}
    assert len(reads) == 8
    reads.clear()
    recipe = FinetuneRecipe(
        data=[str(world / "photos")], model=str(world / "base"), steps=1, batch_size=8
    )
    finetune(recipe, RunOptions(folder=tmp_path / "finetune"))
    assert set(reads.values()) == {1}
    reads.clear()
    tta(
        TtaRecipe(data=str(world / "photos"), **keys(world)),
        RunOptions(folder=tmp_path / "tta"),
    )
    assert set(reads.values()) == {1}


def test_finetune_gives_the_paths_that_it_wrote(world, tmp_path):
    recipe = FinetuneRecipe(
        data=[str(world / "photos")], model=str(world / "base"), steps=1, batch_size=8
    )
    heard: list[events.Event] = []
    vectors = VectorOutput(vector=tmp_path / "photos.safetensors")
    result = finetune(
        recipe, RunOptions(folder=tmp_path / "run"), vectors=vectors, on_event=heard.append
    )
    (task,) = result.tasks
    assert str(result) == f"{tmp_path / 'run' / 'model'}\n{tmp_path / 'photos.safetensors'}"
    assert Path(task.vector).is_file()
    assert [e.accuracy for e in heard if isinstance(e, events.EpochScored)] == task.accuracies
    assert events.TaskFinished(task) in heard


def test_a_stream_of_images_is_predicted_and_learned_from(world, tmp_path):
    images = [str(path) for path in sorted((world / "photos").rglob("*.png"))]
    recipe = TtaRecipe(
        data="stdin", classes=["cat", "dog"], **{**keys(world), "batch_size": 4, "select": "last"}
    )
    rows: list[events.Predicted] = []

    def listen(event: events.Event) -> None:
        if isinstance(event, events.Predicted):
            rows.append(event)
            if len(rows) == 6:
                raise ClosedError("gone")

    options = RunOptions(folder=tmp_path / "run")
    paths = ((path, Path(path).name) for path in [*images[:4], "missing.png", *images[4:]])
    result = tta_online(recipe, paths, options, on_event=listen)
    assert (result.ended, result.interrupted) == ("the reader went away", False)
    assert [row.prediction in ("cat", "dog") for row in rows] == [True] * 4 + [False, True]
    assert "missing.png" in rows[4].error
    assert result.learned_from == 4
    assert (tmp_path / "run" / "recipe.yaml").is_file()
