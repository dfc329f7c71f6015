"""torchvision:NAME, with miniatures of the files that torchvision downloads."""

from __future__ import annotations

import hashlib
import pickle
import struct
import tarfile
from collections.abc import Callable
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from conftest import Result
from PIL import Image

from atlas_cli.datasets.dataset import load, open_dataset, task_name
from atlas_cli.errors import DataError, UsageError
from atlas_cli.io.torchvision_import import import_torchvision


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATLAS_DATA", str(tmp_path / "data"))
    monkeypatch.delenv("ATLAS_DOWNLOAD", raising=False)
    return tmp_path / "data"


def write_image(path: Path, red: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), (red, 0, 0)).save(path)


def write_mnist(root: Path, kind: str = "MNIST") -> None:
    """The four idx files of MNIST and of the sets that copy its layout."""
    folder = root / kind / "raw"
    folder.mkdir(parents=True)
    for name, labels in (("train", [3, 1, 4]), ("t10k", [1, 5])):
        pixels = np.stack([np.full((28, 28), 20 * label, np.uint8) for label in labels])
        images = struct.pack(">IIII", 2051, len(labels), 28, 28) + pixels.tobytes()
        (folder / f"{name}-images-idx3-ubyte").write_bytes(images)
        numbers = struct.pack(">II", 2049, len(labels)) + bytes(labels)
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(numbers)


def write_cifar(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two batches as they are in cifar-10-python.tar.gz; torchvision checks their digests."""
    cifar = import_torchvision().datasets.CIFAR10
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)

    def write(name: str, content: object) -> list[str]:
        (folder / name).write_bytes(pickle.dumps(content))
        return [name, hashlib.md5((folder / name).read_bytes()).hexdigest()]

    def batch(labels: list[int]) -> dict[str, object]:
        rows = [np.repeat(np.array([20 * label, 0, 0], np.uint8), 1024) for label in labels]
        return {"data": np.stack(rows), "labels": labels}

    names = ["airplane", "automobile", "bird", "cat", "deer"]
    names += ["dog", "frog", "horse", "ship", "truck"]
    monkeypatch.setattr(cifar, "train_list", [write("data_batch_1", batch([6, 9, 9]))])
    monkeypatch.setattr(cifar, "test_list", [write("test_batch", batch([3, 8]))])
    name, digest = write("batches.meta", {"label_names": names})
    meta = {"filename": name, "key": "label_names", "md5": digest}
    monkeypatch.setattr(cifar, "meta", meta)


def test_digits_have_the_prompts_of_the_published_task_vectors(root: Path):
    write_mnist(root)
    dataset = open_dataset("torchvision:MNIST", preferred=("train",))
    assert (dataset.split, dataset.classes[3]) == ("train", "3")
    assert dataset.templates == ('a photo of the number: "{}".',)
    assert [sample.label for sample in dataset.samples] == [3, 1, 4]
    assert [load(dataset, s).getpixel((0, 0))[0] for s in dataset.samples] == [60, 20, 80]
    test = open_dataset("torchvision:mnist")
    assert (test.name, test.split, task_name(test)) == ("torchvision:MNIST", "test", "MNIST")
    assert [sample.label for sample in test.samples] == [1, 5]


def test_batches_of_cifar_are_read_and_checked(root: Path, monkeypatch: pytest.MonkeyPatch):
    write_cifar(root, monkeypatch)
    dataset = open_dataset("torchvision:CIFAR10", preferred=("train",), shots=None)
    assert [dataset.classes[s.label] for s in dataset.samples] == ["frog", "truck", "truck"]
    assert [load(dataset, s).getpixel((5, 5))[0] for s in dataset.samples] == [120, 180, 180]
    assert len(dataset.templates) == 18
    (root / "cifar-10-batches-py/data_batch_1").write_bytes(b"not what it was")
    with pytest.raises(
        DataError, match=r"torchvision:CIFAR10: not there, or not whole, below .*; "
    ):
        open_dataset("torchvision:CIFAR10", split="train")


def test_folders_and_lists_of_files_have_the_names_that_prompts_use(root: Path):
    eurosat = ["AnnualCrop", "Forest", "HerbaceousVegetation", "Highway", "Industrial"]
    eurosat += ["Pasture", "PermanentCrop", "Residential", "River", "SeaLake"]
    for number, name in enumerate(eurosat):
        write_image(root / f"eurosat/2750/{name}/{name}_1.jpg", 20 * number)
    dataset = open_dataset("torchvision:EuroSAT", preferred=("train",))
    assert (dataset.split, dataset.classes[9]) == ("all", "lake or sea")
    assert [sample.label for sample in dataset.samples] == list(range(10))

    dtd = root / "dtd/dtd"
    for split, files in (
        ("train", "banded/a.jpg"),
        ("val", "woven/b.jpg"),
        ("test", "dotted/c.jpg"),
    ):
        (dtd / "labels").mkdir(parents=True, exist_ok=True)
        (dtd / f"labels/{split}1.txt").write_text(f"{files}\npolka-dotted/{split}.jpg\n")
        write_image(dtd / "images" / files, 10)
        write_image(dtd / f"images/polka-dotted/{split}.jpg", 20)
    dataset = open_dataset("torchvision:DTD", split="val")
    assert [dataset.classes[s.label] for s in dataset.samples] == ["woven", "polka-dotted"]
    assert "a photo of a {} texture." in dataset.templates

    write_image(root / "gtsrb/GTSRB/Training/00000/a.ppm", 0)
    write_image(root / "gtsrb/GTSRB/Training/00014/b.ppm", 0)
    for number in range(43):
        (root / f"gtsrb/GTSRB/Training/{number:05d}").mkdir(exist_ok=True)
        write_image(root / f"gtsrb/GTSRB/Training/{number:05d}/x.ppm", number)
    dataset = open_dataset("torchvision:GTSRB", split="train")
    assert dataset.classes[14] == "stop"
    assert {load(dataset, s).getpixel((0, 0))[0] for s in dataset.samples if s.label == 7} == {7}


def test_what_is_not_there_is_told_in_one_line(root: Path):
    with pytest.raises(UsageError, match=r"CIFAR11: torchvision has no such dataset.*'CIFAR10'"):
        open_dataset("torchvision:CIFAR11")
    with pytest.raises(DataError, match=r"--download fetches it, --data-root names another folder"):
        open_dataset("torchvision:SVHN")
    write_mnist(root)
    with pytest.raises(UsageError, match=r"torchvision:MNIST: no split val .it has train, test"):
        open_dataset("torchvision:MNIST", split="val")
    with pytest.raises(UsageError, match=r"torchvision:a/b: expected a name"):
        open_dataset("torchvision:a/b")


def test_the_command_line_says_where_the_data_is(
    root: Path, call: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    write_mnist(root)
    monkeypatch.setenv("ATLAS_DATA", str(tmp_path))  # what --data-root sets goes with the test
    shown = call("data", "--data-root", root)
    assert shown.code == 0, shown.err
    assert f"torchvision:MNIST,10,1,,{root}/MNIST/raw" in shown.out
    assert "torchvision:CIFAR10,10,18,,\n" in shown.out
    assert "hf:tanganke/eurosat,10,3,,\n" in shown.out
    result = call("eval", "builtin:tiny", "--data", "torchvision:MNIST", "--data-root", root)
    assert result.code == 0, result.err
    assert "torchvision:MNIST,test,2," in result.out


class Quiet(SimpleHTTPRequestHandler):
    """A server of files that prints nothing."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Stay silent."""


def test_what_is_not_there_is_downloaded_if_the_command_line_says_so(
    root: Path, call: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """torchvision has another address, and the digest of what is there; all else is its own."""
    monkeypatch.setenv("ATLAS_DOWNLOAD", "")  # what --download sets goes with the test
    made, served = tmp_path / "rendered-sst2", tmp_path / "served"
    for split in ("train", "valid", "test"):
        for red, name in enumerate(("negative", "positive")):
            write_image(made / split / name / "0.png", 200 * red)
    served.mkdir()
    with tarfile.open(served / "rendered-sst2.tgz", "w:gz") as archive:
        archive.add(made, "rendered-sst2")
    kind = import_torchvision().datasets.RenderedSST2
    digest = hashlib.md5((served / "rendered-sst2.tgz").read_bytes()).hexdigest()
    monkeypatch.setattr(kind, "_MD5", digest)
    handler = partial(Quiet, directory=str(served))
    evaluate = ["eval", "builtin:tiny", "--data", "torchvision:RenderedSST2", "--data-root", root]
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        refused = call(*evaluate)
        assert (refused.code, len(refused.error_lines)) == (1, 1), refused.err
        assert "--download fetches it" in refused.err
        monkeypatch.setattr(kind, "_URL", f"{address}/nothing.tgz")
        missing = call(*evaluate, "--download", "-q")
        assert (missing.code, missing.out, len(missing.error_lines)) == (3, "", 1), missing.err
        assert "could not be downloaded" in missing.err
        monkeypatch.setattr(kind, "_URL", f"{address}/rendered-sst2.tgz")
        result = call(*evaluate, "--download")
        server.shutdown()
    assert result.code == 0, result.err
    assert result.out.startswith("model,data,split"), "what torchvision prints is not data"
    assert "torchvision:RenderedSST2,test,2," in result.out
    monkeypatch.setenv("ATLAS_DOWNLOAD", "")
    again = call(*evaluate)  # the server is gone, and not needed
    assert (again.code, again.out) == (0, result.out)
