"""A dataset -> an image folder that every tool can read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from atlas_cli.datasets.dataset import Dataset, Sample, load
from atlas_cli.errors import AtlasError
from atlas_cli.io.staging import temporary_folder


@dataclass(frozen=True)
class Exported:
    """A folder that was written. Shown as its path, or as JSON."""

    folder: str
    classes: int
    images: dict[str, int]

    def __str__(self) -> str:
        return self.folder


def write_folder(
    datasets: Sequence[Dataset], folder: Path, advance: Callable[[int], None]
) -> Exported:
    """Write SPLIT/CLASS/NAME.png for every image. The folder appears when it is complete.

    Images without splits go to CLASS/NAME.png.
    """
    if folder.exists():
        raise AtlasError(f"{folder}: exists already; remove it or choose another name")
    if not folder.absolute().parent.is_dir():
        raise AtlasError(f"{folder.parent}: no such folder")
    try:
        with temporary_folder(folder) as temporary:
            for dataset in datasets:
                below = "" if dataset.split == "all" else dataset.split
                _write_images(dataset, temporary / below, advance)
            names = sorted(datasets[0].classes, key=_folder_name)
            _write_lines(temporary / "classnames.txt", names)
            _write_lines(temporary / "templates.txt", datasets[0].templates)
            temporary.chmod(0o755)
            temporary.rename(folder)
    except OSError as problem:
        raise AtlasError(f"{folder}: cannot be written: {problem.strerror}") from problem
    images = {dataset.split: len(dataset.samples) for dataset in datasets}
    return Exported(str(folder), len(datasets[0].classes), images)


def _write_images(dataset: Dataset, folder: Path, advance: Callable[[int], None]) -> None:
    for name in dataset.classes:
        (folder / _folder_name(name)).mkdir(parents=True)
    for sample, stem in zip(dataset.samples, _stems(dataset.samples), strict=True):
        name = dataset.classes[sample.label or 0]
        load(dataset, sample).save(folder / _folder_name(name) / f"{stem}.png")
        advance(1)


def _stems(samples: Sequence[Sample]) -> Iterator[str]:
    """The stem of every image's name; of equal ones in a class all but one get a number."""
    given = {(sample.label, Path(sample.key).stem) for sample in samples}
    used: set[tuple[int | None, str]] = set()
    for sample in samples:
        stem, number = Path(sample.key).stem, 1
        found = (sample.label, stem)
        while found in used or (number > 1 and found in given):
            number += 1
            found = (sample.label, f"{stem}-{number}")
        used.add(found)
        yield found[1]


def _folder_name(class_name: str) -> str:
    return class_name.replace(" ", "_").replace("/", "-")


def _write_lines(path: Path, lines: Sequence[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), "utf-8")
