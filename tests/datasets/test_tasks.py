"""The tasks are drawn the same everywhere, evenly, and each image on its own."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import numpy as np
import pytest

from atlas_cli.datasets.builtin import CONTROL, TASKS, draw, label_of
from atlas_cli.datasets.builtin.concepts import CLASSES
from atlas_cli.sources.locate import BUILTIN_MODELS, builtin_model

# The first 16 digits of the SHA-256 of the bytes.
PINNED = {
    ("digits", "train", 0): "3d0c14efc80bfdc6",
    ("digits", "test", 500): "4ffd29a3d511a7b6",
    ("letters", "train", 1): "e043c28912e0f145",
    ("letters", "test", 501): "b75e3c904f233278",
    ("house_numbers", "train", 2): "a8b2db18f13545b0",
    ("house_numbers", "test", 502): "ae7ec5be8f3e3c2f",
    ("signs", "train", 3): "85dcb3e02a1e5719",
    ("signs", "test", 503): "fe02f32636b23180",
    ("textures", "train", 4): "d9a8836952cb4002",
    ("textures", "test", 504): "3cca5ff285a8e29e",
    ("terrain", "train", 5): "178fb40fe765919b",
    ("terrain", "test", 505): "0145d3b31ccb9427",
    ("counts", "train", 6): "8bbf039996fdeca6",
    ("counts", "test", 506): "4d272abde6831db2",
    ("silhouettes", "train", 7): "185cf8336c194e25",
    ("silhouettes", "test", 507): "f3f83f4288c55483",
    ("everything", "train", 8): "54363c8ec2d30c59",
    ("everything", "test", 508): "dab4481f1bac886d",
}


@pytest.mark.parametrize(("where", "start"), PINNED.items())
def test_an_image_is_the_same_on_every_machine(where: tuple[str, str, int], start: str) -> None:
    assert hashlib.sha256(draw(*where).tobytes()).hexdigest().startswith(start)


@pytest.mark.parametrize("task", TASKS)
def test_an_image_does_not_depend_on_what_was_drawn_before(task: str) -> None:
    alone = draw(task, "train", 7)
    in_turn = [draw(task, "train", index) for index in range(8)]
    assert np.array_equal(in_turn[7], alone)


@pytest.mark.parametrize("task", TASKS)
def test_an_image_is_32_by_32_bytes_in_colour(task: str) -> None:
    image = draw(task, "val", 3)
    assert (image.shape, image.dtype) == ((32, 32, 3), np.uint8)


def test_another_seed_gives_another_image() -> None:
    assert not np.array_equal(draw("digits", "train", 0), draw("digits", "train", 0, seed=1))


@pytest.mark.parametrize("task", TASKS)
def test_no_image_is_in_two_splits(task: str) -> None:
    count = 100
    seen = [
        {draw(task, split, index).tobytes() for index in range(count)}
        for split in ("train", "val", "test")
    ]
    assert [len(images) for images in seen] == [count] * 3
    assert len(seen[0] | seen[1] | seen[2]) == 3 * count


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_classes_are_balanced(task: str, split: str) -> None:
    labels = [label_of(task, split, index) for index in range(TASKS[task].sizes[split])]
    counts = np.bincount(labels, minlength=len(TASKS[task].classes))
    assert counts.min() > 0
    assert counts.max() - counts.min() <= 1


@pytest.mark.parametrize("task", [name for name in TASKS if name != CONTROL])
def test_a_task_has_between_8_and_20_classes(task: str) -> None:
    assert 8 <= len(TASKS[task].classes) <= 20


def test_the_control_spans_every_kind_of_concept() -> None:
    kinds = {concept.kind for concept in CLASSES[CONTROL].values()}
    assert len(TASKS[CONTROL].classes) == 40
    assert kinds == {concept.kind for task in CLASSES.values() for concept in task.values()}


@pytest.mark.parametrize("task", TASKS)
def test_a_template_has_one_place_for_the_class(task: str) -> None:
    assert TASKS[task].templates
    assert all(template.count("{}") == 1 for template in TASKS[task].templates)


def test_the_registry_needs_neither_numpy_nor_torch() -> None:
    code = (
        "import sys, atlas_cli.datasets.builtin as b; b.label_of('digits', 'test', 3); "
        "sys.exit(bool({'numpy', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_model_has_a_folder() -> None:
    assert all(builtin_model(name).is_dir() for name in BUILTIN_MODELS)
