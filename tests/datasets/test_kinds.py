"""Kinds of datasets are registered; a kind of one's own gives paths, PIL images or arrays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from atlas_cli.datasets.dataset import (
    Dataset,
    Sample,
    content,
    has_split,
    load,
    open_dataset,
    task_name,
)
from atlas_cli.errors import DataError, UsageError
from atlas_cli.registry import DATASET_KINDS, dataset_kind

RED = np.full((8, 8, 3), (255, 0, 0), dtype=np.uint8)


@pytest.fixture(autouse=True)
def kinds(tmp_path: Path) -> Iterator[None]:
    """Two kinds: one with splits whose images come in every form, and one that makes mistakes."""
    file = tmp_path / "red.png"
    Image.fromarray(RED).save(file)
    images = (RED, Image.fromarray(RED), file, str(file), lambda: RED)

    @dataset_kind("forms", splits=("train", "test"))
    def open_forms(address: str, split: str | None) -> Dataset:
        samples = tuple(Sample(f"{split}-{n}", n % 2, image) for n, image in enumerate(images))
        return Dataset(classes=("one", "two"), samples=samples)

    @dataset_kind("wrong")
    def open_wrong(address: str, split: str | None) -> object:
        samples = (Sample("a", 2, RED), Sample("b", 0, "nowhere.png"))
        return {"label": Dataset(classes=("one", "two"), samples=samples)}.get(address)

    yield
    for name in ("forms", "wrong"):
        DATASET_KINDS._entries.pop(name)
        DATASET_KINDS._origins.pop(name)


def test_images_of_every_form_are_read_and_hashed():
    dataset = open_dataset("forms:anything")
    assert (dataset.name, dataset.split) == ("forms:anything", "test")
    assert task_name(dataset) == "anything"
    assert all(load(dataset, s).getpixel((3, 3)) == (255, 0, 0) for s in dataset.samples)
    pixels, *others = [content(dataset, sample) for sample in dataset.samples]
    assert others[0] == others[3] == pixels
    assert others[1] == others[2] != pixels  # the bytes of the file
    assert load(dataset, dataset.unlabelled().samples[0]).getpixel((0, 0)) == (255, 0, 0)


def test_a_split_is_chosen_among_those_that_the_kind_names():
    assert open_dataset("forms:x", split="train").samples[0].key == "train-0"
    assert [has_split("forms:x", split) for split in ("train", "val")] == [True, False]
    with pytest.raises(UsageError, match=r"forms:x: no split val .it has train, test; use --split"):
        open_dataset("forms:x", split="val")
    with pytest.raises(UsageError, match=r"wrong:label: no split train .it has no splits"):
        open_dataset("wrong:label", split="train")


def test_what_a_kind_gives_is_checked():
    with pytest.raises(DataError, match="wrong:other: the kind 'wrong' gave a NoneType"):
        open_dataset("wrong:other")
    with pytest.raises(DataError, match="image a has label 2, but there are 2 classes"):
        open_dataset("wrong:label")
    dataset = open_dataset("forms:x")
    with pytest.raises(DataError, match="forms:x: image test-0: cannot be decoded"):
        load(dataset, replace(dataset.samples[0], image=3.5))


def test_an_unknown_kind_is_answered_with_the_nearest():
    with pytest.raises(UsageError, match="no such data: form:x; did you mean 'forms'"):
        open_dataset("form:x")
    with pytest.raises(UsageError, match="no such data: cvs:x; did you mean 'csv'"):
        open_dataset("cvs:x")
