"""Task vectors by reference: from the zoo, the Hub, folders and files, extracted once."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml
from conftest import Result, write_images
from hub import Hub, closed_endpoint
from published import (
    BASE,
    EIGHT,
    clip,
    open_clip_state,
    tuned,
    write_adapter,
    write_base,
    write_open_clip,
    write_vision,
)

from atlas_cli.vectors.format import open_checked

COLLECTION = "me/vectors-0123456789abcdef01234567"
LORA = "tanganke/clip-vit-base-patch16_{}_lora-16"


@dataclass(frozen=True)
class Models:
    """The folders of the models that tests serve; `tasks` are the eight."""

    base: Path
    tasks: dict[str, Path]
    adapter: Path
    full: Path
    photos: Path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root, model = tmp_path_factory.mktemp("published"), clip()
    base = write_base(model, root / "base")
    tasks = {
        task: write_vision(tuned(model, seed), root / task, prefix=seed % 2 == 0)
        for seed, task in enumerate(EIGHT)
    }
    adapter = write_adapter(model, root / "adapter")
    full = root / "full.pt"
    torch.save(open_clip_state(write_base(tuned(model, 9), root / "full")), full)
    return Models(base, tasks, adapter, full, write_images(root / "photos", count=2))


@pytest.fixture
def hub(models: Models) -> Iterator[Hub]:
    with Hub() as server:
        server.add(BASE, models.base)
        for task, folder in models.tasks.items():
            server.add(f"tanganke/clip-vit-base-patch32_{task}", folder)
        yield server


@pytest.fixture
def online(hub: Hub, run, tmp_path: Path) -> Callable[..., Result]:
    """Run atlas with the loopback server as its Hub, and caches of its own."""

    def run_online(*arguments: str | Path, **environment: str) -> Result:
        given = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": f"{tmp_path}/hf"}
        given |= {"ATLAS_CACHE": f"{tmp_path}/atlas", "XDG_CONFIG_HOME": f"{tmp_path}/config"}
        return run(*arguments, **(given | environment))

    return run_online


def fit(models: Models, *vectors: str, base: str = BASE) -> list[str]:
    return [
        *("fit", str(models.photos), "--model", base, "--epochs", "1", "--min-steps", "1"),
        *("--batch-size", "4", "--augment", "none", "--vectors", *vectors),
    ]


def downloads(hub: Hub) -> int:
    return len(hub.gets("model.safetensors"))


def sizes(folder: Path) -> int:
    """The bytes of a folder, without links to other files of it."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return sum(path.stat().st_size for path in files)


def test_a_fit_by_the_zoo_downloads_one_model_at_a_time_and_then_nothing(
    hub: Hub, online, models: Models, tmp_path: Path
):
    beside: list[int] = []

    def measure(path: str) -> None:
        if "_" in path and path.endswith("model.safetensors"):
            beside.append(sizes(tmp_path / "atlas" / "downloads"))

    hub.on_get = measure
    first = online(*fit(models, "zoo:vit-b-32/8"), "-o", tmp_path / "run")
    assert first.code == 0, first.err
    assert (len(beside), downloads(hub)) == (8, 9)  # the base is the ninth
    assert max(beside) < 10_000  # no other model is there when one is downloaded
    assert sizes(tmp_path / "atlas" / "downloads") == 0
    again = online(*fit(models, "zoo:vit-b-32/8"), "--exclude", "mnist")
    assert (again.code, downloads(hub)) == (0, 9), again.err
    assert "mnist: left out (--exclude)" in again.err
    assert "dtd: tanganke/clip-vit-base-patch32_dtd/model.safetensors@" in again.err
    for environment in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": closed_endpoint()}):
        offline = online(*fit(models, "zoo:vit-b-32/8"), "--exclude", "mnist", **environment)
        assert offline.out == again.out, offline.err


def test_what_is_learned_pins_commits_and_merges_offline(
    hub: Hub, online, models: Models, tmp_path: Path
):
    learned = online(*fit(models, "zoo:vit-b-32/mnist", "zoo:vit-b-32/dtd"), "-o", tmp_path / "run")
    assert learned.code == 0, learned.err
    recipe = yaml.safe_load(learned.out)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["vectors"] == recipe["vectors"]
    entry = recipe["vectors"][0]
    path, _, commit = entry["file"].partition("@")
    assert path == "tanganke/clip-vit-base-patch32_mnist/model.safetensors"
    assert (len(commit), entry["name"], entry["storage"]) == (40, "mnist", "int8")
    # The branch moves on; the recipe means what it meant.
    hub.add("tanganke/clip-vit-base-patch32_mnist", models.tasks["svhn"])
    (tmp_path / "learned.yaml").write_text(learned.out)
    merge = ["merge", tmp_path / "learned.yaml", "-o"]
    assert online(*merge, tmp_path / "one", HF_HUB_OFFLINE="1").code == 0
    shutil.rmtree(tmp_path / "atlas")  # and also when all has to be downloaded again
    assert online(*merge, tmp_path / "two").code == 0
    weights = [tmp_path / name / "model.safetensors" for name in ("one", "two")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    lock = yaml.safe_load((tmp_path / "one" / "atlas_recipe.lock.yaml").read_text())
    assert lock["vectors"] == recipe["vectors"]
    again = online("merge", tmp_path / "one" / "atlas_recipe.lock.yaml", "-o", tmp_path / "three")
    assert again.code == 0, again.err
    assert (tmp_path / "three" / "model.safetensors").read_bytes() == weights[0].read_bytes()


def test_a_cached_vector_is_the_one_that_extract_writes(
    hub: Hub, online, models: Models, tmp_path: Path
):
    pulled = online("zoo", "pull", "vit-b-32/mnist", "--storage", "fp32")
    assert pulled.code == 0, pulled.err
    plain = tmp_path / "mnist.safetensors"
    extract = ["extract", models.base, models.tasks["mnist"], "-o", plain]
    assert online(*extract).code == 0
    cached, wanted = open_checked(Path(pulled.out.strip())), open_checked(plain)
    assert cached.names == wanted.names
    assert all(torch.equal(cached.values(name), wanted.values(name)) for name in wanted.names)
    assert cached.header.fingerprint == wanted.header.fingerprint
    assert cached.header.finetuned["commit"]
    listed = online("zoo", "--json", "vit-b-32/8")
    cached_ones = {row["name"]: row["cached"] for row in json.loads(listed.out)["zoo"]}
    assert cached_ones["vit-b-32/8/mnist"] == "fp32"
    assert cached_ones["vit-b-32/8/dtd"] == ""


def test_folders_files_adapters_and_published_vectors_are_vectors_too(
    hub: Hub, online, models: Models, tmp_path: Path
):
    hub.add(LORA.format("mnist"), models.adapter)
    pickled = {f"finetune/ViT-B-32/openai/{task}/full.pt": models.full for task in ("Cars", "DTD")}
    hub.add(
        "merge-and-rebase/vision8-checkpoints",
        {name: path.read_bytes() for name, path in pickled.items()},
    )
    vector = tmp_path / "cars.safetensors"
    assert online("extract", models.base, models.tasks["stanford-cars"], "-o", vector).code == 0
    hub.add("me/cars-vector", {"cars.safetensors": vector.read_bytes(), "README.md": b"# Cars"})
    hub.add("me/open-clip-food", write_open_clip(models.base, models.full, tmp_path / "food"))
    given = [
        *(str(models.tasks["svhn"]), str(models.tasks["gtsrb"] / "model.safetensors")),
        *(str(models.adapter), LORA.format("mnist"), "hf://me/cars-vector"),
        *("zoo:vit-b-32/mar8/DTD", "tanganke/clip-vit-base-patch32_eurosat"),
        "me/open-clip-food",
    ]
    result = online(*fit(models, *given))
    assert result.code == 0, result.err
    entries = {one["name"]: one for one in yaml.safe_load(result.out)["vectors"]}
    adapter = LORA.format("mnist").partition("/")[2]
    wanted = ["svhn", "gtsrb", "adapter", adapter, "stanford-cars", "DTD", "eurosat"]
    wanted.append("open-clip-food")
    assert list(entries) == wanted
    assert "storage" not in entries["stanford-cars"]  # it was a vector already
    assert entries["DTD"]["file"].startswith(
        "merge-and-rebase/vision8-checkpoints/finetune/ViT-B-32/openai/DTD/full.pt@"
    )
    # The same weights as a pickle of a state dict and as a folder of open_clip: the same vector.
    same = [
        open_checked(next((tmp_path / "atlas" / "vectors").rglob(f"{name}-*.safetensors")))
        for name in ("DTD", "open-clip-food")
    ]
    assert same[0].names == same[1].names
    assert all(torch.equal(same[0].values(n), same[1].values(n)) for n in same[0].names)
    cached = list((tmp_path / "atlas" / "vectors").rglob("adapter-*.safetensors"))
    assert {info.storage for info in open_checked(cached[0]).header.blocks} == {"factors"}


def test_the_targets_own_vector_is_left_out_of_a_group_and_refused_alone(
    hub: Hub, online, models: Models, tmp_path: Path
):
    cars = shutil.copytree(models.photos, tmp_path / "cars")
    command = ["fit", cars, *fit(models, "zoo:vit-b-32/8")[2:]]
    group = online(*command)
    assert group.code == 0, group.err
    assert "stanford-cars: left out, since it was learned on the target itself" in group.err
    assert not hub.gets("tanganke/clip-vit-base-patch32_stanford-cars/resolve")
    assert len(yaml.safe_load(group.out)["vectors"]) == 7
    alone = online(*["fit", cars, *fit(models, "zoo:vit-b-32/stanford-cars")[2:]])
    assert alone.code == 1
    assert "say --allow-target" in alone.err


def test_a_collection_stands_for_its_models(hub: Hub, online, models: Models):
    name = "tanganke/clip-vit-base-patch32_{}"
    hub.add_collection(
        COLLECTION,
        [("model", name.format("mnist")), ("dataset", "me/data"), ("model", name.format("dtd"))],
    )
    result = online(*fit(models, f"hf://collections/{COLLECTION}"))
    assert result.code == 0, result.err
    assert [one["name"] for one in yaml.safe_load(result.out)["vectors"]] == ["mnist", "dtd"]
    assert "me/data: left out, since it is a dataset and no model" in result.err
    offline = online(*fit(models, f"hf://collections/{COLLECTION}"), HF_HUB_OFFLINE="1")
    assert offline.out == result.out
    missing = online(*fit(models, f"hf://collections/{COLLECTION}9"))
    assert (missing.code, len(missing.error_lines)) == (3, 1), missing.err


def test_users_add_sets_of_their_own(hub: Hub, online, models: Models, tmp_path: Path):
    own = tmp_path / "config" / "atlas" / "zoo.yaml"
    own.parent.mkdir(parents=True)
    table = {"base": BASE, "repository": "tanganke/clip-vit-base-patch32_{task}"}
    table |= {"format": "transformers CLIPVisionModel", "tasks": ["mnist", "dtd"]}
    own.write_text(yaml.safe_dump({"sets": {"mine": table}}))
    result = online(*fit(models, "zoo:mine"))
    assert result.code == 0, result.err
    assert [one["name"] for one in yaml.safe_load(result.out)["vectors"]] == ["mnist", "dtd"]
    own.write_text(yaml.safe_dump({"sets": {"mine": {**table, "taks": 1}}}))
    wrong = online("zoo")
    assert (wrong.code, wrong.error_lines) == (
        2,
        [f"atlas: error: {own}: mine: unknown key 'taks'; did you mean 'tasks'?"],
    )


# What goes wrong ------------------------------------------------------------------------------

TWO = ("zoo:vit-b-32/mnist", "zoo:vit-b-32/dtd")
MNIST = "tanganke/clip-vit-base-patch32_mnist"


def test_a_vanished_repository_is_one_line_unless_its_vector_is_cached(
    hub: Hub, online, models: Models
):
    assert online("zoo", "pull", "vit-b-32/mnist").code == 0
    hub.remove(MNIST)
    cached = online(*fit(models, *TWO))
    assert cached.code == 0, cached.err
    (told,) = [line for line in cached.error_lines if "no such model on the Hub" in line]
    assert told.startswith("atlas: warning: ")
    assert "is taken from the cache" in told
    other = online(*fit(models, *TWO), "-q", "--storage", "fp16")
    assert (other.code, other.out) == (3, "")
    assert other.error_lines[-1].startswith(f"atlas: error: {MNIST}: no such model on the Hub")


def test_a_gated_repository_is_one_line_and_what_was_made_stays(
    hub: Hub, online, models: Models, tmp_path: Path
):
    hub.require_token("tanganke/clip-vit-base-patch32_dtd", "hf_right", gated=True)
    refused = online(*fit(models, *TWO), "-q")
    assert (refused.code, len(refused.error_lines)) == (3, 1), refused.err
    assert "access has to be asked for on its page, then set HF_TOKEN" in refused.err
    assert len(list((tmp_path / "atlas" / "vectors").rglob("mnist-*.safetensors"))) == 1
    before = downloads(hub)
    allowed = online(*fit(models, *TWO), "-q", HF_TOKEN="hf_right")
    assert (allowed.code, downloads(hub)) == (0, before + 1), allowed.err


def test_a_changed_commit_is_told_and_a_resumed_run_refuses_it(
    hub: Hub, online, models: Models, tmp_path: Path
):
    run = [*fit(models, *TWO), "-o", tmp_path / "run"]
    assert online(*run).code == 0
    hub.add(MNIST, models.tasks["svhn"])
    changed = online(*fit(models, *TWO))
    assert changed.code == 0
    assert changed.err.count("zoo:vit-b-32/mnist: moved from commit") == 1
    assert len(list((tmp_path / "atlas" / "vectors").rglob("mnist-*.safetensors"))) == 2
    resumed = online(*run, "--resume", "-q")
    assert (resumed.code, len(resumed.error_lines)) == (2, 1)
    assert "was begun with" in resumed.err


def test_a_connection_that_is_cut_leaves_what_was_made_and_goes_on(
    hub: Hub, online, models: Models, tmp_path: Path
):
    online("zoo", "pull", "vit-b-32/eurosat")  # the base is there
    hub.cut_after("model.safetensors", 1000, times=3, reset=True)
    cut = online(*fit(models, *TWO), "-q")
    assert (cut.code, len(cut.error_lines)) == (3, 1), cut.err
    assert "could not be reached" in cut.err
    again = online(*fit(models, *TWO), "-q")
    assert again.code == 0, again.err
    assert sizes(tmp_path / "atlas" / "downloads") == 0


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_the_next_run_goes_on(
    hub: Hub, online, models: Models, tmp_path: Path
):
    disk = tmp_path / "atlas"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=320k", "none", str(disk)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        full = online(*fit(models, "zoo:vit-b-32/8"), "-q")
        assert (full.code, full.out, len(full.error_lines)) == (1, "", 1), full.err
        assert os.strerror(errno.ENOSPC) in full.err
        assert "set ATLAS_CACHE to a folder" in full.err
        made = len(list(disk.rglob("vectors/*/*.safetensors")))
        assert 0 < made < 8
        assert sizes(disk / "downloads") == 0
        subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
        before = downloads(hub)
        result = online(*fit(models, "zoo:vit-b-32/8"), "-q")
        assert result.code == 0, result.err
        assert 8 - made <= downloads(hub) - before < 8
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_what_is_no_vector_of_the_base_is_one_line_and_leaves_nothing(
    hub: Hub, online, models: Models, tmp_path: Path, open_clip_folder: Path
):
    hub.add("me/other", open_clip_folder)
    result = online(*fit(models, "hf://me/other"), "-q")
    assert (result.code, len(result.error_lines)) == (1, 1), result.err
    assert "does not fit the base model" in result.err
    assert sizes(tmp_path / "atlas" / "downloads") == 0
    assert not list((tmp_path / "atlas" / "vectors").rglob("*.safetensors"))


def test_names_that_are_none_are_told_before_anything_is_downloaded(
    hub: Hub, online, models: Models
):
    for vector, said in (
        ("zoo:vit-b-33", "unknown set 'zoo:vit-b-33'; did you mean 'vit-b-32'?"),
        ("zoo:vit-b-32/mnits", "unknown task 'zoo:vit-b-32/mnits'; did you mean 'mnist'?"),
        ("nothing.safetensors", "no such task vector: nothing.safetensors"),
    ):
        result = online(*fit(models, vector))
        assert (result.code, len(result.error_lines)) == (2, 1), result.err
        assert said in result.err
    assert hub.requests == []
    unknown = online(*fit(models, *TWO), "--exclude", "mnits")
    assert (unknown.code, unknown.error_lines) == (
        2,
        ["atlas: error: --exclude mnits: no such vector; did you mean 'mnist'?"],
    )
