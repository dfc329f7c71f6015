"""The images of runs as small pictures within a page: learned from, and predicted otherwise."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from atlas_cli.errors import AtlasError
from atlas_cli.reports import markup
from atlas_cli.reports.runs import ImageRow, Run

_SIDE = 80  # pixels of the longer side of a picture
_QUALITY = 70
_MOST = 48  # pictures of a kind
_PAIRS = 12  # rows of confused classes


class Thumbnails:
    """Small pictures of the images of datasets, each dataset opened once."""

    def __init__(self) -> None:
        self._samples: dict[tuple[str, str], tuple[Any, dict[str, Any]] | None] = {}

    def of(self, row: ImageRow) -> str | None:
        """An image as a data URI; None if it is not here any more."""
        from atlas_cli.datasets.dataset import load

        found = self._dataset(row.data, row.split)
        sample = found[1].get(row.image) if found else None
        if found is None or sample is None:
            return None
        try:
            image = load(found[0], sample)
        except AtlasError:
            return None
        image.thumbnail((_SIDE, _SIDE))
        content = io.BytesIO()
        image.save(content, "JPEG", quality=_QUALITY, optimize=True)
        return f"data:image/jpeg;base64,{base64.b64encode(content.getvalue()).decode()}"

    def _dataset(self, data: str, split: str) -> tuple[Any, dict[str, Any]] | None:
        from atlas_cli.datasets.dataset import open_dataset

        if (data, split) not in self._samples:
            wanted = None if split == "all" else split
            try:
                dataset = open_dataset(data, split=wanted)
                samples = {sample.key: sample for sample in dataset.samples}
                self._samples[data, split] = dataset, samples
            except AtlasError:  # the data is elsewhere, or was relative to another folder
                self._samples[data, split] = None
        return self._samples[data, split]


@dataclass(frozen=True)
class _Shown:
    row: ImageRow
    caption: str


def gallery(title: str, shown: Sequence[_Shown], thumbnails: Thumbnails) -> str:
    """Some pictures with their captions, and how many there are in all.

    Images come by class, so that some from the whole list are of more classes than the first.
    """
    count, found = min(len(shown), _MOST), []
    for one in (shown[number * len(shown) // count] for number in range(count)):
        if uri := thumbnails.of(one.row):
            found.append(markup.picture(uri, one.caption, one.row.image))
    if not shown:
        return ""
    if not found:
        where = shown[0].row.data
        return markup.paragraphs([f"{title}: {len(shown)}; the images of {where} are not here."])
    more = f" ({len(found)} of {len(shown)} are shown)" if len(found) < len(shown) else ""
    return markup.paragraphs([f"{title}: {len(shown)}{more}"]) + markup.row(found, kind="gallery")


def image_section(run: Run, thumbnails: Thumbnails) -> list[str]:
    """The images that a run learned from, those it changed, and the classes it confuses."""
    shots = [_Shown(row, row.label) for row in run.images if row.learned is None]
    tested = [row for row in run.images if row.learned is not None]
    better = [_Shown(r, f"{r.label}, was {r.zero_shot}") for r in tested if _turned(r, right=True)]
    worse = [_Shown(r, f"{r.label}, now {r.learned}") for r in tested if _turned(r, right=False)]
    return [
        gallery("Some images that it learned from", shots, thumbnails),
        gallery("Test images that are recognised now", better, thumbnails),
        gallery("Test images that are not recognised any more", worse, thumbnails),
        confusions(run, tested),
    ]


def _turned(row: ImageRow, *, right: bool) -> bool:
    """Whether a prediction became right, or wrong."""
    return (row.learned == row.label) == right and (row.zero_shot == row.label) != right


def confusions(run: Run, tested: Iterable[ImageRow]) -> str:
    """The pairs of classes that are most often confused, before or after."""
    rows = list(tested)
    before = Counter((r.label, r.zero_shot) for r in rows if r.zero_shot != r.label)
    after = Counter((r.label, r.learned) for r in rows if r.learned != r.label)
    pairs = sorted(before | after, key=lambda pair: (-max(before[pair], after[pair]), str(pair)))
    if not pairs:
        return ""
    cells: list[list[markup.Cell]] = [
        [pair[0], pair[1], before[pair], after[pair]] for pair in pairs[:_PAIRS]
    ]
    columns = ["class", "taken for", "zero-shot", "learned"]
    said = markup.paragraphs([f"Classes that are confused most often, on {len(rows)} test images"])
    return said + markup.table(columns, cells, f"confused classes of {run.name}")


def differences(runs: Sequence[Run], thumbnails: Thumbnails) -> str:
    """Test images that two or more runs have in common and do not agree on."""
    known: dict[tuple[str, str, str], dict[str, ImageRow]] = {}
    for run in runs:
        for row in run.images:
            if row.learned is not None:
                known.setdefault((row.data, row.split, row.image), {})[run.name] = row
    shown = [
        _Shown(first, "; ".join([first.label, *_told(found)]))
        for found in known.values()
        if len({row.learned for row in found.values()}) > 1
        for first in [next(iter(found.values()))]
    ]
    return gallery("Test images that the runs do not agree on", shown, thumbnails)


def _told(found: dict[str, ImageRow]) -> Iterator[str]:
    for name, row in found.items():
        yield f"{name}: {row.learned}"
