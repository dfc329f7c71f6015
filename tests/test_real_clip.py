"""The commands of docs/real_clip.md that need a network run against a Hub on loopback.

It holds small models under the names of the page, laid out as the published ones are.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import published
import pytest
from conftest import TIMEOUT
from hub import Hub
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
