"""An image, from wherever it comes, as 8-bit RGB the right way up."""

from __future__ import annotations

from pathlib import Path

from PIL import Image, ImageOps

from atlas_cli import builtin
from atlas_cli.data import Dataset, Sample
from atlas_cli.errors import DataError


def load(dataset: Dataset, sample: Sample) -> Image.Image:
    """The image of a sample in RGB. Raises DataError that names a file that cannot be decoded."""
    if dataset.drawn:
        task, split, index = dataset.drawn, dataset.split, int(sample.key)
        return Image.fromarray(builtin.draw(task, split, index))
    return decode(dataset.root / sample.key)


def decode(path: Path) -> Image.Image:
    """Read a file as RGB: EXIF rotation applied, transparency laid on white, 16 bits made 8."""
    try:
        with Image.open(path) as image:
            image.load()
            return _to_rgb(ImageOps.exif_transpose(image))
    except FileNotFoundError as problem:
        raise DataError(f"{path}: no such image") from problem
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as problem:
        raise DataError(f"{path}: cannot be decoded: {_first_line(problem)}") from problem


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16-bit grey, which convert() would clip rather than scale
        return image.convert("I").point(lambda value: value * (1 / 257)).convert("L").convert("RGB")
    if image.mode == "F":
        raise ValueError("floating-point pixels have no defined range; save it with 8 or 16 bits")
    if image.has_transparency_data:
        page = image.convert("RGBA")
        white = Image.new("RGBA", page.size, "white")
        return Image.alpha_composite(white, page).convert("RGB")
    return image.convert("RGB")


def _first_line(problem: Exception) -> str:
    return (str(problem).splitlines() or [type(problem).__name__])[0]
