"""What a run keeps of its result: every class, on the images that judged it, and honest words."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from conftest import write_images
from learned_runs import learn, write_world

from atlas_cli.parallel import choose_device


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_world(tmp_path_factory.mktemp("world"))
    write_images(root / "others", ("cat", "dog & <fox>"), 3, seed=1)
    return root


def result_of(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())


def mean(classes: dict, key: str) -> float:
    """The accuracy on all images, from those of the classes."""
    images = [row["images"] for row in classes.values()]
    return sum(row[key] * row["images"] for row in classes.values()) / sum(images)


@pytest.mark.parametrize(
    ("select", "words"),
    [
        ("last", "8 images that it learned from"),
        ("holdout", "2 images held out"),
        ("val:others", "6 images of {others} to select on"),
    ],
)
def test_classes_are_counted_on_the_images_that_judge(world, tmp_path, select: str, words: str):
    others = str(world / "others")
    given = select.replace("others", others)
    result = result_of(learn(world, "fit", tmp_path / "run", "--select", given))
    (task,) = result["classes"]
    assert task["task"].endswith("photos")
    assert task["on"] == words.format(others=others)
    assert list(task["classes"]) == ["cat", "dog & <fox>"]
    for key in ("zero_shot", "learned"):
        assert mean(task["classes"], key) == pytest.approx(result[key])


def test_every_task_has_its_classes(world, tmp_path):
    result = result_of(learn(world, "negate", tmp_path / "run", "--control", world / "others"))
    assert [task["task"] for task in result["classes"]] == result["tasks"]
    for method, key in (("zero-shot", "zero_shot"), ("learned", "learned")):
        found = [mean(task["classes"], key) for task in result["classes"]]
        assert found == pytest.approx(result["accuracy"][method])


def test_an_accuracy_is_in_percent_wherever_it_is_written(call, world, tmp_path):
    """In a run's files and recipe, and in the JSON, CSV and table of eval, it is one number."""
    folder = learn(world, "fit", tmp_path / "run")
    merged = call("merge", folder, "-o", tmp_path / "merged", "--memory", "4GB")
    assert merged.code == 0, merged.err
    given = ("eval", world / "base", tmp_path / "merged", "--data", world / "photos")
    told = json.loads(call(*given, "--json").out)
    first, second = (row["top1"] for row in told["results"])
    result = result_of(folder)
    assert (told["unit"], result["unit"]) == ("percent", "percent")
    assert told["device"] == str(choose_device("auto"))  # the one that was used
    assert (result["zero_shot"], result["learned"]) == (first, second)
    assert second in (12.5 * hits for hits in range(9))  # of eight images
    lines = [line.split(",") for line in call(*given).out.splitlines()]
    assert lines[2][lines[0].index("top1")] == f"{second:.2f}"
    comment = (folder / "recipe.yaml").read_text().splitlines()[1]
    assert f"zero-shot {first:.2f}, learned {second:.2f}" in comment
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert max(row["top1_percent"] for row in rows) > 1


def test_every_chart_of_a_picture_has_its_own_legend_and_accuracies_go_to_a_hundred(
    call, world, tmp_path
):
    """Legends are below: above, one would stand over the title of its chart, or of another."""
    folder = learn(world, "negate", tmp_path / "run", "--control", world / "others")
    assert call("inspect", folder, "--plot", tmp_path / "x.svg").code == 0
    root = ElementTree.parse(tmp_path / "x.svg").getroot()
    texts = list(texts_of(root))
    titles = [y for text, y in texts if ": 6 images" in text or ": 8 images" in text]
    legends = [y for text, y in texts if text == "zero-shot"]
    assert len(titles) == len(legends) == 2
    assert min(legends) > max(titles)
    words = [text for text, _ in texts]
    shares = [text for text in words if "in percent" in text]
    assert len(shares) == 3  # a curve, and the classes of both tasks
    assert words.count("100") == len(shares)


def texts_of(element: ElementTree.Element, down: float = 0.0) -> Iterator[tuple[str, float]]:
    """The texts of an SVG, and how far down each begins."""
    for x, y in re.findall(r"translate\(([-\d.]+),\s*([-\d.]+)\)", element.get("transform", "")):
        down += float(y) + 0 * float(x)
    if element.text and element.tag.endswith("text"):
        yield element.text, down
    for inner in element:
        yield from texts_of(inner, down)


def test_over_folds_the_words_say_that_the_images_were_learned_from(world, tmp_path):
    folder = learn(world, "fit", tmp_path / "run", "--select", "kfold")
    assert result_of(folder)["classes"][0]["on"] == "8 images that it learned from"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = Counter(row["stage"] for row in rows)
    assert len({steps[f"fold {number}"] for number in (1, 2, 3, 4)}) == 1  # each as many as others


def test_without_labels_predictions_are_counted_instead(world, tmp_path):
    result = result_of(learn(world, "tta", tmp_path / "run", "--select", "last"))
    assert "classes" not in result
    assert sum(result["histogram"]["zero-shot"].values()) == 8
    assert sum(result["histogram"]["adapted"].values()) == 8
