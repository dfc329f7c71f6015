"""wds:SHARDS, on this machine and on a server, laid out as WebDataset and CLIP_benchmark do."""

from __future__ import annotations

import io
import tarfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from atlas_cli.datasets.dataset import content, load, open_dataset, task_name
from atlas_cli.errors import DataError, UnreachableError, UsageError

CLASSES = ("cat", "dog", "sea lion")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATLAS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def image(label: int, padding: int = 0) -> bytes:
    """An image whose red says its class; bytes after its end are nobody's business."""
    file = io.BytesIO()
    Image.new("RGB", (4, 4), (50 * label, 0, 0)).save(file, "PNG")
    return file.getvalue() + b"\0" * padding


def shard(labels: list[int], first: int = 0, padding: int = 0) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for number, label in enumerate(labels, start=first):
            for ending, data in (("cls", str(label).encode()), ("png", image(label, padding))):
                member = tarfile.TarInfo(f"s{number:07d}.{ending}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return file.getvalue()


def write_split(folder: Path, shards: list[bytes]) -> None:
    """One split as CLIP_benchmark lays it out."""
    folder.mkdir(parents=True)
    for number, data in enumerate(shards):
        (folder / f"{number}.tar").write_bytes(data)
    (folder / "nshards.txt").write_text(f"{len(shards)}\n")
    (folder.parent / "classnames.txt").write_text("cat\ndog\nsea_lion\n")
    (folder.parent / "zeroshot_classification_templates.txt").write_text("a drawing of a {c}.\n")


class Server:
    """Serves a folder, and remembers what was asked for and how many bytes went out."""

    def __init__(self, folder: Path) -> None:
        self.requests: list[str] = []
        self.sent = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.answer()

            def do_GET(self) -> None:
                data = self.answer()
                for start in range(0, len(data), 4096):
                    self.wfile.write(data[start : start + 4096])
                    outer.sent += 4096

            def answer(self) -> bytes:
                outer.requests.append(f"{self.command} {self.path}")
                path = folder / self.path.lstrip("/")
                if not path.is_file():
                    self.send_error(404)
                    return b""
                data = path.read_bytes()
                self.send_response(200)
                self.send_header("ETag", f'"{hash(data)}"')
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                return data

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                """Stay quiet."""

            def handle(self) -> None:
                try:
                    super().handle()
                except ConnectionError:
                    return  # the client has read enough

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self.server.server_port}"

    @contextmanager
    def running(self) -> Iterator[Server]:
        thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield self
        finally:
            self.server.shutdown()
            self.server.server_close()
            thread.join()


def test_shards_on_this_machine_are_read_where_they_are(tmp_path: Path, cache: Path):
    folder = tmp_path / "wds_pets"
    write_split(folder / "train", [shard([0, 1, 2]), shard([2, 1, 0], first=3)])
    write_split(folder / "test", [shard([1])])
    dataset = open_dataset(f"wds:{folder}", preferred=("train",))
    assert (dataset.split, dataset.classes) == ("train", CLASSES)
    assert dataset.templates == ("a drawing of a {}.",)
    assert [sample.label for sample in dataset.samples] == [0, 1, 2, 2, 1, 0]
    for sample in dataset.samples:
        assert load(dataset, sample).getpixel((0, 0)) == (50 * sample.label, 0, 0)
        assert content(dataset, sample) == image(sample.label)
    assert open_dataset(f"wds:{folder}").split == "test"
    braces = open_dataset(f"wds:{folder}/train/{{0..1}}.tar", shots=1)
    assert (braces.split, len(braces.samples), braces.classes) == ("all", 3, CLASSES)
    assert task_name(dataset) == "wds_pets"
    assert not cache.exists()


def test_well_known_shards_without_names_beside_them_have_theirs(tmp_path: Path):
    (tmp_path / "cifar10-000.tar").write_bytes(shard([3, 9]))
    dataset = open_dataset(f"wds:{tmp_path}/cifar10-{{000..000}}.tar")
    assert dataset.classes[3] == "cat"
    assert len(dataset.templates) == 18
    assert task_name(dataset) == "cifar10"


def test_shots_from_a_server_read_no_more_of_ten_thousand_images_than_they_need(tmp_path: Path):
    """One shard of ten, of which as much as buffers on the way hold; and never again."""
    shards = [shard([n % 3 for n in range(1000)], first=1000 * k, padding=2000) for k in range(10)]
    write_split(tmp_path / "served" / "train", shards)
    with Server(tmp_path / "served").running() as server:
        wish = {"preferred": ("train",), "shots": 4}
        dataset = open_dataset(f"wds:{server.address}", **wish)
        assert Counter(sample.label for sample in dataset.samples) == {0: 4, 1: 4, 2: 4}
        for sample in dataset.samples:
            assert load(dataset, sample).getpixel((0, 0)) == (50 * sample.label, 0, 0)
        assert (dataset.classes, dataset.templates) == (CLASSES, ("a drawing of a {}.",))
        tars = [one for one in server.requests if one.startswith("GET") and one.endswith(".tar")]
        assert len(tars) == 1
        assert server.sent < sum(map(len, shards)) / 2
        server.requests.clear()
        assert open_dataset(f"wds:{server.address}", **wish) == dataset
        assert not [one for one in server.requests if one.startswith("GET") and ".tar" in one]
        more = open_dataset(f"wds:{server.address}", preferred=("train",), shots=9)
        assert {s.key for s in dataset.samples} < {s.key for s in more.samples}
    assert open_dataset(f"wds:{server.address}", **wish) == dataset, "also without the server"


def test_all_images_of_a_server_are_kept_and_a_changed_shard_is_fetched_anew(tmp_path: Path):
    write_split(tmp_path / "served" / "test", [shard([0, 1]), shard([2], first=2)])
    with Server(tmp_path / "served").running() as server:
        reference = f"wds:{server.address}/test/{{0..1}}.tar"
        assert [s.label for s in open_dataset(reference).samples] == [0, 1, 2]
        (tmp_path / "served/test/1.tar").write_bytes(shard([1, 1], first=2))
        assert [s.label for s in open_dataset(reference).samples] == [0, 1, 1, 1]


def test_what_cannot_be_read_is_told_in_one_line(tmp_path: Path, cache: Path):
    (tmp_path / "no.tar").write_bytes(b"no tar file" * 100)
    (tmp_path / "plain.tar").write_bytes(shard([0, 1]))
    for reference, error, said in (
        (f"wds:{tmp_path}/none.tar", UsageError, "no such data"),
        (f"wds:{tmp_path}/no.tar", DataError, "no.tar: cannot be read as a tar file"),
        (f"wds:{tmp_path}/plain.tar", DataError, "names no classes; put a classnames.txt beside"),
        (f"wds:{tmp_path}", DataError, "has no train/, val/ or test/ with a nshards.txt"),
    ):
        with pytest.raises(error, match=said):
            open_dataset(reference)
    (tmp_path / "classnames.txt").write_text("cat\n")
    with pytest.raises(DataError, match=r"has label 1, but classnames.txt has 1 names"):
        open_dataset(f"wds:{tmp_path}/plain.tar")
    with Server(tmp_path).running() as server:
        with pytest.raises(UnreachableError, match=r"none.tar: no such file on the server"):
            open_dataset(f"wds:{server.address}/none.tar")
        with pytest.raises(DataError, match=r"no.tar: cannot be read as a tar file"):
            open_dataset(f"wds:{server.address}/no.tar")
    with pytest.raises(UnreachableError, match=r"could not be reached"):
        open_dataset(f"wds:{server.address}/plain.tar")
    assert not [path for path in cache.rglob("*") if path.is_file()]
