"""What a task is called, and by which name it is known again."""

from __future__ import annotations

import csv
import hashlib
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from atlas_cli.datasets import builtin
from atlas_cli.errors import DataError, UsageError, nearest

GRAMMAR = "a folder with a sub-folder per class, a flat folder, csv:FILE or builtin:NAME"
DEFAULT_TEMPLATE = "a photo of a {}."
SPLITS = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}
SUFFIXES = frozenset(
    ".avif .bmp .gif .jfif .jpeg .jpg .pgm .png .ppm .tif .tiff .webp".split()  # noqa: SIM905
)


@dataclass(frozen=True)
class Sample:
    """One image: where it is below the dataset's root, and its class, if it is known."""

    key: str
    label: int | None


@dataclass(frozen=True)
class Dataset:
    """Images with their classes. `drawn` names the built-in task they are drawn from."""

    name: str
    split: str
    classes: tuple[str, ...]
    templates: tuple[str, ...]
    samples: tuple[Sample, ...]
    root: Path = Path()
    drawn: str | None = None
    ignored: tuple[str, ...] = ()

    @cached_property
    def labelled(self) -> bool:
        """Whether every image has a class."""
        return all(sample.label is not None for sample in self.samples)

    def unlabelled(self) -> Dataset:
        """The same images with nothing left that says which class they are of."""
        return replace(self, samples=tuple(Sample(s.key, None) for s in self.samples))


# References -----------------------------------------------------------------------------------


def expand_references(texts: Iterable[str]) -> list[str]:
    """Data references with `builtin:all` spelt out. Raises UsageError for an impossible one."""
    expanded: list[str] = []
    for text in texts:
        scheme, _, rest = text.partition(":")
        if text == "builtin:all":
            expanded += [f"builtin:{name}" for name in builtin.TASKS]
            continue
        if scheme == "builtin" and rest not in builtin.TASKS:
            known = [*builtin.TASKS, "all"]
            raise UsageError(
                f"unknown data '{text}'{nearest(rest, known)} "
                f"({', '.join(f'builtin:{name}' for name in known)})"
            )
        path = Path(rest if scheme == "csv" else text).expanduser()
        if scheme != "builtin" and not path.exists():
            raise UsageError(f"no such data: {path} (data is {GRAMMAR})")
        expanded.append(text)
    return expanded


def open_dataset(
    text: str,
    *,
    split: str | None = None,
    templates: Sequence[str] = (),
    preferred: Sequence[str] = ("test", "val"),
) -> Dataset:
    """List the images behind a data reference. No image is opened.

    Without `split`, the first of `preferred` that exists is taken, else the folder as it is.
    `templates` replaces those that come with the data.
    """
    (text,) = expand_references([text])
    scheme, _, rest = text.partition(":")
    if scheme == "builtin":
        dataset = _from_builtin(text, rest, split or preferred[0])
    elif scheme == "csv":
        dataset = _from_table(text, Path(rest).expanduser(), split, preferred)
    else:
        dataset = _from_folder(text, Path(text).expanduser(), split, preferred)
    return replace(dataset, templates=tuple(templates)) if templates else dataset


def has_split(text: str, split: str) -> bool:
    """Whether there is a split of that name behind a data reference."""
    (text,) = expand_references([text])
    scheme, _, rest = text.partition(":")
    if scheme == "builtin":
        return split in builtin.TASKS[rest].sizes
    if scheme == "csv":
        return any(row.get("split") == split for row in _rows(Path(rest).expanduser()))
    return split in _split_folders(_folders(Path(text).expanduser()))


def _from_builtin(text: str, name: str, split: str) -> Dataset:
    task = builtin.TASKS[name]
    if split not in task.sizes:
        raise UsageError(f"{text} has no split '{split}'{nearest(split, task.sizes)}")
    samples = tuple(
        Sample(f"{index:05d}", builtin.label_of(name, split, index))
        for index in range(task.sizes[split])
    )
    return Dataset(text, split, task.classes, task.templates, samples, drawn=name)


# Folders --------------------------------------------------------------------------------------


def _from_folder(text: str, root: Path, split: str | None, preferred: Sequence[str]) -> Dataset:
    if not root.is_dir():
        raise DataError(f"{text}: expected a folder, found a file (csv:{text} for a table)")
    folders = _folders(root)
    if splits := _split_folders(folders):
        chosen = _choose_split(text, splits, [split] if split else preferred)
        keys = sorted({child.name for folder in splits.values() for child in _folders(folder)})
        return _from_classes(text, root, splits[chosen], chosen, keys)
    if split:
        raise UsageError(f"{text}: has no split folders ({', '.join(SPLITS)}) to take {split} from")
    return _from_classes(text, root, root, "all", [folder.name for folder in folders])


def _split_folders(folders: Sequence[Path]) -> dict[str, Path]:
    """The splits that these folders are, or nothing unless each of them is one."""
    splits = {
        name: folder
        for name, spellings in SPLITS.items()
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


def _from_classes(text: str, root: Path, folder: Path, split: str, keys: Sequence[str]) -> Dataset:
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
        name=text,
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


def check_templates(templates: Iterable[str], where: str) -> tuple[str, ...]:
    """The templates, each with exactly one {} for the class name. Raises UsageError."""
    checked = tuple(templates)
    for template in checked:
        if template.count("{}") != 1 or template.replace("{}", "").count("{"):
            raise UsageError(f"{where}: '{template}' needs one {{}} where the class name goes")
    return checked


def _lines(path: Path) -> list[str]:
    """The lines of a text file that are not empty."""
    try:
        return [line.strip() for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as problem:
        raise DataError(f"{path}: cannot be read as UTF-8 text") from problem


# Tables ---------------------------------------------------------------------------------------


def _from_table(text: str, path: Path, split: str | None, preferred: Sequence[str]) -> Dataset:
    """A CSV file with a column `path`, and optionally `label` and `split`."""
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
        text, split or "all", _class_names(root, keys), _templates(root), tuple(samples), root
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
        kept += sorted(members, key=lambda sample: _rank(sample.key, seed))[:shots]
    return replace(dataset, samples=tuple(kept))


def share_of(dataset: Dataset, fraction: float, seed: int) -> Dataset:
    """A fraction of every class, rounded up, by the same ranks as few_shot."""
    kept: list[Sample] = []
    for label in range(len(dataset.classes)):
        members = [sample for sample in dataset.samples if sample.label == label]
        count = math.ceil(len(members) * fraction)
        kept += sorted(members, key=lambda sample: _rank(sample.key, seed))[:count]
    return replace(dataset, samples=tuple(kept))


def _rank(key: str, seed: int) -> tuple[bytes, str]:
    return hashlib.sha256(f"{seed}:{Path(key).stem}".encode()).digest(), key


_SPLIT = re.compile(r"(val|valid|validation|train|test)$")


def task_name(dataset: Dataset) -> str:
    """What a task is called: the name of its folder, of its table or of the built-in task."""
    name = Path(dataset.name.removeprefix("csv:")).stem
    return dataset.drawn or name or dataset.root.resolve().name


def plain_name(name: str) -> str:
    """A name by which the same task is known: small letters, and no word for a split at its end."""
    return _SPLIT.sub("", re.sub(r"[^a-z0-9]", "", name.lower()))
