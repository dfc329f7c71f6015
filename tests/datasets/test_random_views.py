"""Crops of many images at once are those that Pillow would cut and resize one by one."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from atlas_cli.datasets.pixels import Crops, draw_crops, stack_images, take, whole_images
from atlas_cli.models.open_clip_import import import_open_clip

import_open_clip()  # mends torchvision
from torchvision.transforms import RandomResizedCrop  # noqa: E402


def picture(height: int, width: int, seed: int = 0) -> torch.Tensor:
    """Noise without the darkest and brightest greys, so that no filter overshoots the range."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(64, 192, (3, height, width), generator=random, dtype=torch.uint8)


def boxes(*rows: tuple[int, int, int, int], mirrored: bool = False) -> Crops:
    """Crops from (top, left, height, width)."""
    parts = (torch.tensor(part) for part in zip(*rows, strict=True))
    return Crops(*parts, torch.full((len(rows),), mirrored))


def pillow(image: torch.Tensor, box: tuple[int, int, int, int], size: int, mirrored: bool):
    top, left, height, width = box
    whole = Image.fromarray(image.permute(1, 2, 0).numpy())
    part = whole.crop((left, top, left + width, top + height))
    part = part.resize((size, size), Image.Resampling.BICUBIC)
    part = ImageOps.mirror(part) if mirrored else part
    return torch.from_numpy(np.array(part)).permute(2, 0, 1).float()


def sizes_of(*rows: tuple[int, int], times: int = 1) -> torch.Tensor:
    return torch.tensor(rows).repeat(times, 1)


def drawn(sizes: torch.Tensor, seed: int = 0) -> Crops:
    return draw_crops(sizes, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("mirrored", [False, True], ids=["as it is", "mirrored"])
@pytest.mark.parametrize(
    ("box", "size"),
    [
        ((0, 0, 90, 120), 32),  # the whole image, smaller
        ((7, 13, 64, 64), 32),  # a square, by exactly one half
        ((50, 3, 40, 101), 24),  # wide, to the left and below
        ((20, 30, 17, 11), 64),  # larger
        ((20, 30, 17, 90), 32),  # higher and narrower at once
        ((89, 119, 1, 1), 8),  # one pixel in the corner
    ],
)
def test_a_box_equals_the_one_that_pillow_cuts_and_resizes(
    box: tuple[int, int, int, int], size: int, mirrored: bool
):
    image = picture(90, 120)
    found = take(image[None], boxes(box, mirrored=mirrored), size)[0]
    assert found.shape == (3, size, size)
    assert (found - pillow(image, box, size, mirrored)).abs().max() <= 1.5


def test_every_image_of_a_stack_gets_its_own_box():
    images = torch.stack([picture(60, 60, seed) for seed in range(3)])
    wanted = [(0, 0, 60, 60), (10, 5, 40, 30), (31, 2, 20, 25)]
    found = take(images, boxes(*wanted), 16)
    for number, box in enumerate(wanted):
        assert (found[number] - pillow(images[number], box, 16, False)).abs().max() <= 1.5


def test_a_whole_image_of_the_right_size_is_left_as_it_is():
    images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    found = take(images, whole_images(sizes_of((32, 32), times=4)), 32)
    assert torch.equal(found, images.float())


def test_a_mirrored_image_is_the_image_from_right_to_left():
    image = torch.arange(48, dtype=torch.uint8).view(1, 3, 4, 4)
    found = take(image, boxes((0, 0, 4, 4), mirrored=True), 4)
    assert torch.equal(found, image.flip(3).float())


def test_grey_levels_stay_within_their_range():
    edges = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)
    edges[..., ::2] = 255
    found = take(edges, boxes((0, 0, 8, 8)), 33)  # where a cubic filter overshoots
    assert (found.min(), found.max()) == (0, 255)


def test_the_padding_of_a_stack_reaches_no_image():
    images = [picture(20, 50, 1), picture(64, 24, 2)]
    stacked, sizes = stack_images(images)
    assert stacked.shape == (2, 3, 64, 50)
    assert sizes.tolist() == [[20, 50], [64, 24]]
    found = take(stacked, whole_images(sizes), 32)
    for number, image in enumerate(images):
        alone = take(image[None], whole_images(sizes[number : number + 1]), 32)[0]
        torch.testing.assert_close(found[number], alone, rtol=0, atol=1e-3)


# Drawing boxes --------------------------------------------------------------------------------


def test_boxes_lie_within_their_own_image_and_keep_half_of_it_or_more():
    sizes = sizes_of((32, 32), (100, 75), (48, 64), (300, 200), (7, 7), times=400)
    crops = drawn(sizes)
    assert (crops.top >= 0).all()
    assert (crops.left >= 0).all()
    assert (crops.top + crops.height <= sizes[:, 0]).all()
    assert (crops.left + crops.width <= sizes[:, 1]).all()
    # Half a pixel of rounding at each side of the box.
    slack = (crops.height + crops.width + 1) / 2
    area = crops.height * crops.width
    assert (area + slack >= 0.5 * sizes.prod(dim=1)).all()


def test_boxes_reach_every_edge_of_an_image():
    sizes = sizes_of((24, 24), times=2000)
    crops = drawn(sizes)
    assert crops.top.min() == crops.left.min() == 0
    assert (crops.top + crops.height).max() == (crops.left + crops.width).max() == 24
    assert crops.height.max() == crops.width.max() == 24


def test_half_of_the_images_are_mirrored():
    share = drawn(sizes_of((24, 24), times=4000)).mirrored.float().mean().item()
    assert abs(share - 0.5) < 0.03  # four standard errors


def test_without_mirror_images_the_boxes_are_the_same():
    sizes = sizes_of((24, 30), times=50)
    plain = draw_crops(sizes, torch.Generator().manual_seed(0), mirror=False)
    assert not plain.mirrored.any()
    assert torch.equal(plain.left, drawn(sizes).left)
    assert torch.equal(plain.width, drawn(sizes).width)


@pytest.mark.parametrize("size", [(60, 60), (60, 90)])
def test_area_shape_and_place_are_distributed_as_in_torchvision(size: tuple[int, int]):
    torch.manual_seed(0)
    blank = Image.new("L", size[::-1])
    get = RandomResizedCrop.get_params
    wanted = torch.tensor([get(blank, [0.5, 1.0], [3 / 4, 4 / 3]) for _ in range(3000)])
    crops = drawn(sizes_of(size, times=3000))
    found = torch.stack([crops.top, crops.left, crops.height, crops.width], dim=1)
    for measure in (
        lambda box: (box[:, 2] * box[:, 3]).float(),
        lambda box: (box[:, 3] / box[:, 2]).log(),
        lambda box: box[:, 0].float(),
        lambda box: box[:, 1].float(),
    ):
        ours, theirs = measure(found), measure(wanted)
        error = math.sqrt((ours.var() + theirs.var()) / 3000)
        assert abs(ours.mean() - theirs.mean()) < 4 * error
        assert 0.9 < ours.std() / theirs.std() < 1.1


def test_the_same_seed_draws_the_same_boxes_and_another_draws_others():
    sizes = sizes_of((32, 48), times=20)
    first, again, other = drawn(sizes, 1), drawn(sizes, 1), drawn(sizes, 2)
    assert all(
        torch.equal(a, b) for a, b in zip(vars(first).values(), vars(again).values(), strict=True)
    )
    assert not torch.equal(first.top, other.top)


@pytest.mark.parametrize(
    ("size", "box"),
    [
        ((10, 1000), (10, 13)),  # no box of half its area is less than 4 to 3
        ((1000, 10), (13, 10)),
        ((1, 500), (1, 1)),
    ],
)
def test_a_very_long_image_gives_the_largest_centred_box(
    size: tuple[int, int], box: tuple[int, int]
):
    crops = drawn(sizes_of(size, times=50))
    assert set(zip(crops.height.tolist(), crops.width.tolist(), strict=True)) == {box}
    for start, length, side in ((crops.top, box[0], size[0]), (crops.left, box[1], size[1])):
        assert ((start + length / 2 - side / 2).abs() <= 1).all()


def test_an_image_of_one_pixel_is_its_own_crop():
    crops = drawn(sizes_of((1, 1), times=20))
    assert crops.height.tolist() == crops.width.tolist() == [1] * 20
    assert crops.top.tolist() == crops.left.tolist() == [0] * 20
