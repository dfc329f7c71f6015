"""Pixels that are decoded once give what the model's own transform gives, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import HALF, TINY_CONFIG, write_images
from PIL import Image

from atlas_cli.datasets.dataset import Dataset, load, open_dataset
from atlas_cli.datasets.pixels import Pixels, View, view_of
from atlas_cli.errors import DataError
from atlas_cli.models.clip import build
from atlas_cli.models.folders import Blueprint

ROOM = 2**30
OPENAI = {
    "mean": [0.48145466, 0.4578275, 0.40821073],
    "std": [0.26862954, 0.26130258, 0.27577711],
}
CONFIGS = {
    "halves": HALF,
    "shortest": {"size": 32, "resize_mode": "shortest", "interpolation": "bicubic", **OPENAI},
    "bilinear": {"size": 32, "resize_mode": "shortest", "interpolation": "bilinear", **OPENAI},
    "squash": {"size": 32, "resize_mode": "squash", "interpolation": "bicubic", **OPENAI},
    "longest": {"size": 32, "resize_mode": "longest", "fill_color": 7, **OPENAI},
}
SIZES = [(40, 48), (48, 40), (32, 32), (200, 31), (20, 20), (123, 457)]


def preprocess_of(config: dict):
    return build(Blueprint(TINY_CONFIG, config))[1]


@pytest.fixture(scope="module")
def view() -> View:
    return view_of(preprocess_of(HALF))


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Noise of several sizes, in two classes."""
    random = np.random.default_rng(0)
    for number, (width, height) in enumerate(SIZES):
        folder = tmp_path / "images" / ("cat" if number % 2 else "dog")
        folder.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return tmp_path / "images"


def crop(pixels: Pixels, indices: Sequence[int], seed: int = 0) -> torch.Tensor:
    return pixels.cropped(indices, torch.Generator().manual_seed(seed), mirror=True)


def originals(dataset: Dataset, preprocess) -> torch.Tensor:
    return torch.stack([preprocess(load(dataset, sample)) for sample in dataset.samples])


def every(dataset: Dataset) -> list[int]:
    return list(range(len(dataset.samples)))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_fixed_view_is_the_models_own_preprocessing_bit_for_bit(images: Path, config: dict):
    dataset, preprocess = open_dataset(str(images)), preprocess_of(config)
    view = view_of(preprocess)
    assert view.size == 32
    found = Pixels(dataset, view, ROOM).fixed(every(dataset))
    assert found.shape == (len(SIZES), 3, 32, 32)
    assert torch.equal(found, originals(dataset, preprocess))


@pytest.mark.parametrize("share", [0.0, 0.4], ids=["nothing", "some images"])
def test_images_that_there_is_no_room_for_give_the_same_numbers(
    images: Path, view: View, share: float
):
    dataset = open_dataset(str(images))
    whole = Pixels(dataset, view, ROOM)
    decoded = sum(3 * 32 * 32 + 3 * height * min(width, 457) for width, height in SIZES)
    tight = Pixels(dataset, view, int(share * decoded))
    for _ in range(2):
        assert torch.equal(tight.fixed(every(dataset)), whole.fixed(every(dataset)))
        assert torch.equal(crop(tight, every(dataset)), crop(whole, every(dataset)))


def test_kept_images_are_decoded_once_and_others_again(tmp_path: Path, view: View):
    """A file that is gone can only come from memory."""
    folder = write_images(tmp_path / "photos")
    dataset = open_dataset(str(folder))
    kept, unkept = Pixels(dataset, view, ROOM), Pixels(dataset, view, 0)
    before = kept.fixed(every(dataset))
    unkept.fixed(every(dataset))
    for path in folder.rglob("*.png"):
        path.unlink()
    assert torch.equal(kept.fixed(every(dataset)), before)
    crop(kept, every(dataset))
    with pytest.raises(DataError, match="no such image"):
        unkept.fixed(every(dataset))


def test_images_may_be_asked_for_in_any_order_and_repeatedly(images: Path, view: View):
    dataset = open_dataset(str(images))
    for budget in (ROOM, 0):
        pixels = Pixels(dataset, view, budget)
        one_by_one = torch.cat([pixels.fixed([index]) for index in every(dataset)])
        order = [3, 0, 3, 3, 5, 1]
        assert torch.equal(pixels.fixed(order), one_by_one[order])


def test_labels_are_those_of_the_dataset_and_minus_one_for_none(images: Path, view: View):
    dataset = open_dataset(str(images))
    assert Pixels(dataset, view, 0).labels.tolist() == [0, 0, 0, 1, 1, 1]  # cat before dog
    assert Pixels(dataset.unlabelled(), view, 0).labels.tolist() == [-1] * 6


def test_a_rotated_image_stands_upright(tmp_path: Path, view: View):
    folder = write_images(tmp_path / "photos", count=1)
    pixels = np.random.default_rng(1).integers(0, 256, (30, 60, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held so that the top is on the right
    Image.fromarray(pixels).save(folder / "cat" / "1.png", exif=exif)
    upright = Image.fromarray(np.rot90(pixels, -1).copy())
    dataset = open_dataset(str(folder))
    found = Pixels(dataset, view, ROOM).fixed([1])
    assert torch.equal(found[0], preprocess_of(HALF)(upright))


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "1", "LA"])
def test_grey_and_other_modes_become_colours(tmp_path: Path, view: View, mode: str):
    folder = write_images(tmp_path / "photos", count=1)
    pixels = np.random.default_rng(1).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    Image.fromarray(pixels).convert(mode).save(folder / "cat" / "1.png")
    dataset = open_dataset(str(folder))
    pixels_of = Pixels(dataset, view, ROOM)
    wanted = preprocess_of(HALF)(load(dataset, dataset.samples[1]))
    assert torch.equal(pixels_of.fixed([1])[0], wanted)
    found = crop(pixels_of, [0, 1])
    assert found.shape == (2, 3, 32, 32)
    if mode == "L":
        torch.testing.assert_close(found[1, 0], found[1, 2])


def test_a_file_that_cannot_be_decoded_is_named(tmp_path: Path, view: View):
    folder = write_images(tmp_path / "photos", count=1)
    (folder / "cat" / "1.png").write_bytes(b"\x89PNG")
    pixels = Pixels(open_dataset(str(folder)), view, ROOM)
    with pytest.raises(DataError, match=r"1\.png: cannot be decoded"):
        pixels.fixed([0, 1])


# Crops ----------------------------------------------------------------------------------------


def test_a_crop_of_a_plain_image_is_plain_and_normalised(tmp_path: Path):
    folder = write_images(tmp_path / "photos", count=1)
    Image.new("RGB", (50, 90), (10, 20, 30)).save(folder / "cat" / "1.png")
    view = view_of(preprocess_of(CONFIGS["shortest"]))
    found = crop(Pixels(open_dataset(str(folder)), view, ROOM), [1])
    wanted = [
        (value / 255 - mean) / std
        for value, mean, std in zip((10, 20, 30), OPENAI["mean"], OPENAI["std"], strict=True)
    ]
    assert found.amin((0, 2, 3)).tolist() == pytest.approx(wanted, abs=1e-4)
    assert found.amax((0, 2, 3)).tolist() == pytest.approx(wanted, abs=1e-4)


def test_crops_depend_on_the_generator_alone(images: Path, view: View):
    dataset = open_dataset(str(images))
    pixels = Pixels(dataset, view, ROOM)
    first, again, other = (crop(pixels, [0, 1, 2], seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_crops_are_mirrored_only_if_that_is_asked_for(tmp_path: Path, view: View):
    folder = write_images(tmp_path / "photos", count=1)
    ramp = np.tile(np.arange(0, 240, 5, dtype=np.uint8)[None, :, None], (48, 1, 3))
    Image.fromarray(ramp).save(folder / "cat" / "1.png")
    pixels = Pixels(open_dataset(str(folder)), view, ROOM)
    rising = {}
    for mirror in (True, False):
        random = torch.Generator().manual_seed(0)
        found = pixels.cropped([1] * 30, random, mirror=mirror)
        rising[mirror] = found[:, 0, 0, -1] > found[:, 0, 0, 0]
    assert rising[False].all()
    assert 5 < rising[True].sum() < 25


def test_a_large_image_is_kept_smaller_and_its_crops_still_show_it(tmp_path: Path, view: View):
    """A dark stripe across the middle: any crop of half the area is wide enough to show it."""
    folder = write_images(tmp_path / "photos", count=1)
    stripe = np.full((600, 900, 3), 255, dtype=np.uint8)
    stripe[:, 350:550] = 0
    Image.fromarray(stripe).save(folder / "cat" / "1.png")
    room = 3 * (32 * 32 + 48 * 72)  # the view of evaluation, and 1.5 times it to crop from
    pixels = Pixels(open_dataset(str(folder)), view, room)
    found = crop(pixels, [1] * 200)
    assert (found.amin((1, 2, 3)) < -0.99).all()
    assert (found.amax((1, 2, 3)) > 0.99).all()
    (folder / "cat" / "1.png").unlink()
    crop(pixels, [1])  # it did fit into the room


def test_fine_detail_of_a_large_image_is_averaged_not_skipped(tmp_path: Path, view: View):
    """A chessboard of single pixels is grey from afar."""
    folder = write_images(tmp_path / "photos", count=1)
    board = 255 * (np.indices((600, 900)).sum(axis=0) % 2)
    Image.fromarray(board.astype(np.uint8)).save(folder / "cat" / "1.png")
    found = crop(Pixels(open_dataset(str(folder)), view, ROOM), [1] * 20)
    assert found.abs().max() < 0.1


def test_the_room_is_for_all_images_together(tmp_path: Path, view: View):
    folder = write_images(tmp_path / "photos", count=3)  # six images of 48 x 40 pixels
    one = 3 * (32 * 32 + 48 * 40)
    pixels = Pixels(open_dataset(str(folder)), view, 2 * one)
    pixels.fixed(range(6))
    for path in folder.rglob("*.png"):
        path.unlink()
    pixels.fixed([0, 1])
    for index in range(2, 6):
        with pytest.raises(DataError, match="no such image"):
            pixels.fixed([index])
