"""Images that were fetched from elsewhere, kept in the cache: a folder for every request.

A request is what was asked for: a data reference, a split, and shots with their seed. Below its
folder there is one for every version of the source (a commit, or the tags of files on a server),
which appears when it is complete. What is there is not fetched again, also without a network.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from atlas_cli.datasets.dataset import Dataset, Sample
from atlas_cli.errors import AtlasError
from atlas_cli.io.files import cache_folder, read_regular
from atlas_cli.io.staging import temporary_folder

_INDEX = "index.json"
_ENDINGS = (
    *((b"\x89PNG", ".png"), (b"\xff\xd8", ".jpg"), (b"GIF8", ".gif"), (b"BM", ".bmp")),
    *((b"RIFF", ".webp"), (b"II*\x00", ".tif"), (b"MM\x00*", ".tif")),
)


@dataclass(frozen=True)
class DatasetRequest:
    """What was asked for. `shots` is None for all images."""

    reference: str
    split: str
    shots: int | None
    seed: int

    @property
    def folder(self) -> Path:
        """The folder of this request in the cache, for all versions of the source."""
        seed = self.seed if self.shots else 0
        key = json.dumps([self.reference, self.split, self.shots, seed])
        return _folder() / hashlib.sha256(key.encode()).hexdigest()[:24]

    def version(self, version: str) -> Path:
        """The folder of one version."""
        return self.folder / hashlib.sha256(version.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Fetched:
    """One image as it came: a key, its class, and the bytes of its file."""

    key: str
    label: int
    data: bytes


@dataclass(frozen=True)
class Names:
    """What the images of a request show, and the prompts for it."""

    classes: tuple[str, ...]
    templates: tuple[str, ...]


def find_kept(request: DatasetRequest, version: str | None) -> Dataset | None:
    """The images of a request if they are kept: of a version, or for None of the last one."""
    folder = request.version(version) if version else _newest(request.folder)
    if folder is None or not (folder / _INDEX).is_file():
        return None
    try:
        index = json.loads(read_regular(folder / _INDEX))
        samples = tuple(Sample(str(key), int(label)) for key, label in index["samples"])
        names = Names(tuple(index["classes"]), tuple(index["templates"]))
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise AtlasError(
            f"{folder}: cannot be read as kept images ({problem}); remove it to fetch them again"
        ) from problem
    return _dataset(request, folder, names, samples)


def keep(request: DatasetRequest, version: str, names: Names, images: Iterable[Fetched]) -> Dataset:
    """Write images as they come, and give them as a dataset once all of them are there."""
    folder, samples = request.version(version), []
    size = 0
    with _written(folder) as temporary:
        for image in images:
            name = f"{image.key}{_ending(image.data)}"
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            (temporary / name).write_bytes(image.data)
            samples.append(Sample(name, image.label))
            size += len(image.data)
        index = {
            **asdict(request),
            "version": version,
            "classes": names.classes,
            "templates": names.templates,
            "bytes": size,
            "samples": [(sample.key, sample.label) for sample in samples],
        }
        (temporary / _INDEX).write_text(json.dumps(index, ensure_ascii=False), "utf-8")
    return _dataset(request, folder, names, tuple(samples))


def list_kept() -> Iterator[dict[str, Any]]:
    """What is kept: reference, split, shots, images, bytes and the folder, in a fixed order."""
    found = []
    for path in _folder().glob(f"*/*/{_INDEX}"):
        try:
            index = json.loads(read_regular(path))
            row = {key: index[key] for key in ("reference", "split", "shots", "seed", "bytes")}
            found.append({**row, "images": len(index["samples"]), "folder": str(path.parent)})
        except (OSError, ValueError, KeyError, TypeError):
            continue  # not whole: nobody will read it either
    yield from sorted(found, key=lambda row: (row["reference"], row["split"], row["folder"]))


def _folder() -> Path:
    return cache_folder() / "data"


def _newest(folder: Path) -> Path | None:
    indices = list(folder.glob(f"*/{_INDEX}"))
    return max(indices, key=lambda path: path.stat().st_mtime).parent if indices else None


def _dataset(
    request: DatasetRequest, folder: Path, names: Names, samples: tuple[Sample, ...]
) -> Dataset:
    return Dataset(
        split=request.split,
        classes=names.classes,
        templates=names.templates,
        samples=samples,
        root=folder,
    )


@contextmanager
def _written(folder: Path) -> Iterator[Path]:
    """A temporary folder that takes its name at the end; errors of the disk in one line."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(folder) as temporary:
            yield temporary
            if not folder.exists():  # somebody else may have been faster
                temporary.rename(folder)
    except OSError as problem:
        raise AtlasError(
            f"{folder.parent}: cannot keep images: {problem.strerror or problem}; "
            "set ATLAS_CACHE to a folder that can be written"
        ) from problem


def _ending(data: bytes) -> str:
    return next((ending for start, ending in _ENDINGS if data.startswith(start)), ".img")
