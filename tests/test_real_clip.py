"""The commands of the docs that need a network run against a Hub on loopback.

It holds small models under the names of the pages, laid out as the published ones are. Only names
that stand for an architecture of true size (`ViT-B-32/openai`) are replaced.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import published
import pytest
import torch
import yaml
from conftest import TIMEOUT, write_images
from hub import Hub
from hub_datasets import coloured, parquet
from merge_runs import linear, llama, write_model, write_recipe
from test_doc_commands import BLOCK, ROOT, environment  # noqa: F401 (a fixture)
from uploads import UploadHub

PAGE = (ROOT / "docs/real_clip.md").read_text("utf-8")


@pytest.fixture
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    folder = tmp_path_factory.mktemp("served")
    model = published.clip()
    with Hub() as server:
        server.add(published.BASE, published.write_base(model, folder / "base"))
        for seed, task in enumerate(published.EIGHT, start=1):
            made = published.write_vision(published.tuned(model, seed), folder / task)
            server.add(f"tanganke/clip-vit-base-patch32_{task}", made)
        yield server


def lines() -> list[str]:
    """Every command of the page, in order, with fewer images: those of all blocks."""
    blocks = [text for kind, text in BLOCK.findall(PAGE) if kind in ("sh", "text")]
    text = (
        "".join(blocks)
        .replace("--shots 16", "--shots 2")
        .replace(" -o run ", " --epochs 1 --batch-size 16 -o run ")
    )
    return text.splitlines()


def test_every_command_of_the_page_runs(
    hub: Hub,
    tmp_path: Path,
    environment: dict[str, str],  # noqa: F811
):
    caches = {"HF_HOME": f"{tmp_path}/hf", "ATLAS_CACHE": f"{tmp_path}/cache", "HF_TOKEN": "hf_x"}
    with UploadHub() as uploads:
        for line in lines():
            pushes = line.startswith("atlas push")
            endpoint = uploads.endpoint if pushes else hub.endpoint
            done = subprocess.run(
                ["bash", "-Eeuo", "pipefail", "-c", line],
                cwd=tmp_path,
                env=environment | caches | {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0"},
                capture_output=True,
                text=True,
                timeout=TIMEOUT,
            )
            assert done.returncode == 0, f"{line}\n{done.stderr}"
            if pushes:  # what was uploaded is there for the next command
                for name, files in uploads.files.items():
                    hub.add(name, files)
    assert done.stdout.count("\n") == 3, "the models of the last line have a row each"
    assert (tmp_path / "run/recipe.yaml").is_file()


def test_the_recipes_of_the_page_name_its_bases_and_sets():
    for base, zoo, recipe in re.findall(r"\| `(openai/\S+)` \| `(zoo:\S+)` \| \[(\S+)\]", PAGE):
        text = (ROOT / recipe).read_text("utf-8")
        assert f"model: {base}\n" in text
        assert f'vectors: ["{zoo}"]\n' in text


# The other pages ------------------------------------------------------------------------------


def examples(page: str, kind: str = "text") -> list[str]:
    """The blocks of a page that need what has to be downloaded."""
    text = (ROOT / "docs" / page).read_text("utf-8")
    return [block for found, block in BLOCK.findall(text) if found == kind]


@pytest.fixture
def shell(hub: Hub, tmp_path: Path, environment: dict[str, str]) -> Callable[[str], str]:  # noqa: F811
    """Run a block of commands in one folder with the loopback server as the Hub."""
    caches = {"HF_HOME": f"{tmp_path}/hf", "ATLAS_CACHE": f"{tmp_path}/cache"}
    caches |= {"HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0"}
    caches |= {"XDG_CONFIG_HOME": f"{tmp_path}/config"}

    def run(block: str) -> str:
        done = subprocess.run(
            ["bash", "-Eeuo", "pipefail", "-c", block.replace("ViT-B-32/openai", published.BASE)],
            cwd=tmp_path,
            env=environment | caches,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
        assert done.returncode == 0, f"{block}\n{done.stderr}"
        return done.stdout

    return run


def test_the_examples_of_models_and_data_run(hub: Hub, shell, tmp_path: Path):
    compared, drawn = examples("references.md")
    write_images(tmp_path / "photos", count=1)
    base, other = published.clip(), tmp_path / "served"
    written = published.write_base(published.tuned(base, 3), other / "tuned")
    torch.save(published.open_clip_state(written), other / "full.pt")
    laion = published.write_open_clip(written, other / "full.pt", other / "laion")
    hub.add("laion/CLIP-ViT-B-32-laion2B-s34B-b79K", laion)
    assert shell(compared).count("\n") == 3
    labels = [number % 10 for number in range(40)]
    classes = [f"class {number}" for number in range(10)]
    content = parquet([coloured(one) for one in labels], labels, classes)
    hub.add("datasets/tanganke/eurosat", {"data/train-00000-of-00001.parquet": content})
    assert shell(drawn.replace("--shots 16", "--shots 2")) == "eurosat\n"
    assert len(list((tmp_path / "eurosat").rglob("*.png"))) == 20


def test_the_examples_of_task_vectors_run(hub: Hub, shell, tmp_path: Path):
    model = published.clip()
    for folder in ("cars", "signs"):
        write_images(tmp_path / folder, count=1)
    (tmp_path / "checkpoints").mkdir()
    written = published.write_base(published.tuned(model, 3), tmp_path / "served")
    torch.save(published.open_clip_state(written), tmp_path / "checkpoints/epoch_1.pt")
    published.write_adapter(model, tmp_path / "adapter")
    for line in examples("task_vectors.md")[0].splitlines():
        shell(line.replace("atlas finetune", "atlas finetune --steps 1"))
    found = {path.name for path in (tmp_path / "vectors").glob("*.safetensors")}
    assert {"cars.safetensors", "signs.safetensors", "epoch_1.safetensors"} < found
    assert (tmp_path / "vectors.png").is_file()


def test_the_set_of_ones_own_is_pulled(hub: Hub, shell, tmp_path: Path):
    (own,) = examples("task_vectors.md", "yaml")
    (tmp_path / "config/atlas").mkdir(parents=True)
    (tmp_path / "config/atlas/zoo.yaml").write_text(own)
    for seed, task in enumerate(yaml.safe_load(own)["sets"]["mine"]["tasks"]):
        made = published.write_vision(published.tuned(published.clip(), seed), tmp_path / task)
        hub.add(f"owner/clip-{task}", made)
    assert shell("atlas zoo pull mine").count("\n") == 2


def test_a_recipe_of_mergekit_is_merged_by_the_same_words(shell, tmp_path: Path):
    theirs, ours = examples("mergekit.md")[0].splitlines()
    assert theirs.removeprefix("mergekit-yaml") == ours.removeprefix("atlas merge")
    for number in (1, 2):
        write_model(tmp_path / f"m{number}", llama(number))
    write_recipe(tmp_path / "recipe.yml", linear(0.5, 0.5))
    shell(ours)
    assert (tmp_path / "merged/model.safetensors").is_file()


def test_every_example_that_needs_a_network_is_run_here():
    counts = {page.name: len(examples(page.name)) for page in (ROOT / "docs").glob("*.md")}
    pages = ("real_clip.md", "references.md", "publishing.md", "task_vectors.md", "mergekit.md")
    assert [counts[page] for page in (*pages, "faq.md")] == [5, 2, 0, 1, 1, 0]
