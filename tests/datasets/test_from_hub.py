"""hf:OWNER/NAME, by the real clients, from a server on loopback that holds Parquet files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import TIMEOUT
from faults import messages
from hub import Hub
from hub_datasets import coloured, parquet
from PIL import Image

DIGITS = [str(number) for number in range(10)]
FILE = "data/train-00000-of-00001.parquet"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        yield server


OPEN = """
import json, os, sys
from atlas_cli.datasets.dataset import open_dataset
from atlas_cli.errors import AtlasError
for text, options in json.loads(sys.argv[1]):
    try:
        found = open_dataset(text, **options)
        names = {"classes": found.classes, "templates": found.templates, "split": found.split}
        files = [(str(found.root / one.key), one.label) for one in found.samples]
        print(json.dumps({**names, "samples": files}))
    except AtlasError as problem:
        print(json.dumps({"code": problem.exit_code, "said": str(problem)}))
sys.stdout.flush()
os._exit(0)  # as commands end: threads of libraries may not survive the end of an interpreter
"""


@pytest.fixture
def opened(hub: Hub, tmp_path: Path) -> Callable[..., list[Any]]:
    """Open data references in another process with the loopback server as its Hub."""

    def open_all(*asked: tuple[str, dict[str, Any]], **environment: str) -> list[Any]:
        surroundings = hub.env(tmp_path / "hf", ATLAS_CACHE=f"{tmp_path}/cache")
        done = subprocess.run(
            [sys.executable, "-c", messages.RECORD + OPEN, json.dumps(asked)],
            env=surroundings | {"HF_HUB_OFFLINE": "0"} | environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
        assert (done.returncode, done.stderr) == (0, "")
        return [json.loads(line) for line in done.stdout.splitlines()]

    return open_all


def counted(found: Any) -> list[int]:
    """How many images of every class there are; each is of the colour of its class."""
    for path, label in found["samples"]:
        assert Image.open(path).getpixel((0, 0))[0] == 20 * label, path
    numbers = Counter(label for _, label in found["samples"])
    return [numbers[label] for label in range(len(found["classes"]))]


def bytes_read(hub: Hub, file: str = FILE) -> int:
    spans = [
        request.headers["Range"].removeprefix("bytes=").split("-") for request in hub.gets(file)
    ]
    return sum(int(last) + 1 - int(first) for first, last in spans)


def test_shots_read_no_more_of_ten_thousand_images_than_they_need(hub: Hub, opened):
    """Labels decide which row groups are read: few if they are mixed, one per class if sorted."""
    images = [coloured(label) for label in range(10)]
    mixed = np.random.default_rng(0).integers(0, 10, 10_000).tolist()
    kinds = {"mixed": (mixed, 3), "sorted": (sorted(mixed), 14)}
    sizes = {}
    for name, (labels, _) in kinds.items():
        content = parquet([images[label] for label in labels], labels, DIGITS)
        hub.add(f"datasets/owner/{name}", {f"{name}/{FILE}": content})
        sizes[name] = len(content)
    asked = [(f"hf:owner/{name}", {"split": "train", "shots": 4}) for name in kinds]
    found = opened(*asked)
    for one, (name, (_, groups)) in zip(found, kinds.items(), strict=True):
        assert counted(one) == [4] * 10
        group = sizes[name] / 100  # bytes of a row group; the rest is labels and the file's end
        assert 0 < bytes_read(hub, f"{name}/{FILE}") < groups * group + 200_000
        assert bytes_read(hub, f"{name}/{FILE}") < sizes[name] / 4
    # What was fetched is kept: nothing of the files is read again, also without a network.
    hub.requests.clear()
    assert opened(*asked) == found
    assert hub.gets(FILE) == []
    assert opened(*asked, HF_HUB_OFFLINE="1") == found


def test_fewer_shots_are_a_subset_of_more_and_the_seed_decides_which(hub: Hub, opened):
    labels = [number % 3 for number in range(300)]
    images = [coloured(label) for label in range(3)]
    content = parquet([images[label] for label in labels], labels, ["0", "1", "2"], group=10)
    hub.add("datasets/owner/three", {FILE: content})
    wishes = [{"shots": 2}, {"shots": 5}, {"shots": 2, "seed": 1}]
    found = opened(*(("hf:owner/three", {"split": "train", **wish}) for wish in wishes))
    two, five, other = ({Path(path).name for path, _ in one["samples"]} for one in found)
    assert two < five
    assert two != other


def test_classes_labels_and_prompts_of_a_mirror_are_those_of_the_dataset(hub: Hub, opened):
    """By names, whatever their order, or by numbers; other datasets keep their own names."""
    labels = ["SeaLake", "River", "Residential", "PermanentCrop", "Pasture"]
    labels += ["Industrial", "Highway", "HerbaceousVegetation", "Forest", "AnnualCrop"]
    every = [coloured(label) for label in range(10)]
    for name, names in (("eurosat", labels), ("gtsrb_ten", ["stop_sign", *DIGITS[1:]])):
        content = parquet(every, list(range(10)), names)
        hub.add(f"datasets/me/{name}", {"data/test-00000-of-00001.parquet": content})
    hub.add(
        "datasets/me/mnist", {"x/test-00000-of-00001.parquet": parquet(every, [*range(10)], DIGITS)}
    )
    hub.add("datasets/me/words", {FILE: parquet(every[:2], ["dog", "cat"], None)})
    hub.add("datasets/me/loose", {f"test/{n}/{i}.png": every[n] for n in (0, 1) for i in range(3)})
    names = ("eurosat@test", "mnist", "gtsrb_ten", "words@train", "loose")
    eurosat, mnist, other, words, loose = opened(*((f"hf:me/{name}", {}) for name in names))
    assert eurosat["classes"][0] == "lake or sea"
    assert eurosat["classes"][-1] == "annual crop land"
    assert "a centered satellite photo of a {}." in eurosat["templates"]
    assert (eurosat["split"], counted(eurosat)) == ("test", [1] * 10)
    assert (mnist["classes"], mnist["templates"]) == (DIGITS, ['a photo of the number: "{}".'])
    assert other["classes"][0] == "stop sign"
    assert words["classes"] == ["cat", "dog"], "texts for labels, in order"
    assert [label for _, label in words["samples"]] == [1, 0]
    assert counted(loose) == [3, 3], "files that are not Parquet are streamed"


def test_a_mirror_scores_as_the_folder_that_it_was_made_of(hub: Hub, run, tmp_path: Path):
    home = tmp_path / "home"
    assert run("draw", "builtin:digits", "--split", "val", "-o", home).code == 0
    paths = sorted(home.rglob("*.png"))
    labels = [int(path.parent.name) for path in paths]
    content = parquet([path.read_bytes() for path in paths], labels, DIGITS)
    hub.add("datasets/me/digits", {"data/validation-00000-of-00001.parquet": content})
    online = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": f"{tmp_path}/hf"}
    given = ("--template", "a photo of a {}.", "--json")
    result = run("eval", "builtin:tiny", "--data", home, "hf:me/digits", *given, **online)
    assert result.code == 0, result.err
    ours, theirs = json.loads(result.out)["results"]
    assert (ours["images"], ours["top1"]) == (theirs["images"], theirs["top1"])
    assert theirs["split"] == "val"


def test_what_cannot_be_read_is_told_in_one_line(hub: Hub, opened, tmp_path: Path):
    hub.add("datasets/me/text", {"data/train.csv": b"a,b\n1,2\n"})
    hub.add("datasets/me/small", {FILE: parquet([coloured(0), coloured(1)], [0, 1], ["0", "1"])})
    hub.add("datasets/me/secret", {FILE: b""})
    hub.require_token("datasets/me/secret", "hf_x")
    hub.add("datasets/me/broken", {FILE: b"no parquet" * 100})
    hub.add("datasets/me/words", {"README.md": b"no images yet"})
    cases: list[tuple[str, dict[str, Any], int, str]] = [
        ("hf:me/missing", {}, 3, "no such dataset on the Hub"),
        ("hf:me/secret", {}, 3, "no such dataset on the Hub, or not allowed"),
        ("hf:me/small:other", {}, 2, "BuilderConfig 'other' not found"),
        ("hf:me/small@test", {}, 2, "no split test (it has train"),
        ("hf:me/small@train", {"split": "test"}, 2, "names a split, and --split test another"),
        ("hf:a/b/c", {}, 2, "expected hf:OWNER/NAME"),
        ("hf:me/broken@train", {}, 1, "cannot be read: Parquet magic bytes not found"),
        ("hf:me/words", {}, 1, "has no files that `datasets` reads"),
        ("hf:me/text@train", {}, 1, "does not say what its columns are"),
        ("hf:me/small@train", {"shots": 3}, 1, "class '0' has 1 images, fewer than 3"),
    ]
    found = opened(*((text, options) for text, options, _, _ in cases))
    for (text, _, code, said), one in zip(cases, found, strict=True):
        assert one["code"] == code, one
        assert one["said"].startswith(f"{text}: {said}"), one
        assert "\n" not in one["said"]
    small = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert len(small) == 3, "the two images of hf:me/small and their index; nothing is half there"
