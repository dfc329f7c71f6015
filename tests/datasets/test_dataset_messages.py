"""Data that is not as it was, or that nobody can read: what is said of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import write_images
from refusals import check
from shards import HEAD_ONLY, server, write_tar

from atlas_cli.datasets.dataset import Dataset, content, load, open_dataset
from atlas_cli.registry import DATASET_KINDS, dataset_kind


@pytest.fixture
def nothing() -> Iterator[None]:
    """A kind of data of somebody else, which has no images."""

    @dataset_kind("nothing")
    def open_nothing(address: str, split: str | None) -> Dataset:
        return Dataset(classes=("one", "two"), samples=())

    yield
    DATASET_KINDS._entries.pop("nothing")
    DATASET_KINDS._origins.pop("nothing")


def test_data_that_is_not_there(nothing: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    photos = open_dataset(str(write_images(tmp_path / "photos", count=1)))
    (tmp_path / "photos" / "cat" / "0.png").unlink()
    (tmp_path / "shards" / "test").mkdir(parents=True)
    (tmp_path / "shards" / "test" / "nshards.txt").write_text("many\n")
    (tmp_path / "classnames.txt").write_text("cat\n")
    local = open_dataset(f"wds:{write_tar(tmp_path / 'a.tar', {'a.png': b'x', 'a.cls': b'0'})}")
    (tmp_path / "a.tar").unlink()
    monkeypatch.setitem(sys.modules, "h5py", None)
    check(
        {
            "builtin:digits has no split 'tets'; did you mean 'test'?": (
                lambda: open_dataset("builtin:digits", split="tets")
            ),
            "nothing:here: has no images": lambda: open_dataset("nothing:here"),
            "cat/0.png: cannot be read: No such file or directory": (
                lambda: content(photos, photos.samples[0])
            ),
            "a.tar: cannot be read: No such file or directory": (
                lambda: load(local, local.samples[0])
            ),
            "shards/test/nshards.txt: expected a number": (
                lambda: open_dataset(f"wds:{tmp_path}/shards")
            ),
            "torchvision:PCAM: torchvision needs h5py to read it; run: pip install h5py": (
                lambda: open_dataset("torchvision:PCAM")
            ),
        }
    )


def test_shards_of_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tar = write_tar(tmp_path / "a.tar", {"a.png": b"x", "a.cls": b"0"}).read_bytes()
    (tmp_path / "file").touch()
    answers = {
        "/classnames.txt": (200, b"cat\n", 4),
        "/a.tar": (200, tar, len(tar)),
        "/gone.tar": (200, b"", HEAD_ONLY),
    }
    with server(answers) as address:
        kept = open_dataset(f"wds:{address}/a.tar", shots=1)
        assert kept.root
        (kept.root / "index.json").write_text("[]")
        check(
            {
                "cannot be read as kept images (list indices must be integers or slices, not str);"
                " remove it to fetch them again": (
                    lambda: open_dataset(f"wds:{address}/a.tar", shots=1)
                ),
                "/gone.tar: no such file on the server": (
                    lambda: open_dataset(f"wds:{address}/gone.tar", shots=1)
                ),
            }
        )
        monkeypatch.setenv("ATLAS_CACHE", str(tmp_path / "file" / "cache"))
        check(
            {
                "cannot keep images: Not a directory; set ATLAS_CACHE to a folder that can be": (
                    lambda: open_dataset(f"wds:{address}/a.tar", shots=1)
                )
            }
        )
