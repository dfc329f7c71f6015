"""What data can be named, what is on this machine, and where: for `atlas data`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from atlas_cli.datasets.dataset import open_dataset
from atlas_cli.datasets.from_torchvision import data_root, torchvision_names
from atlas_cli.datasets.kept import list_kept
from atlas_cli.datasets.known import find_known, known_datasets

# What each dataset of torchvision has below its root.
_LAYOUT = {
    "CIFAR10": "cifar-10-batches-py",
    "CIFAR100": "cifar-100-python",
    "Caltech101": "caltech101",
    "Caltech256": "caltech256",
    "Country211": "country211",
    "DTD": "dtd",
    "EuroSAT": "eurosat",
    "FER2013": "fer2013",
    "FGVCAircraft": "fgvc-aircraft-2013b",
    "FashionMNIST": "FashionMNIST/raw",
    "Flowers102": "flowers-102",
    "Food101": "food-101",
    "GTSRB": "gtsrb",
    "ImageNet": "meta.bin",
    "Imagenette": "imagenette2",
    "KMNIST": "KMNIST/raw",
    "MNIST": "MNIST/raw",
    "OxfordIIITPet": "oxford-iiit-pet",
    "PCAM": "pcam",
    "RenderedSST2": "rendered-sst2",
    "STL10": "stl10_binary",
    "SUN397": "SUN397",
    "SVHN": "train_32x32.mat",
    "StanfordCars": "stanford_cars",
}


@dataclass(frozen=True)
class DataEntry:
    """Data that can be named. `place` is where it is, or empty if it is not on this machine."""

    reference: str
    classes: int | None
    prompts: int | None
    images: int | None
    place: str


def list_data() -> Iterator[DataEntry]:
    """Built-in tasks, datasets of torchvision, mirrors on the Hub, and what was fetched before."""
    from atlas_cli.datasets.builtin import TASKS

    for name, task in TASKS.items():
        images = sum(task.sizes.values())
        yield DataEntry(
            f"builtin:{name}", len(task.classes), len(task.templates), images, "built in"
        )
    for name in torchvision_names():
        classes, prompts = _counts(name)
        yield DataEntry(f"torchvision:{name}", classes, prompts, None, _place(name))
    for known in known_datasets().values():
        if known.hub:
            classes, prompts = _counts(known.name)
            yield DataEntry(f"hf:{known.hub}", classes, prompts, None, "")
    for row in list_kept():
        shots = f", {row['shots']} shots" if row["shots"] else ""
        reference = f"{row['reference']} ({row['split']}{shots})"
        yield DataEntry(reference, None, None, row["images"], row["folder"])


def names_of(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The class names and prompts of a well-known dataset, or of any data reference."""
    known = find_known(text) if not Path(text).exists() and ":" not in text else None
    if known and known.classes:
        return known.classes, known.templates
    dataset = open_dataset(text, preferred=("test", "val", "train"))
    return dataset.classes, dataset.templates


def _counts(name: str) -> tuple[int | None, int | None]:
    known = find_known(name)
    return (len(known.classes) or None, len(known.templates)) if known else (None, None)


def _place(name: str) -> str:
    root = data_root()
    for folder in (root, root / name.lower(), root / name):
        if (folder / _LAYOUT[name]).exists():
            return str(folder / _LAYOUT[name])
    return ""
