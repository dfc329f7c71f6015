"""Datasets on the Hugging Face Hub: hf:OWNER/NAME[:CONFIG][@SPLIT].

`datasets` says which files a split has and what their columns are. Of Parquet files only the parts
that are needed are read: the labels of a row group, and its images if one of them is wanted. Other
files are streamed from their beginning. What was fetched is kept (see kept.py).
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from atlas_cli.datasets.dataset import DEFAULT_TEMPLATE, Dataset, pick_split, rank
from atlas_cli.datasets.kept import DatasetRequest, Fetched, Names, find_kept, keep
from atlas_cli.datasets.known import find_known, spelt
from atlas_cli.errors import AtlasError, DataError, UnreachableError, UsageError, install_hint
from atlas_cli.registry import dataset_kind

_ADDRESS = re.compile(r"(?P<name>[\w.-]+(/[\w.-]+)?)(:(?P<config>[\w.-]+))?(@(?P<split>[\w.-]+))?")
_SPELLINGS = {"val": ("validation", "val", "valid", "dev"), "train": ("train",), "test": ("test",)}
_LABELS = ("label", "labels", "fine_label", "class", "target", "category", "cls")
_PARQUET = ".parquet"


@dataclass(frozen=True)
class _Address:
    text: str
    name: str
    config: str | None
    split: str | None


def _parse(address: str) -> _Address:
    found = _ADDRESS.fullmatch(address)
    if not found:
        raise UsageError(f"hf:{address}: expected hf:OWNER/NAME, hf:OWNER/NAME:CONFIG or ...@SPLIT")
    return _Address(f"hf:{address}", found["name"], found["config"], found["split"])


def _check(address: str) -> list[str]:
    return [_parse(address).text]


def _splits(address: str) -> list[str]:
    parsed = _parse(address)
    if parsed.split:
        return [_ours(parsed.split)]
    with _explained(parsed):
        return [_ours(name) for name in _builder(parsed).config.data_files]


def _ours(split: str) -> str:
    """A distributor's name of a split in the words of atlas."""
    return next((ours for ours, names in _SPELLINGS.items() if split in names), split)


@dataset_kind("hf", splits=_splits, expand=_check, chooses_split=True, streams=True)
def open_hub(
    address: str, split: str | None, preferred: Sequence[str], *, shots: int | None, seed: int
) -> Dataset:
    """A dataset on the Hub with an image column and a column of labels."""
    parsed = _parse(address)
    if parsed.split and split not in (None, _ours(parsed.split)):
        raise UsageError(f"{parsed.text}: names a split, and --split {split} another")
    try:
        with _explained(parsed):
            builder = _builder(parsed)
    except UnreachableError:
        kept = _kept_before(parsed, split, preferred, shots, seed)
        if kept is None:
            raise
        return kept
    files = {_ours(name): (name, urls) for name, urls in builder.config.data_files.items()}
    wanted = split or (_ours(parsed.split) if parsed.split else None)
    chosen = pick_split(parsed.text, files, wanted, preferred) or next(iter(files))
    theirs, urls = files[chosen]
    request = DatasetRequest(parsed.text.partition("@")[0], chosen, shots, seed)
    version = "\n".join(urls)
    with _explained(parsed):
        kept = find_kept(request, version)
        if kept is not None:
            return kept
        parquet = all(url.endswith(_PARQUET) for url in urls)
        source = _Parquet(list(urls)) if parquet else _Streamed(parsed, theirs)
        columns = _columns(parsed, source.features())
        labels = columns.names or source.label_values(columns)
        known = find_known(parsed.name)
        names = Names(
            known.prompt_names(labels) if known else spelt(labels),
            known.templates if known else (DEFAULT_TEMPLATE,),
        )
        wish = _Wish(columns, labels, shots, seed)
        return keep(request, version, names, _fetched(parsed, source.images(wish)))


def _kept_before(
    parsed: _Address,
    split: str | None,
    preferred: Sequence[str],
    shots: int | None,
    seed: int,
) -> Dataset | None:
    """What was kept when the Hub could be reached: of the split that would be chosen now."""
    wanted = [split] if split else [_ours(parsed.split)] if parsed.split else [*preferred]
    name = parsed.text.partition("@")[0]
    found = (find_kept(DatasetRequest(name, one, shots, seed), None) for one in wanted)
    return next((one for one in found if one), None)


# Columns --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Columns:
    """The columns of images and labels, and what the labels are called if the source says so."""

    image: str
    label: str
    names: tuple[str, ...]


def _columns(parsed: _Address, features: Any) -> _Columns:
    from datasets import ClassLabel, Image

    images = [name for name, kind in features.items() if isinstance(kind, Image)]
    if not images:
        raise DataError(f"{parsed.text}: has no column of images (it has {', '.join(features)})")
    classes = [name for name, kind in features.items() if isinstance(kind, ClassLabel)]
    likely = [name for name in _LABELS if name in features]
    label = next((name for name in likely if name in classes), None)
    label = label or next(iter(classes[:1] if len(classes) == 1 else likely), None)
    if label is None:
        raise DataError(f"{parsed.text}: has no column of labels (it has {', '.join(features)})")
    names = tuple(features[label].names) if label in classes else ()
    return _Columns(images[0], label, names)


@dataclass(frozen=True)
class _Wish:
    """Which images are wanted: `shots` of every class, or all."""

    columns: _Columns
    labels: tuple[str, ...]
    shots: int | None
    seed: int

    def number(self, label: object) -> int:
        """The class of a label, which is a number already where the source names its classes."""
        if self.columns.names:
            return int(str(label))
        return self.labels.index(str(label))

    def is_met(self, taken: Counter[int]) -> bool:
        """Whether there are enough images of every class."""
        numbers = range(len(self.labels))
        return self.shots is not None and all(taken[n] >= self.shots for n in numbers)

    def take(self, label: int, taken: Counter[int]) -> bool:
        """Whether one more image of a class is wanted; it is counted then."""
        if label < 0 or (self.shots is not None and taken[label] >= self.shots):
            return False
        taken[label] += 1
        return True


# Parquet files, of which a row group is the smallest part that can be read ---------------------


class _Parquet:
    """The Parquet files of a split, opened one by one as they are needed."""

    def __init__(self, urls: list[str]) -> None:
        self._urls = urls
        self._opened: dict[str, Any] = {}

    def features(self) -> Any:
        from datasets import Features

        return Features.from_arrow_schema(self._open(self._urls[0]).schema_arrow)

    def label_values(self, columns: _Columns) -> tuple[str, ...]:
        """All labels that occur, in order; the columns of images are not read."""
        values: set[Any] = set()
        for url in self._urls:
            column = self._open(url).read(columns=[columns.label])[columns.label]
            values |= set(column.unique().to_pylist())
        return tuple(str(value) for value in sorted(values - {None}))

    def images(self, wish: _Wish) -> Iterator[Fetched]:
        """Images from row groups in an order that the seed decides, until there are enough.

        Row groups are ordered before the images in them: shots come from few row groups, and
        fewer shots are a subset of more.
        """
        taken: Counter[int] = Counter()
        for url in self._ordered(self._urls, wish, _stem):
            file = self._open(url)
            for group in self._ordered(range(file.num_row_groups), wish, str):
                yield from self._of_group(url, group, wish, taken)
                if wish.is_met(taken):
                    return

    def _of_group(
        self, url: str, group: int, wish: _Wish, taken: Counter[int]
    ) -> Iterator[Fetched]:
        file, columns = self._open(url), wish.columns
        # In this thread: one of pyarrow's that lets go of a Python file while the interpreter ends
        # takes the whole process down.
        table = file.read_row_group(group, columns=[columns.label], use_threads=False)
        labels = [wish.number(one) for one in table[columns.label].to_pylist()]
        rows = [
            (key, row)
            for key, row in self._ordered(
                [(f"{_stem(url)}-{group:04d}-{row:05d}", row) for row in range(len(labels))],
                wish,
                lambda pair: str(pair[0]),
            )
            if wish.take(labels[row], taken)
        ]
        if not rows:
            return
        read = file.read_row_group(group, columns=[columns.image], use_threads=False)
        images = read[columns.image]
        for key, row in rows:
            data = images[row].as_py()
            yield Fetched(key, labels[row], data["bytes"] if isinstance(data, dict) else data)

    def _ordered(self, items: Any, wish: _Wish, key: Callable[[Any], str]) -> list[Any]:
        if wish.shots is None:
            return list(items)
        return sorted(items, key=lambda item: rank(key(item), wish.seed))

    def _open(self, url: str) -> Any:
        from huggingface_hub import HfFileSystem
        from pyarrow.parquet import ParquetFile

        if url not in self._opened:
            # Exactly the ranges that are asked for; fsspec would read megabytes ahead.
            file = HfFileSystem().open(url, "rb", cache_type="none")
            self._opened[url] = ParquetFile(file)
        return self._opened[url]


def _stem(url: str) -> str:
    """A short name of a file: its path in the repository, without an ending."""
    inside = url.partition("@")[2].partition("/")[2] or url
    return str(PurePosixPath(inside).with_suffix("")).replace("/", "-")


# Other files, which are streamed --------------------------------------------------------------


class _Streamed:
    """A split in any other form that `datasets` reads, from its first row on."""

    def __init__(self, parsed: _Address, split: str) -> None:
        from datasets import load_dataset

        self._rows: Any = load_dataset(parsed.name, parsed.config, split=split, streaming=True)
        self._parsed = parsed

    def features(self) -> Any:
        if self._rows.features is None:
            raise DataError(f"{self._parsed.text}: does not say what its columns are")
        return self._rows.features

    def label_values(self, columns: _Columns) -> tuple[str, ...]:
        column = (row[columns.label] for row in self._rows.select_columns([columns.label]))
        return tuple(str(value) for value in sorted(set(column) - {None}))

    def images(self, wish: _Wish) -> Iterator[Fetched]:
        """The first images of every class; more rows are not asked for."""
        from datasets.utils.file_utils import xopen

        taken: Counter[int] = Counter()
        image, label = wish.columns.image, wish.columns.label
        for number, row in enumerate(self._rows.decode(False)):
            name = wish.number(row[label])
            if wish.take(name, taken):
                data = row[image]["bytes"]
                if data is None:
                    with xopen(row[image]["path"], "rb") as file:
                        data = file.read()
                yield Fetched(f"row-{number:07d}", name, data)
            if wish.is_met(taken):
                return


# The client -----------------------------------------------------------------------------------

_WITHOUT_FILES = {"DataFilesNotFoundError", "EmptyDatasetError"}  # of `datasets`


def _builder(parsed: _Address) -> Any:
    """What `datasets` knows of a dataset before it reads any of its rows."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    try:
        import datasets
    except ImportError as problem:
        raise AtlasError(
            f"{parsed.text}: reading datasets of the Hub needs the extra `data`: "
            f"{install_hint('data')}"
        ) from problem
    datasets.logging.set_verbosity_error()
    if sys.stderr is None or not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        builder = datasets.load_dataset_builder(parsed.name, parsed.config)
    except FileNotFoundError as problem:
        if type(problem).__name__ not in _WITHOUT_FILES:
            raise
        raise DataError(f"{parsed.text}: has no files that `datasets` reads") from problem
    return builder


@contextmanager
def _explained(parsed: _Address) -> Iterator[None]:
    """Turn what the libraries raise into one line that names the dataset and the way out."""
    try:
        yield
    except AtlasError:
        raise
    except FileNotFoundError as problem:
        said = _line(problem)
        if "gated" in said:
            said = "access has to be asked for on its page, then set HF_TOKEN"
        elif "DatasetNotFound" in type(problem).__name__:
            said = "no such dataset on the Hub, or not allowed; check the name, or set HF_TOKEN"
        raise UnreachableError(f"{parsed.text}: {said}") from problem
    except ValueError as problem:
        if type(problem).__module__.startswith("pyarrow"):
            raise DataError(f"{parsed.text}: cannot be read: {_line(problem)}") from problem
        hint = f"; name one as hf:{parsed.name}:CONFIG" if "onfig" in _line(problem) else ""
        raise UsageError(f"{parsed.text}: {_line(problem).rstrip('.')}{hint}") from problem
    except (OSError, RuntimeError, _http_error()) as problem:
        said = f"could not be reached ({type(problem).__name__}: {_line(problem)})"
        raise UnreachableError(f"{parsed.text}: {said}") from problem


def _fetched(parsed: _Address, images: Iterator[Fetched]) -> Iterator[Fetched]:
    """The same images; what goes wrong on the way is told apart from what the disk does to them."""
    with _explained(parsed):
        yield from images


def _http_error() -> type[Exception]:
    """What the client's HTTP library raises, whichever its version stands on."""
    from huggingface_hub.errors import HfHubHTTPError

    return HfHubHTTPError.__bases__[0]


def _line(problem: BaseException) -> str:
    lines = [line for line in str(problem).splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(problem).__name__
