"""Images of every kind become 8-bit RGB the right way up."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from atlas_cli.datasets import dataset
from atlas_cli.datasets.dataset import Dataset, Sample, decode
from atlas_cli.errors import DataError


def corner(path: Path) -> tuple[int, ...]:
    image = decode(path)
    assert image.mode == "RGB"
    return image.getpixel((0, 0))


def test_exif_rotation_is_applied(tmp_path: Path):
    image = Image.new("RGB", (4, 2), "white")
    exif = image.getexif()
    exif[0x0112] = 6  # the camera was held upright
    image.save(tmp_path / "a.jpg", exif=exif)
    assert decode(tmp_path / "a.jpg").size == (2, 4)


def test_palettes_become_colours(tmp_path: Path):
    Image.new("RGB", (8, 8), (10, 200, 30)).convert("P").save(tmp_path / "a.png")
    assert corner(tmp_path / "a.png") == pytest.approx((10, 200, 30), abs=26)


def test_transparency_lies_on_white(tmp_path: Path):
    Image.new("RGBA", (2, 2), (0, 0, 0, 0)).save(tmp_path / "a.png")
    assert corner(tmp_path / "a.png") == (255, 255, 255)
    Image.new("LA", (2, 2), (0, 128)).save(tmp_path / "b.png")
    assert corner(tmp_path / "b.png") == (127, 127, 127)
    palette = Image.new("P", (2, 2), 0)
    palette.putpalette([5, 6, 7])
    palette.save(tmp_path / "c.png", transparency=0)
    assert corner(tmp_path / "c.png") == (255, 255, 255)


def test_sixteen_bits_are_scaled_not_clipped(tmp_path: Path):
    values = np.array([[0, 257 * 100], [257 * 200, 65535]], dtype=np.uint16)
    Image.fromarray(values).save(tmp_path / "a.png")
    pixels = np.asarray(decode(tmp_path / "a.png"))
    assert pixels[..., 0].tolist() == [[0, 100], [200, 255]]


@pytest.mark.parametrize("mode", ["1", "L", "CMYK", "YCbCr"])
def test_other_modes_are_converted(tmp_path: Path, mode: str):
    Image.new("RGB", (2, 2), "white").convert(mode).save(tmp_path / "a.tif")
    assert corner(tmp_path / "a.tif") == pytest.approx((255, 255, 255), abs=1)


def test_an_animation_gives_its_first_frame(tmp_path: Path):
    frames = [Image.new("RGB", (2, 2), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert corner(tmp_path / "a.gif") == (255, 0, 0)


@pytest.mark.parametrize("content", [b"", b"not an image", b"\x89PNG\r\n\x1a\n", b"GIF89a"])
def test_what_is_no_image_is_named(tmp_path: Path, content: bytes):
    (tmp_path / "a.png").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.png: cannot be decoded"):
        decode(tmp_path / "a.png")


def test_a_truncated_jpeg_is_an_error_not_a_grey_half(tmp_path: Path):
    random = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(random).save(tmp_path / "a.jpg")
    whole = (tmp_path / "a.jpg").read_bytes()
    (tmp_path / "a.jpg").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"a\.jpg: cannot be decoded: image file is truncated"):
        decode(tmp_path / "a.jpg")


def test_floating_point_pixels_are_refused(tmp_path: Path):
    Image.fromarray(np.zeros((2, 2), dtype=np.float32)).save(tmp_path / "a.tif")
    with pytest.raises(DataError, match="floating-point pixels"):
        decode(tmp_path / "a.tif")


EPS = b"""%!PS-Adobe-3.0 EPSF-3.0
%%BoundingBox: 0 0 8 8
%%EndComments
0 0 8 8 rectfill
showpage
"""


def test_only_raster_formats_are_opened_whatever_a_file_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Pillow runs Ghostscript for EPS; here a program of that name would leave a trace."""
    program = tmp_path / "bin" / "gs"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    (tmp_path / "x.png").write_bytes(EPS)
    with pytest.raises(DataError, match=r"x\.png: cannot be decoded: is no image of a known"):
        decode(tmp_path / "x.png")
    assert not (tmp_path / "ran").exists()


def test_whatever_a_decoder_raises_is_one_line(tmp_path: Path):
    """Decoders of damaged files raise more than OSError; a pipe would be waited for."""
    for name, content in {
        "a.gif": b"GIF89a\x01\x00\x01\x00\x80\x00\x00" + b"\xff" * 30,
        "b.tif": b"II*\x00\x08\x00\x00\x00\x01\x00\x00\x01\x04\x00\xff\xff\xff\xff\x01\x00\x00\x00",
        "c.ppm": b"P6 1000000 1000000 255\n",
        "d.png": b"",
    }.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=f"{name}: cannot be decoded: .+"):
            decode(tmp_path / name)
    os.mkfifo(tmp_path / "e.png")
    with pytest.raises(DataError, match="is not a regular file"):
        decode(tmp_path / "e.png")
    with pytest.raises(DataError, match=r"e\.png: cannot be read"):
        dataset.content(Dataset(samples=(Sample("e.png", 0),), root=tmp_path), Sample("e.png", 0))
