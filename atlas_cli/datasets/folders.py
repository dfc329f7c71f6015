"""Folders of images and tables of image files as datasets."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from atlas_cli.datasets.dataset import (
    DEFAULT_TEMPLATE,
    GRAMMAR,
    Dataset,
    Sample,
    check_exists,
    check_templates,
)
from atlas_cli.errors import DataError, UsageError
from atlas_cli.registry import dataset_kind

_SPLITS = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}
SUFFIXES = frozenset(
    ".avif .bmp .gif .jfif .jpeg .jpg .pgm .png .ppm .tif .tiff .webp".split()  # noqa: SIM905
)


# Folders --------------------------------------------------------------------------------------


def _folder_splits(address: str) -> dict[str, Path]:
    return _split_folders(_folders(Path(address).expanduser()))


def _check_folder(address: str) -> list[str]:
    check_exists(Path(address).expanduser())
    return [address]


@dataset_kind("folder", splits=_folder_splits, expand=_check_folder, chooses_split=True)
def open_folder(address: str, split: str | None, preferred: Sequence[str]) -> Dataset:
    """A folder with a sub-folder per class, or of images without labels, perhaps in splits."""
    text, root = address, Path(address).expanduser()
    if not root.is_dir():
        raise DataError(f"{text}: expected a folder, found a file (csv:{text} for a table)")
    folders = _folders(root)
    if splits := _split_folders(folders):
        chosen = _choose_split(text, splits, [split] if split else preferred)
        keys = sorted({child.name for folder in splits.values() for child in _folders(folder)})
        return _from_classes(root, splits[chosen], chosen, keys)
    if split:
        raise UsageError(
            f"{text}: has no split folders ({', '.join(_SPLITS)}) to take {split} from"
        )
    return _from_classes(root, root, "all", [folder.name for folder in folders])


def _split_folders(folders: Sequence[Path]) -> dict[str, Path]:
    """The splits that these folders are, or nothing unless each of them is one."""
    splits = {
        name: folder
        for name, spellings in _SPLITS.items()
        for folder in folders
        if folder.name in spellings
    }
    return splits if len(splits) == len(folders) else {}


def _choose_split(text: str, splits: dict[str, Path], wanted: Sequence[str]) -> str:
    for name in wanted:
        if name in splits:
            return name
    found = ", ".join(splits)
    raise UsageError(f"{text}: no {' or '.join(wanted)} folder (it has {found}; use --split)")


def _from_classes(root: Path, folder: Path, split: str, keys: Sequence[str]) -> Dataset:
    """The images of one folder, by class if there are classes."""
    if keys and (loose := _images(folder)[0]):
        raise DataError(f"{folder}: has images beside class folders, such as {loose[0].name}")
    samples: list[Sample] = []
    ignored: list[str] = []
    for label, key in enumerate(keys) if keys else [(None, ".")]:
        images, others = _images(folder / key) if (folder / key).is_dir() else ([], [])
        if not images and label is not None:
            raise DataError(f"{folder}: class '{key}' has no images")
        samples += [Sample(image.relative_to(root).as_posix(), label) for image in images]
        ignored += [other.relative_to(root).as_posix() for other in others]
    if not samples:
        raise DataError(f"{folder}: has no images (data is {GRAMMAR})")
    return Dataset(
        split=split,
        classes=_class_names(root, keys),
        templates=_templates(root),
        samples=tuple(samples),
        root=root,
        ignored=tuple(name for name in ignored if Path(name).name not in _COMPANIONS),
    )


_COMPANIONS = frozenset({"classnames.txt", "templates.txt"})


def _folders(folder: Path) -> list[Path]:
    return [path for path in _entries(folder) if path.is_dir()]


def _images(folder: Path) -> tuple[list[Path], list[Path]]:
    """The image files of a folder, by their ending, and the other files."""
    files = [path for path in _entries(folder) if path.is_file()]
    images = [path for path in files if path.suffix.lower() in SUFFIXES]
    return images, [path for path in files if path.suffix.lower() not in SUFFIXES]


def _entries(folder: Path) -> list[Path]:
    """What a folder shows, sorted by name; hidden entries are left out."""
    try:
        found = [path for path in folder.iterdir() if not path.name.startswith(".")]
    except OSError as problem:
        raise DataError(f"{folder}: cannot be read: {problem.strerror}") from problem
    return sorted(found, key=lambda path: path.name)


def _class_names(root: Path, keys: Sequence[str]) -> tuple[str, ...]:
    """Names for prompts: classnames.txt, a line per class in order, or the folder names."""
    path = root / "classnames.txt"
    if not path.is_file():
        return tuple(key.replace("_", " ") for key in keys)
    names = _lines(path)
    if keys and len(names) != len(keys):
        raise DataError(f"{path}: has {len(names)} names for {len(keys)} classes")
    return tuple(names)


def _templates(root: Path) -> tuple[str, ...]:
    path = root / "templates.txt"
    return check_templates(_lines(path), str(path)) if path.is_file() else (DEFAULT_TEMPLATE,)


def _lines(path: Path) -> list[str]:
    """The lines of a text file that are not empty."""
    try:
        return [line.strip() for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as problem:
        raise DataError(f"{path}: cannot be read as UTF-8 text") from problem


# Tables ---------------------------------------------------------------------------------------


def _table_splits(address: str) -> set[str]:
    return {row["split"] for row in _rows(Path(address).expanduser()) if "split" in row}


def _check_table(address: str) -> list[str]:
    check_exists(Path(address).expanduser())
    return [f"csv:{address}"]


@dataset_kind("csv", splits=_table_splits, expand=_check_table, chooses_split=True)
def open_table(address: str, split: str | None, preferred: Sequence[str]) -> Dataset:
    """A CSV file with a column `path`, and optionally `label` and `split`."""
    path = Path(address).expanduser()
    rows = _rows(path)
    if split or "split" in rows[0]:
        split = split or preferred[0]
        rows = [row for row in rows if row.get("split") == split]
        if not rows:
            raise DataError(f"{path}: no row has split '{split}'")
    keys = sorted({row["label"] for row in rows}) if "label" in rows[0] else []
    index = {key: label for label, key in enumerate(keys)}
    samples = [Sample(row["path"], index[row["label"]] if keys else None) for row in rows]
    root = path.parent
    return Dataset(
        split=split or "all",
        classes=_class_names(root, keys),
        templates=_templates(root),
        samples=tuple(samples),
        root=root,
    )


def _rows(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, strict=True)
            rows = list(reader)
            columns = reader.fieldnames or []
    except (OSError, UnicodeDecodeError, csv.Error) as problem:
        raise DataError(f"{path}: cannot be read as a CSV table: {problem}") from problem
    if "path" not in columns:
        raise DataError(f"{path}: needs a column 'path' (and 'label'), found {', '.join(columns)}")
    for number, row in enumerate(rows, start=2):
        if None in row or None in row.values() or not all(row[c] for c in columns if c != "split"):
            raise DataError(f"{path}: line {number} does not have a value for every column")
    if not rows:
        raise DataError(f"{path}: has no rows")
    return rows
