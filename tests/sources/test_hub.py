"""Models from the Hub, by the real client, from a server on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import Result, write_open_clip
from hub import Hub, closed_endpoint

SHOW = """
import json, sys
from atlas_cli.sources.locate import locate
from atlas_cli.sources.locate import parse_reference
print(json.dumps(locate(parse_reference(sys.argv[1])).provenance()))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_open_clip(tmp_path_factory.mktemp("served"))


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        yield server


@pytest.fixture
def online(hub: Hub, run, tmp_path: Path) -> Callable[..., Result]:
    """Run atlas with the loopback server as its Hub."""

    def run_online(*arguments: str | Path, **environment: str) -> Result:
        given = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": f"{tmp_path}/hf"}
        return run(*arguments, **(given | environment))

    return run_online


def evaluate(reference: str) -> list[str]:
    return ["eval", reference, "--data", "builtin:digits", "--shots", "1", "--json"]


def test_a_model_is_found_by_branch_tag_commit_and_file(hub: Hub, online, model: Path):
    first = hub.add("me/clip", model, tags=["v1"])
    changed = {path.name: path.read_bytes() for path in model.iterdir()}
    second = hub.add("me/clip", changed | {"README.md": b"new"})
    assert first != second
    file = "open_clip_model.safetensors"
    for revision, commit in (
        ("", second),
        ("@main", second),
        ("@v1", first),
        (f"@{first}", first),
        (f"/{file}@v1", first),
    ):
        result = online(*evaluate(f"me/clip{revision}"))
        assert result.code == 0, result.err
        (provenance,) = json.loads(result.out)["models"]
        assert provenance["commit"] == commit
        assert list(provenance["sha256"]) == [file]


def test_what_was_downloaded_is_used_offline_and_is_not_fetched_again(
    hub: Hub, online, model: Path
):
    hub.add("me/clip", model)
    assert online(*evaluate("me/clip")).code == 0
    before = len(hub.gets("open_clip_model.safetensors"))
    assert before == 1
    again = online(*evaluate("me/clip"))
    assert again.code == 0
    assert len(hub.gets("open_clip_model.safetensors")) == before
    offline = online(*evaluate("me/clip"), HF_HUB_OFFLINE="1")
    assert offline.out == again.out
    unreachable = online(*evaluate("me/clip"), HF_ENDPOINT=closed_endpoint())
    assert unreachable.out == again.out


def test_a_connection_cut_in_the_middle_is_tried_again(hub: Hub, online, model: Path):
    hub.add("me/clip", model)
    hub.cut_after("open_clip_model.safetensors", 10_000, times=1)
    result = online(*evaluate("me/clip"))
    assert result.code == 0, result.err
    assert len(hub.gets("open_clip_model.safetensors")) == 2


def test_a_reset_connection_is_tried_again(hub: Hub, online, model: Path):
    hub.add("me/clip", model)
    hub.cut_after("open_clip_model.safetensors", 10_000, times=1, reset=True)
    result = online(*evaluate("me/clip"))
    assert result.code == 0, result.err


def test_a_connection_that_is_always_cut_is_one_line_and_the_next_run_succeeds(
    hub: Hub, online, model: Path
):
    hub.add("me/clip", model)
    hub.cut_after("open_clip_model.safetensors", 10_000, times=3, reset=True)
    result = online(*evaluate("me/clip"))
    assert (result.code, len(result.error_lines)) == (3, 1)
    assert "could not be reached" in result.err
    assert online(*evaluate("me/clip")).code == 0


def test_a_token_opens_a_private_repository(hub: Hub, online, model: Path):
    hub.add("me/secret", model)
    hub.require_token("me/secret", "hf_right")
    refused = online(*evaluate("me/secret"))
    assert (refused.code, refused.error_lines) == (
        3,
        ["atlas: error: me/secret: not allowed (401); set HF_TOKEN or check the name"],
    )
    assert online(*evaluate("me/secret"), HF_TOKEN="hf_right").code == 0


@pytest.mark.parametrize(
    ("reference", "line"),
    [
        ("me/none", "me/none: no such model on the Hub, nor a local path of that name"),
        ("me/clip@v9", "me/clip@v9: the repository has no such revision"),
        ("me/clip/x.safetensors", "me/clip: has no file x.safetensors"),
    ],
)
def test_what_is_not_there_is_one_line(hub: Hub, online, model: Path, reference: str, line: str):
    hub.add("me/clip", model)
    result = online(*evaluate(reference))
    assert (result.code, result.error_lines) == (3, [f"atlas: error: {line}"])


def test_an_unreachable_server_is_one_line(online):
    endpoint = closed_endpoint()
    result = online(*evaluate("me/clip"), HF_ENDPOINT=endpoint)
    assert (result.code, result.error_lines) == (
        3,
        [f"atlas: error: me/clip: {endpoint} could not be reached (no answer)"],
    )


def test_a_failing_server_is_one_line(hub: Hub, online, model: Path):
    hub.add("me/clip", model)
    hub.fail_with(503, times=50)
    result = online(*evaluate("me/clip"))
    assert (result.code, len(result.error_lines)) == (3, 1)
    assert "it answered 503" in result.err


def test_offline_without_a_download_is_one_line(online):
    result = online(*evaluate("me/clip"), HF_HUB_OFFLINE="1")
    assert (result.code, result.error_lines) == (
        3,
        ["atlas: error: me/clip: not downloaded yet, and HF_HUB_OFFLINE is set"],
    )


def test_a_download_folder_that_cannot_be_written_is_one_line(
    hub: Hub, as_ordinary_user, model: Path, tmp_path: Path
):
    hub.add("me/clip", model)
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    result = as_ordinary_user(
        *evaluate("me/clip"), HF_ENDPOINT=hub.endpoint, HF_HUB_OFFLINE="0", HF_HOME=f"{locked}/hf"
    )
    assert (result.code, len(result.error_lines)) == (1, 1)
    assert "set HF_HOME to a folder that can be written" in result.err


def test_downloads_show_progress_on_a_terminal_only(hub: Hub, online, model: Path):
    hub.add("me/clip", model)
    assert online(*evaluate("me/clip")).err == ""


def test_the_weights_of_an_open_clip_tag_come_from_the_repository_it_lists(
    hub: Hub, online, tmp_path: Path
):
    hub.add("timm/vit_base_patch32_clip_224.openai", {"open_clip_config.json": b"{}"})
    result = online(*evaluate("ViT-B-32/openai"))
    assert (result.code, result.error_lines) == (
        1,
        ["atlas: error: ViT-B-32/openai: expected one weight file, found none"],
    )
    paths = [request.path for request in hub.requests]
    assert any("timm/vit_base_patch32_clip_224.openai" in path for path in paths)


def test_locating_a_model_imports_no_torch(hub: Hub, model: Path, tmp_path: Path):
    hub.add("me/clip", model)
    code = f"import sys\n{SHOW}\nassert 'torch' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", code, "me/clip"],
        env=os.environ | hub.env(tmp_path / "home") | {"HF_HUB_OFFLINE": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
