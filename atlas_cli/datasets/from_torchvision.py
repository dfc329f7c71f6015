"""Datasets that torchvision reads: torchvision:CIFAR10, below a folder of one's own.

The folder is ATLAS_DATA, which --data-root sets for one command, and `torchvision` in atlas's cache
otherwise. Nothing is downloaded unless --download, or ATLAS_DOWNLOAD, says so.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import URLError

from atlas_cli.datasets.dataset import DEFAULT_TEMPLATE, Dataset, Sample, pick_split
from atlas_cli.datasets.known import find_known, known_datasets, spelt
from atlas_cli.errors import AtlasError, DataError, UnreachableError, UsageError, nearest
from atlas_cli.io.files import cache_folder
from atlas_cli.registry import dataset_kind

if TYPE_CHECKING:
    from PIL import Image

_THREE = {"train": "train", "val": "val", "test": "test"}
_TWO = {"train": "train", "test": "test"}
# What torchvision calls the splits of datasets that have an argument `split`.
_SPLITS: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(("DTD", "Flowers102", "FGVCAircraft", "PCAM", "RenderedSST2"), _THREE),
    **dict.fromkeys(("SVHN", "GTSRB", "Food101", "STL10", "StanfordCars"), _TWO),
    "Country211": {"train": "train", "val": "valid", "test": "test"},
    "OxfordIIITPet": {"train": "trainval", "test": "test"},
    "ImageNet": {"train": "train", "val": "val"},
    "Imagenette": {"train": "train", "val": "val"},
    "FER2013": _TWO,
}
# Where torchvision keeps the classes of the images, and of lists of files with their classes.
_TARGETS = ("targets", "labels", "_labels", "y")
_PAIRS = ("samples", "_samples")


def data_root() -> Path:
    """The folder below which torchvision finds its datasets."""
    chosen = os.environ.get("ATLAS_DATA")
    return Path(chosen).expanduser() if chosen else cache_folder() / "torchvision"


def torchvision_names() -> list[str]:
    """The datasets of torchvision that are known here without importing it."""
    known = {one.torchvision for one in known_datasets().values() if one.torchvision}
    return sorted(known | set(_SPLITS) | {"Caltech101", "Caltech256"})


def _expand(address: str) -> list[str]:
    names = torchvision_names()
    if not address.isidentifier():
        raise UsageError(f"torchvision:{address}: expected a name such as torchvision:CIFAR10")
    folded = {name.lower(): name for name in names}
    return [f"torchvision:{folded.get(address.lower(), address)}"]


def _splits(address: str) -> list[str]:
    return list(_arguments(address, _class_of(address)))


@dataset_kind("torchvision", splits=_splits, expand=_expand, chooses_split=True)
def open_torchvision(address: str, split: str | None, preferred: Sequence[str]) -> Dataset:
    """A labelled image dataset of torchvision, laid out as torchvision does."""
    text, make = f"torchvision:{address}", _class_of(address)
    arguments = _arguments(address, make)
    chosen = pick_split(text, arguments, split, preferred)
    found = _open(text, make, arguments[chosen] if chosen else {})
    labels = _labels(found)
    known = find_known(address)
    given = [str(name) for name in getattr(found, "classes", None) or _numbers(labels, known)]
    classes = known.prompt_names(given, ordered=True) if known else spelt(given)
    samples = tuple(
        Sample(f"{number:06d}", label, partial(_image, found, number))
        for number, label in enumerate(labels)
        if label >= 0  # STL10 marks images without a class so
    )
    return Dataset(
        split=chosen or "all",
        classes=classes,
        templates=known.templates if known else (DEFAULT_TEMPLATE,),
        samples=samples,
    )


def _class_of(name: str) -> Any:
    from atlas_cli.io.torchvision_import import import_torchvision

    datasets = import_torchvision().datasets
    found = getattr(datasets, name, None)
    if not (inspect.isclass(found) and issubclass(found, datasets.VisionDataset)):
        listed = torchvision_names()
        raise UsageError(
            f"torchvision:{name}: torchvision has no such dataset{nearest(name, listed)} "
            f"(there are: {', '.join(listed)})"
        )
    return found


def _arguments(name: str, make: Any) -> dict[str, dict[str, Any]]:
    """The splits of a dataset, and how torchvision is asked for each; empty without splits."""
    takes = inspect.signature(make).parameters
    if "train" in takes:
        return {"train": {"train": True}, "test": {"train": False}}
    if "split" in takes:
        splits = _SPLITS.get(name, _TWO)
        return {ours: {"split": theirs} for ours, theirs in splits.items()}
    return {}


def _open(text: str, make: Any, arguments: Mapping[str, Any]) -> Any:
    """The dataset, in the folder of the data or in one of its own name below that."""
    root, name = data_root(), str(make.__name__)
    places = [root, root / name.lower(), root / name]
    download = bool(os.environ.get("ATLAS_DOWNLOAD"))
    fetch = {"download": True} if download and _can_download(make) else {}
    if fetch:
        _make_folder(root)
    with _explained(text, name), contextlib.redirect_stdout(sys.stderr):
        for place in places[:1] if fetch else places:
            try:
                return make(str(place), **arguments, **fetch)
            except (RuntimeError, FileNotFoundError, NotADirectoryError) as problem:
                if isinstance(lacking := problem.__context__, ModuleNotFoundError):
                    raise lacking from None  # how PCAM and StanfordCars say it
    way_out = "--download fetches it, --data-root names another folder"
    if fetch or not _can_download(make):
        way_out = "torchvision cannot download it; --data-root names another folder"
    raise DataError(f"{text}: not there, or not whole, below {root}; {way_out}")


def _can_download(make: Any) -> bool:
    return "download" in inspect.signature(make).parameters


def _make_folder(root: Path) -> None:
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise AtlasError(f"{root}: cannot be made: {problem.strerror}") from problem


@contextlib.contextmanager
def _explained(text: str, name: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as problem:
        raise AtlasError(
            f"{text}: torchvision needs {problem.name} to read it; run: pip install {problem.name}"
        ) from problem
    except URLError as problem:
        reason = f"could not be downloaded ({problem})"
        raise UnreachableError(f"{text}: {reason}") from problem
    except (TypeError, ValueError, OSError) as problem:
        raise DataError(f"{text}: torchvision cannot read it: {problem}") from problem


def _labels(found: Any) -> list[int]:
    """The classes of all images, from wherever this dataset keeps them."""
    for name in _TARGETS:
        if (values := getattr(found, name, None)) is not None and len(values) == len(found):
            return [int(value) for value in values]
    for name in _PAIRS:
        if (pairs := getattr(found, name, None)) is not None and len(pairs) == len(found):
            return [int(pair[1]) for pair in pairs]
    return [int(found[number][1]) for number in range(len(found))]


def _numbers(labels: Sequence[int], known: Any) -> list[str]:
    """Numbers for classes that torchvision has no names for."""
    count = max([len(known.classes) if known else 0, *(label + 1 for label in labels)])
    return [str(number) for number in range(count)]


def _image(found: Any, number: int) -> Image.Image:
    image: Image.Image = found[number][0]
    return image
