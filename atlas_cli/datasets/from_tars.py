"""Shards of WebDataset: wds:SHARDS, tar files with NAME.jpg beside NAME.cls for every image.

SHARDS is one tar file or several, `train-{000..010}.tar`, on this machine or at an http address; or
a folder, or an address, with a folder per split, in which `nshards.txt` counts 0.tar, 1.tar and so
on. Beside the shards or one folder above, `classnames.txt` names the classes and
`zeroshot_classification_templates.txt` the prompts, each in a line. Shards on this machine are read
where they are; of others, no more is fetched than is needed, and that is kept (see kept.py).
"""

from __future__ import annotations

import re
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import IO
from urllib.error import HTTPError, URLError
from urllib.parse import urljoin, urlsplit
from urllib.request import Request, urlopen

from atlas_cli.datasets.dataset import (
    DEFAULT_TEMPLATE,
    SPLITS,
    Dataset,
    Sample,
    check_templates,
    pick_split,
    rank,
)
from atlas_cli.datasets.folders import SUFFIXES
from atlas_cli.datasets.kept import DatasetRequest, Fetched, Names, find_kept, keep
from atlas_cli.datasets.known import find_known, spelt
from atlas_cli.errors import DataError, UnreachableError, UsageError
from atlas_cli.registry import dataset_kind

_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")
_TEMPLATES = ("zeroshot_classification_templates.txt", "templates.txt")
_TIMEOUT = 30.0  # seconds after which a silent server counts as unreachable


def _splits(address: str) -> list[str]:
    if address.endswith(".tar"):
        return []
    return [split for split in SPLITS if _read(f"{address.rstrip('/')}/{split}/nshards.txt")]


def _check(address: str) -> list[str]:
    shards = _expand(address) if address.endswith(".tar") else []
    for path in [] if _is_remote(address) else shards or [address]:
        if not Path(path).expanduser().exists():
            raise UsageError(f"no such data: {path} (wds: takes tar files, or a folder of splits)")
    return [f"wds:{address}"]


@dataset_kind("wds", splits=_splits, expand=_check, chooses_split=True, streams=True)
def open_shards(
    address: str, split: str | None, preferred: Sequence[str], *, shots: int | None, seed: int
) -> Dataset:
    """Images in tar files, with the number of a class beside each."""
    text = f"wds:{address}"
    if address.endswith(".tar") and split:
        raise UsageError(f"{text}: has no splits; name the shards of {split}")
    if _is_remote(address):
        wanted = [split] if split else [*preferred, "all"]
        requests = [DatasetRequest(text, one, shots, seed) for one in wanted]
        return _open_remote(address, requests, split, preferred)
    chosen, shards, names = _described(address, split, preferred)
    samples = [_local(member) for shard in shards for member in _members(shard)]
    found = _named(text, names, [sample.label or 0 for sample in samples])
    return Dataset(
        split=chosen,
        classes=found.classes,
        templates=found.templates,
        samples=tuple(samples),
    )


def _described(
    address: str, split: str | None, preferred: Sequence[str]
) -> tuple[str, list[str], Names]:
    """The split that is taken, its shards, and what the images show."""
    text = f"wds:{address}"
    chosen = pick_split(text, _splits(address), split, preferred)
    shards = _expand(address) if address.endswith(".tar") else _counted(text, address, chosen)
    return chosen or "all", shards, _names(text, address, shards[0])


def _counted(text: str, address: str, split: str | None) -> list[str]:
    """The shards of a split, as its nshards.txt counts them."""
    if split is None:
        raise DataError(f"{text}: has no train/, val/ or test/ with a nshards.txt")
    folder = f"{address.rstrip('/')}/{split}"
    shards = _read(f"{folder}/nshards.txt")
    if not shards or not shards[0].isdigit():
        raise DataError(f"{folder}/nshards.txt: expected a number")
    return [f"{folder}/{number}.tar" for number in range(int(shards[0]))]


def _expand(address: str) -> list[str]:
    """train-{000..010}.tar spelt out; a name without braces stands for itself."""
    found = _BRACES.search(address)
    if not found:
        return [address]
    first, last = found[1], found[2]
    return [
        each
        for number in range(int(first), int(last) + 1)
        for each in _expand(
            f"{address[: found.start()]}{number:0{len(first)}d}{address[found.end() :]}"
        )
    ]


def _is_remote(address: str) -> bool:
    return address.startswith(("http://", "https://"))


# Names ----------------------------------------------------------------------------------------


def _names(text: str, address: str, shard: str) -> Names:
    """Classes and prompts from the files beside the shards, or of a well-known dataset."""
    known = find_known(re.split(r"[-_.]?\{|\.tar$", address.rstrip("/"))[0])
    labels = _beside(shard, "classnames.txt")
    templates = next((lines for name in _TEMPLATES if (lines := _beside(shard, name))), [])
    if templates:
        templates = [line.replace("{c}", "{}") for line in templates]
        templates = list(check_templates(templates, text))
    classes = spelt(labels) if labels else known.classes if known else ()
    if not templates:
        templates = list(known.templates) if known else [DEFAULT_TEMPLATE]
    return Names(tuple(classes), tuple(templates))


def _named(text: str, names: Names, labels: Sequence[int]) -> Names:
    """The names, once all labels are known to have one."""
    if not labels:
        raise DataError(f"{text}: has no images with a .cls file beside them")
    if not names.classes:
        raise DataError(f"{text}: names no classes; put a classnames.txt beside the shards")
    if max(labels) >= len(names.classes) or min(labels) < 0:
        raise DataError(
            f"{text}: has label {max(labels)}, but classnames.txt has {len(names.classes)} names"
        )
    return names


def _beside(shard: str, name: str) -> list[str]:
    """The lines of a file beside a shard, or one folder above."""
    for place in (f"../{name}", name) if _is_remote(shard) else (name, f"../{name}"):
        where = urljoin(shard, place) if _is_remote(shard) else str(Path(shard).parent / place)
        if lines := _read(where):
            return lines
    return []


def _read(address: str) -> list[str]:
    """The lines of a text file that are not empty; none if there is no such file."""
    if _is_remote(address):
        try:
            with _get(address) as answer:
                text = answer.read().decode("utf-8")
        except FileNotFoundError:
            return []
    else:
        path = Path(address).expanduser()
        if not path.is_file():
            return []
        text = path.read_text("utf-8")
    return [line.strip() for line in text.splitlines() if line.strip()]


# Tar files ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Member:
    """An image in a tar file, where its bytes are, and its class."""

    shard: str
    key: str
    label: int
    offset: int
    size: int


def _members(shard: str) -> Iterator[_Member]:
    """The images of a shard on this machine, by its headers; what they hold is not read."""
    path = str(Path(shard).expanduser())
    try:
        with tarfile.open(path, "r:") as archive:
            images: dict[str, tarfile.TarInfo] = {}
            labels: dict[str, int] = {}
            for member in archive:
                key, kind = _kind(member)
                if kind == "image":
                    images[key] = member
                if kind == "label":
                    file = archive.extractfile(member)
                    labels[key] = _label(file.read() if file else b"", f"{shard}: {member.name}")
    except (OSError, tarfile.TarError) as problem:
        raise DataError(f"{shard}: cannot be read as a tar file: {problem}") from problem
    for key, image in images.items():
        if key not in labels:
            raise DataError(f"{shard}: {image.name} has no {key}.cls beside it")
        yield _Member(path, _key(shard, key), labels[key], image.offset_data, image.size)


def _kind(member: tarfile.TarInfo) -> tuple[str, str]:
    """The key of a member of a tar file, and whether it is an image or the label of one."""
    folder, _, name = member.name.rpartition("/")
    stem, _, ending = name.partition(".")
    key = f"{folder}/{stem}" if folder else stem
    if not member.isfile():
        return key, "other"
    if ending.lower() in ("cls", "cls.txt"):
        return key, "label"
    return key, "image" if f".{ending.rpartition('.')[2].lower()}" in SUFFIXES else "other"


def _label(data: bytes, where: str) -> int:
    try:
        return int(data.decode("ascii").strip())
    except ValueError as problem:
        raise DataError(f"{where}: expected the number of a class") from problem


def _key(shard: str, key: str) -> str:
    """A name that no image of another shard has, also on disk."""
    plain = re.sub(r"[^\w.-]", "_", key)
    return f"{Path(urlsplit(shard).path).stem}-{plain}"


def _local(member: _Member) -> Sample:
    return Sample(member.key, member.label, partial(_bytes_of, member))


def _bytes_of(member: _Member) -> bytes:
    try:
        with Path(member.shard).open("rb") as file:
            file.seek(member.offset)
            return file.read(member.size)
    except OSError as problem:
        raise DataError(f"{member.shard}: cannot be read: {problem.strerror}") from problem


# Shards on a server ---------------------------------------------------------------------------


def _open_remote(
    address: str, requests: Sequence[DatasetRequest], split: str | None, preferred: Sequence[str]
) -> Dataset:
    """The images of shards on a server, kept from before or streamed now."""
    try:
        chosen, shards, names = _described(address, split, preferred)
        version = "\n".join(f"{shard} {_tag(shard)}" for shard in shards)
    except UnreachableError:
        before = (find_kept(request, None) for request in requests)
        if kept := next((one for one in before if one), None):
            return kept
        raise
    (request,) = (one for one in requests if one.split == chosen)
    kept = find_kept(request, version)
    if kept is None:
        kept = keep(request, version, names, _streamed(request, shards, names))
    _named(request.reference, names, [sample.label or 0 for sample in kept.samples])
    return kept


def _streamed(request: DatasetRequest, shards: Sequence[str], names: Names) -> Iterator[Fetched]:
    """Images in the order of the tar files, which the seed decides, until there are enough."""
    shots, taken = request.shots, Counter[int]()
    classes = range(len(names.classes))
    if shots is not None:
        shards = sorted(shards, key=lambda shard: rank(shard, request.seed))
    for shard in shards:
        for image in _streamed_members(shard):
            if shots is None or taken[image.label] < shots:
                taken[image.label] += 1
                yield image
            if shots is not None and classes and all(taken[n] >= shots for n in classes):
                return


def _streamed_members(shard: str) -> Iterator[Fetched]:
    """The images of a shard as they come, each as soon as its label is there, too."""
    waiting: dict[str, bytes] = {}
    labels: dict[str, int] = {}
    try:
        with _get(shard) as answer, tarfile.open(fileobj=answer, mode="r|") as archive:
            for member in archive:
                key, kind = _kind(member)
                file = archive.extractfile(member) if kind != "other" else None
                if file is None:
                    continue
                if kind == "image":
                    waiting[key] = file.read()
                else:
                    labels[key] = _label(file.read(), f"{shard}: {member.name}")
                if key in waiting and key in labels:
                    yield Fetched(_key(shard, key), labels.pop(key), waiting.pop(key))
    except FileNotFoundError as problem:
        raise UnreachableError(f"{shard}: no such file on the server") from problem
    except (tarfile.TarError, OSError) as problem:
        # What is left of a body whose length was announced: the client does not look at it.
        if isinstance(problem, OSError) or getattr(answer, "length", None):
            raise UnreachableError(f"{shard}: the connection was cut: {problem}") from problem
        raise DataError(f"{shard}: cannot be read as a tar file: {problem}") from problem
    for key in waiting:
        raise DataError(f"{shard}: {key} has no .cls file beside it")


def _tag(shard: str) -> str:
    """What changes when a file on a server does: its tag, or its date and size."""
    try:
        with _get(shard, "HEAD") as answer:
            found = answer.headers  # type: ignore[attr-defined]
    except FileNotFoundError as problem:
        raise UnreachableError(f"{shard}: no such file on the server") from problem
    return str(found.get("ETag") or (found.get("Last-Modified"), found.get("Content-Length")))


def _get(address: str, method: str = "GET") -> IO[bytes]:
    """Ask a server. Raises FileNotFoundError for 404, UnreachableError for any other trouble."""
    for attempt in count(1):
        try:
            request = Request(address, method=method)  # noqa: S310 (http and https alone come here)
            found: IO[bytes] = urlopen(request, timeout=_TIMEOUT)  # noqa: S310
            return found
        except HTTPError as problem:
            problem.close()  # it is the answer as well, and holds its connection
            if problem.code == 404:
                raise FileNotFoundError(address) from problem
            raise UnreachableError(f"{address}: the server answered {problem.code}") from problem
        except (URLError, OSError) as problem:
            if attempt == 3:
                raise UnreachableError(f"{address}: could not be reached ({problem})") from problem
    raise AssertionError
