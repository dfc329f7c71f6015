"""A dataset: images and their classes, wherever they come from.

A data reference is KIND:ADDRESS, such as csv:photos.csv, or the path of a folder. Kinds are entries
of a registry, which plugins add to; each opens its addresses as a `Dataset`.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import logging
import math
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from atlas_cli.datasets.known import named_templates
from atlas_cli.errors import DataError, UsageError, nearest
from atlas_cli.io.files import open_regular
from atlas_cli.registry import DATASET_KINDS, Registered

if TYPE_CHECKING:
    import numpy.typing as npt
    from PIL import Image

    ImageLike: TypeAlias = Path | str | bytes | Image.Image | npt.NDArray[Any]

GRAMMAR = (
    "a folder with a sub-folder per class, a flat folder, csv:FILE, builtin:NAME, "
    "torchvision:NAME, hf:OWNER/NAME or wds:SHARDS.tar"
)
DEFAULT_TEMPLATE = "a photo of a {}."
SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Sample:
    """One image and its class, as a position among the classes, if it is known.

    `image` is a path, the bytes of an image file, a PIL image, an array (height, width, 3) of
    bytes, or a function that gives one of these. Without it, the image is the file `key` below the
    root of the dataset. `sha256` is the digest of its content, where that has been taken already.
    """

    key: str
    label: int | None
    image: ImageLike | Callable[[], ImageLike] | None = field(
        default=None, compare=False, repr=False
    )
    sha256: bytes | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Dataset:
    """Images with their classes.

    `keys_identify` says that name, split and key determine an image, so that its content need not
    be hashed, and that keys tell nothing about classes. `ignored` are files that are no images.
    """

    name: str = ""
    split: str = "all"
    classes: tuple[str, ...] = ()
    templates: tuple[str, ...] = (DEFAULT_TEMPLATE,)
    samples: tuple[Sample, ...] = ()
    root: Path = Path()
    keys_identify: bool = False
    ignored: tuple[str, ...] = ()

    @cached_property
    def labelled(self) -> bool:
        """Whether every image has a class."""
        return all(sample.label is not None for sample in self.samples)

    def unlabelled(self) -> Dataset:
        """The same images without labels."""
        return replace(self, samples=tuple(replace(s, label=None) for s in self.samples))


# References -----------------------------------------------------------------------------------


def expand_references(texts: Iterable[str]) -> list[str]:
    """Data references with `builtin:all` spelt out. Raises UsageError for an impossible one."""
    expanded: list[str] = []
    for text in texts:
        kind, address = _kind_of(text)
        expand: Callable[[str], list[str]] | None = kind.facts.get("expand")
        expanded += expand(address) if expand else [text]
    return expanded


def open_dataset(
    text: str,
    *,
    split: str | None = None,
    templates: Sequence[str] = (),
    preferred: Sequence[str] = ("test", "val"),
    shots: int | None = None,
    seed: int = 0,
) -> Dataset:
    """List the images behind a data reference, `shots` of every class if given.

    Without `split`, the first of `preferred` that exists is taken, else all images.
    `templates` replaces those that come with the data. No image is opened, but what is streamed
    is fetched, no more of it than the shots need.
    """
    (text,) = expand_references([text])
    kind, address = _kind_of(text)
    dataset: Dataset
    if kind.facts.get("chooses_split"):
        wanted = {"shots": shots, "seed": seed} if kind.facts.get("streams") else {}
        dataset = kind.function(address, split, preferred, **wanted)
    else:
        chosen = _choose_split(text, _splits_of(kind, address), [split] if split else preferred)
        dataset = _checked(text, chosen, kind.function(address, chosen))
    dataset = replace(dataset, name=text, templates=tuple(templates) or dataset.templates)
    return few_shot(dataset, shots, seed) if shots and dataset.labelled else dataset


def open_datasets(
    texts: Iterable[str],
    *,
    split: str | None = None,
    templates: Sequence[str] = (),
    shots: int | None = None,
    seed: int = 0,
) -> list[Dataset]:
    """The datasets behind data references, with `shots` images of every class if given."""
    checked = check_templates(templates, "templates")
    return [
        open_dataset(text, split=split, templates=checked, shots=shots, seed=seed)
        for text in expand_references(texts)
    ]


def has_split(text: str, split: str) -> bool:
    """Whether there is a split of that name behind a data reference."""
    (text,) = expand_references([text])
    return split in _splits_of(*_kind_of(text))


def _kind_of(text: str) -> tuple[Registered, str]:
    """The kind of a data reference, and the address that the kind understands."""
    name, colon, address = text.partition(":")
    if colon and name in DATASET_KINDS:
        return DATASET_KINDS[name], address
    if colon:
        check_exists(Path(text).expanduser(), nearest(name, DATASET_KINDS))
    return DATASET_KINDS["folder"], text


def check_exists(path: Path, hint: str = "") -> None:
    """Raise UsageError unless there is such a file or folder."""
    if not path.exists():
        raise UsageError(f"no such data: {path}{hint} (data is {GRAMMAR})")


def _splits_of(kind: Registered, address: str) -> Collection[str]:
    splits: Collection[str] | Callable[[str], Collection[str]] = kind.facts.get("splits", ())
    return splits(address) if callable(splits) else splits


def pick_split(
    text: str, splits: Collection[str], split: str | None, preferred: Sequence[str]
) -> str | None:
    """The split that was asked for, or the first preferred one; None if there are no splits."""
    if not split and not splits:
        return None
    return _choose_split(text, splits, [split] if split else preferred)


def _choose_split(text: str, splits: Collection[str], wanted: Sequence[str]) -> str | None:
    """The first of the wanted splits that exists; None for a dataset without splits."""
    for name in wanted:
        if name in splits:
            return name
    if not splits and len(wanted) > 1:
        return None
    listed = ", ".join(splits) or "no splits"
    raise UsageError(f"{text}: no split {' or '.join(wanted)} (it has {listed}; use --split)")


def _checked(text: str, split: str | None, dataset: object) -> Dataset:
    """What a plugin returned for a reference, in the types that the rest of atlas expects."""
    if not isinstance(dataset, Dataset):
        kind = text.partition(":")[0]
        raise DataError(f"{text}: the kind '{kind}' gave a {type(dataset).__name__}, not a Dataset")
    classes, samples = tuple(dataset.classes), tuple(dataset.samples)
    if not samples:
        raise DataError(f"{text}: has no images")
    for sample in samples:
        if sample.label is not None and not 0 <= sample.label < len(classes):
            raise DataError(
                f"{text}: image {sample.key} has label {sample.label}, "
                f"but there are {len(classes)} classes"
            )
    templates = check_templates(dataset.templates, text)
    return replace(
        dataset, split=split or dataset.split, classes=classes, samples=samples, templates=templates
    )


# Images ---------------------------------------------------------------------------------------


def load(dataset: Dataset, sample: Sample) -> Image.Image:
    """The image of a sample in RGB. Raises DataError that names an image which cannot be read."""
    from PIL import Image

    found = _image_of(dataset, sample)
    if isinstance(found, Path):
        return decode(found)
    if isinstance(found, bytes):
        return decode(io.BytesIO(found), f"{dataset.name}: image {sample.key}")
    try:
        if not isinstance(found, Image.Image):
            found = Image.fromarray(found)
        return _to_rgb(found)
    except (ValueError, TypeError, AttributeError) as problem:
        where = f"{dataset.name}: image {sample.key}"
        raise DataError(f"{where}: cannot be decoded: {_first_line(problem)}") from problem


def content(dataset: Dataset, sample: Sample) -> bytes:
    """The bytes that make an image what it is: of its file, or else its pixels with their shape."""
    found = _image_of(dataset, sample)
    if isinstance(found, Path):
        try:
            with open_regular(found) as file:
                return file.read()
        except OSError as problem:
            raise DataError(f"{found}: cannot be read: {problem.strerror}") from problem
    if isinstance(found, bytes):
        return found
    import numpy as np

    pixels = np.asarray(found)
    return f"{pixels.shape} {pixels.dtype}\n".encode() + pixels.tobytes()


def _image_of(dataset: Dataset, sample: Sample) -> Path | bytes | Image.Image | npt.NDArray[Any]:
    found = sample.image() if callable(sample.image) else sample.image
    if found is None:
        return dataset.root / sample.key
    return Path(found).expanduser() if isinstance(found, str) else found


def decode(file: Path | io.BytesIO, where: str = "") -> Image.Image:
    """Read an image as RGB: EXIF rotation applied, transparency laid on white, 16 bits made 8."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    where = where or str(file)
    try:
        with (
            open_regular(file) if isinstance(file, Path) else nullcontext(file) as opened,
            Image.open(opened, formats=_raster_formats()) as image,
        ):
            if math.prod(image.size) > _PIXELS:
                raise ValueError(f"has {math.prod(image.size):,} pixels; {_PIXELS:,} are the most")
            image.load()
            return _to_rgb(ImageOps.exif_transpose(image))
    except FileNotFoundError as problem:
        raise DataError(f"{where}: no such image") from problem
    except UnidentifiedImageError as problem:
        raise DataError(f"{where}: cannot be decoded: is no image of a known format") from problem
    except Exception as problem:  # a damaged image can make a decoder raise anything
        raise DataError(f"{where}: cannot be decoded: {_first_line(problem)}") from problem


_PIXELS = 178_956_970  # what Pillow refuses, too, as more than a picture has
# Others are opened neither by the name nor by the content of a file: Pillow runs a program for EPS.
_FORMATS = {
    "AVIF": "Avif",
    "BMP": "Bmp",
    "GIF": "Gif",
    "JPEG": "Jpeg",
    "PNG": "Png",
    "PPM": "Ppm",
    "TIFF": "Tiff",
    "WEBP": "WebP",
}


@cache
def _raster_formats() -> tuple[str, ...]:
    """The formats that this Pillow reads; importing a plugin registers it."""
    from PIL import Image

    for name in _FORMATS.values():
        with suppress(ImportError):
            importlib.import_module(f"PIL.{name}ImagePlugin")
    # What Pillow has to say of a damaged file is either an exception or no matter.
    warnings.filterwarnings("ignore", module="PIL")
    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # see _PIXELS
    logging.getLogger("PIL").setLevel(logging.CRITICAL)
    return tuple(name for name in _FORMATS if name in Image.OPEN)


def _to_rgb(image: Image.Image) -> Image.Image:
    from PIL import Image

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


# Subsets --------------------------------------------------------------------------------------


def few_shot(dataset: Dataset, shots: int, seed: int) -> Dataset:
    """`shots` images of every class, the same on every machine; fewer shots are a subset of more.

    Images are ranked by the sha256 of seed and file name without its ending, so neither the order
    of the files nor a library's random generator has a say.
    """
    kept: list[Sample] = []
    for label, name in enumerate(dataset.classes):
        members = [sample for sample in dataset.samples if sample.label == label]
        if len(members) < shots:
            raise DataError(
                f"{dataset.name}: class '{name}' has {len(members)} images, fewer than {shots}"
            )
        kept += sorted(members, key=lambda sample: rank(sample.key, seed))[:shots]
    return replace(dataset, samples=tuple(kept))


def share_of(dataset: Dataset, fraction: float, seed: int) -> Dataset:
    """A fraction of every class, rounded up, by the same ranks as few_shot."""
    kept: list[Sample] = []
    for label in range(len(dataset.classes)):
        members = [sample for sample in dataset.samples if sample.label == label]
        count = math.ceil(len(members) * fraction)
        kept += sorted(members, key=lambda sample: rank(sample.key, seed))[:count]
    return replace(dataset, samples=tuple(kept))


def draw_samples(samples: Sequence[Sample], most: int) -> tuple[Sample, ...]:
    """As many samples as that, or all, in their order; those with the lowest ranks of seed 0."""
    if len(samples) <= most:
        return tuple(samples)
    chosen = sorted(range(len(samples)), key=lambda n: (*rank(samples[n].key, 0), n))[:most]
    return tuple(samples[number] for number in sorted(chosen))


def rank(key: str, seed: int) -> tuple[bytes, str]:
    """Where an image stands among those of its class when shots are drawn."""
    return hashlib.sha256(f"{seed}:{Path(key).stem}".encode()).digest(), key


# Names ----------------------------------------------------------------------------------------

_SPLIT = re.compile(r"(val|valid|validation|train|test)$")


def check_templates(templates: Iterable[str], where: str) -> tuple[str, ...]:
    """The templates, each with exactly one {} for the class name. Raises UsageError.

    The name of a well-known dataset stands for its prompts.
    """
    checked: list[str] = []
    for text in templates:
        checked += [text] if "{" in text else named_templates(text, where)
    for template in checked:
        if template.count("{}") != 1 or template.replace("{}", "").count("{"):
            raise UsageError(f"{where}: '{template}' needs one {{}} where the class name goes")
    return tuple(checked)


def task_name(dataset: Dataset) -> str:
    """What a task is called: the last part of its address, without an ending."""
    kind, colon, address = dataset.name.partition(":")
    if colon and kind in DATASET_KINDS:
        if DATASET_KINDS[kind].facts.get("streams"):  # OWNER/NAME:CONFIG@SPLIT, NAME-{00..10}.tar
            address = re.split(r"[:@{]", address.partition("://")[2] or address)[0].rstrip("-_/")
        return Path(address).stem or kind
    return Path(dataset.name).stem or dataset.root.resolve().name


def plain_name(name: str) -> str:
    """A name by which the same task is known: small letters, and no word for a split at its end."""
    return _SPLIT.sub("", re.sub(r"[^a-z0-9]", "", name.lower()))
