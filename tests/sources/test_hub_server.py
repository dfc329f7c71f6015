"""The loopback Hub against the real client, and what that client does when things go wrong.

What the client does is its own affair and is looked at with the slow tests; what atlas makes of
it is in test_hub.py.

Every call runs in a process of its own, since the client reads its settings on import. There
``time.sleep`` is replaced by a record of the seconds asked for, so back-off costs no time.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request as UrlRequest
from urllib.request import urlopen

import pytest
from conftest import TIMEOUT
from hub import Hub, client_env, closed_endpoint

CLIENT = tuple(int(number) for number in re.findall(r"\d+", version("huggingface_hub"))[:2])
CHUNK = 10 * 2**20  # the client hands over what it receives in pieces of this size

FILES = {
    "config.json": b'{"a": 1}',
    "sub/with space.txt": b"text",
    "model.safetensors": bytes(range(256)) * 20,
}

DRIVER = """
import json, sys, time
slept = []
time.sleep = slept.append
import huggingface_hub
name, args, kwargs = json.load(sys.stdin)
owner = huggingface_hub if hasattr(huggingface_hub, name) else huggingface_hub.HfApi()
started = time.monotonic()
result = {"value": None, "raised": [], "cause": None, "status": None, "text": ""}
try:
    value = getattr(owner, name)(*args, **kwargs)
    result["value"] = getattr(value, "sha", value)
except Exception as error:
    kinds = [kind.__module__ + "." + kind.__qualname__ for kind in type(error).__mro__]
    result["raised"] = kinds
    result["cause"] = error.__cause__ and type(error.__cause__).__name__
    response = getattr(error, "response", None)
    result["status"] = None if response is None else response.status_code
    result["text"] = str(error)
result["seconds"] = time.monotonic() - started
print(json.dumps({**result, "slept": slept}))
"""


@dataclass
class Outcome:
    value: Any
    raised: list[str]
    cause: str | None
    status: int | None
    text: str
    seconds: float
    slept: list[float]

    def is_a(self, name: str) -> bool:
        return f"huggingface_hub.errors.{name}" in self.raised


def call(env: dict[str, str], name: str, *args: Any, **kwargs: Any) -> Outcome:
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        input=json.dumps([name, args, kwargs]),
        env=env,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stderr
    return Outcome(**json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture
def hub():
    with Hub() as server:
        yield server


@pytest.fixture
def commit(hub):
    return hub.add("owner/name", FILES, tags=["v1.0", "release/2"])


def read(folder: str) -> dict[str, bytes]:
    root = Path(folder)
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


# The server by itself.


def test_commits_are_deterministic_and_move_the_branch(hub, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_bytes(b"1")
    first = hub.add("o/n", tmp_path)
    with Hub() as other:
        assert other.add("o/n", {"sub/a.txt": b"1"}) == first
    assert re.fullmatch("[0-9a-f]{40}", first)
    second = hub.add("o/n", {"sub/a.txt": b"2"})
    assert second != first
    for revision, content in (("main", b"2"), (second, b"2"), (first, b"1")):
        with urlopen(f"{hub.endpoint}/o/n/resolve/{revision}/sub/a.txt") as response:
            assert response.read() == content
            assert response.headers["X-Repo-Commit"] == (first if content == b"1" else second)


@pytest.mark.parametrize(
    ("header", "start", "stop"),
    [("bytes=2-", 2, None), ("bytes=0-2", 0, 3), ("bytes=-3", -3, None)],
)
def test_ranges(hub, commit, header, start, stop):
    url = f"{hub.endpoint}/owner/name/resolve/main/config.json"
    with urlopen(UrlRequest(url, headers={"Range": header})) as response:
        assert response.status == 206
        assert response.read() == FILES["config.json"][start:stop]
        assert response.headers["Content-Range"].endswith(f"/{len(FILES['config.json'])}")
    assert hub.requests[-1].headers["Range"] == header


def test_a_range_past_the_end_is_refused(hub, commit):
    url = f"{hub.endpoint}/owner/name/resolve/main/config.json"
    with pytest.raises(HTTPError) as caught:
        urlopen(UrlRequest(url, headers={"Range": "bytes=8-"}))
    caught.value.close()
    assert caught.value.code == 416
    assert caught.value.headers["Content-Range"] == "bytes */8"


def test_large_files_have_the_sha256_as_etag(hub, commit):
    def head(name: str) -> Any:
        url = f"{hub.endpoint}/owner/name/resolve/main/{name}"
        with urlopen(UrlRequest(url, method="HEAD")) as response:
            return response.headers

    small, large = head("config.json"), head("model.safetensors")
    assert re.fullmatch('"[0-9a-f]{40}"', small["ETag"])
    assert "X-Linked-Etag" not in small
    assert re.fullmatch('"[0-9a-f]{64}"', large["X-Linked-Etag"])
    assert large["X-Linked-Size"] == large["Content-Length"] == str(len(FILES["model.safetensors"]))


# Downloads.


@pytest.mark.slow
def test_snapshot_by_branch_tag_and_commit(hub, commit, tmp_path):
    env = hub.env(tmp_path)
    first = call(env, "snapshot_download", "owner/name", allow_patterns=["*.json", "sub/*"])
    assert read(first.value) == {k: v for k, v in FILES.items() if k != "model.safetensors"}
    assert Path(first.value).name == commit
    assert not hub.gets("model.safetensors")
    for revision in ("v1.0", "release/2", commit):
        again = call(env, "snapshot_download", "owner/name", revision=revision)
        assert again.value == first.value
    assert read(first.value) == FILES
    assert {name: len(hub.gets(name)) for name in FILES} == dict.fromkeys(FILES, 1)


@pytest.mark.slow
def test_a_moved_branch_fetches_only_what_changed(hub, commit, tmp_path):
    env = hub.env(tmp_path)
    call(env, "snapshot_download", "owner/name")
    moved = hub.add("owner/name", {**FILES, "config.json": b"{}"})
    new = call(env, "snapshot_download", "owner/name")
    assert Path(new.value).name == moved
    assert read(new.value) == {**FILES, "config.json": b"{}"}
    assert len(hub.gets("config.json")) == 2
    assert len(hub.gets("model.safetensors")) == 1
    old = call(env, "snapshot_download", "owner/name", revision=commit)
    assert read(old.value) == FILES


@pytest.mark.parametrize("name", FILES)
@pytest.mark.slow
def test_single_file(hub, commit, tmp_path, name):
    done = call(hub.env(tmp_path), "hf_hub_download", "owner/name", name, revision="v1.0")
    assert Path(done.value).read_bytes() == FILES[name]


@pytest.mark.slow
def test_model_info_gives_the_commit(hub, commit, tmp_path):
    done = call(hub.env(tmp_path), "model_info", "owner/name", revision="release/2", timeout=60)
    assert done.value == commit


# Connections that break.


@pytest.mark.slow
def test_a_cut_download_starts_again(hub, commit, tmp_path):
    hub.cut_after("model.safetensors", 1000)
    env = hub.env(tmp_path)
    done = call(env, "hf_hub_download", "owner/name", "model.safetensors")
    if done.raised:  # older clients leave the next try to the caller
        assert CLIENT < (2, 4)
        done = call(env, "hf_hub_download", "owner/name", "model.safetensors")
    assert Path(done.value).read_bytes() == FILES["model.safetensors"]
    # What is short of a whole piece is thrown away, so the second request is for everything.
    assert [request.headers.get("Range") for request in hub.gets("model.safetensors")] == [None] * 2


@pytest.mark.slow
def test_a_cut_download_resumes_after_the_last_whole_piece(hub, tmp_path):
    data = bytes(range(256)) * (5 * CHUNK // 1024)  # a piece and a quarter
    hub.add("owner/large", {"model.bin": data})
    hub.cut_after("model.bin", CHUNK + 1000)
    env = hub.env(tmp_path)
    done = call(env, "hf_hub_download", "owner/large", "model.bin")
    if done.raised:
        assert CLIENT < (2, 4)
        done = call(env, "hf_hub_download", "owner/large", "model.bin")
    assert Path(done.value).read_bytes() == data
    ranges = [request.headers.get("Range") for request in hub.gets("model.bin")]
    assert ranges == [None, f"bytes={CHUNK}-"]


@pytest.mark.skipif(CLIENT < (2, 4), reason="the retries of this client are other ones")
@pytest.mark.slow
def test_the_client_gives_up_after_five_more_tries(hub, commit, tmp_path):
    hub.cut_after("model.safetensors", 1000, times=100)
    failed = call(hub.env(tmp_path), "snapshot_download", "owner/name")
    assert failed.raised[0] == "httpx2.RemoteProtocolError"
    assert "builtins.OSError" not in failed.raised
    assert failed.slept == [1] * 5
    assert len(hub.gets("model.safetensors")) == 6
    assert not list(tmp_path.rglob("*.incomplete"))  # nothing for a later process to resume from


@pytest.mark.slow
def test_a_reset_connection_fails_and_the_next_call_succeeds(hub, commit, tmp_path):
    hub.cut_after("model.safetensors", 1000, reset=True)
    env = hub.env(tmp_path)
    failed = call(env, "snapshot_download", "owner/name")
    if CLIENT >= (2, 4):
        assert failed.raised[0] == "httpx2.ReadError"
        assert failed.slept == []
    assert failed.raised
    assert not failed.is_a("HfHubHTTPError")
    done = call(env, "snapshot_download", "owner/name")
    assert read(done.value) == FILES
    assert len(hub.gets("config.json")) == 1


# Answers that are errors.


@pytest.mark.parametrize(
    ("name", "args", "kind", "status"),
    [
        ("snapshot_download", ["owner/other"], "RepositoryNotFoundError", 404),
        ("hf_hub_download", ["owner/other", "config.json"], "RepositoryNotFoundError", 404),
        ("snapshot_download", ["owner/name", "nope"], "RevisionNotFoundError", 404),
        ("snapshot_download", ["owner/name", "a" * 40], "RevisionNotFoundError", 404),
        ("hf_hub_download", ["owner/name", "config.json", "nope"], "RevisionNotFoundError", 404),
        ("hf_hub_download", ["owner/name", "nope.json"], "EntryNotFoundError", 404),
        ("snapshot_download", ["owner/private"], "RepositoryNotFoundError", 401),
        ("hf_hub_download", ["owner/private", "config.json"], "RepositoryNotFoundError", 401),
        ("snapshot_download", ["owner/gated"], "GatedRepoError", 401),
        ("hf_hub_download", ["owner/gated", "config.json"], "GatedRepoError", 401),
    ],
)
@pytest.mark.slow
def test_not_found_and_not_allowed(hub, commit, tmp_path, name, args, kind, status):
    for repo, gated in (("owner/private", False), ("owner/gated", True)):
        hub.add(repo, FILES)
        hub.require_token(repo, "hf_right", gated=gated)
    plain = 1 if name == "snapshot_download" else 2
    kwargs = {"revision": args[plain]} if len(args) > plain else {}
    failed = call(hub.env(tmp_path), name, *args[:plain], **kwargs)
    assert failed.is_a(kind)
    assert failed.is_a("HfHubHTTPError")
    assert not failed.is_a("LocalEntryNotFoundError")
    assert failed.status == status
    assert failed.slept == []


@pytest.mark.slow
def test_a_short_commit_is_no_revision(hub, commit, tmp_path):
    failed = call(hub.env(tmp_path), "snapshot_download", "owner/name", revision=commit[:8])
    assert failed.is_a("RevisionNotFoundError")


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.slow
def test_tokens(hub, commit, tmp_path, gated):
    hub.require_token("owner/name", "hf_right", gated=gated)
    wrong = call(hub.env(tmp_path, HF_TOKEN="hf_wrong"), "snapshot_download", "owner/name")
    assert wrong.status == 401
    assert wrong.raised[0].endswith("GatedRepoError" if gated else ".HfHubHTTPError")
    right = call(hub.env(tmp_path, HF_TOKEN="hf_right"), "snapshot_download", "owner/name")
    assert read(right.value) == FILES
    assert hub.requests[-1].headers["Authorization"] == "Bearer hf_right"


@pytest.mark.slow
def test_an_unavailable_server(hub, commit, tmp_path):
    env = hub.env(tmp_path)
    hub.fail_with(503, times=1)
    failed = call(env, "snapshot_download", "owner/name")
    assert failed.is_a("LocalEntryNotFoundError")
    assert failed.cause == "HfHubHTTPError"
    assert failed.slept == []
    done = call(env, "snapshot_download", "owner/name")
    hub.fail_with(503, times=1)
    cached = call(env, "snapshot_download", "owner/name")
    assert cached.value == done.value


# No server.


@pytest.mark.slow
def test_unreachable(tmp_path):
    env = client_env(closed_endpoint(), tmp_path)
    by_branch = call(env, "snapshot_download", "owner/name")
    by_commit = call(env, "snapshot_download", "owner/name", revision="a" * 40)
    file = call(env, "hf_hub_download", "owner/name", "config.json")
    for failed in (by_branch, by_commit, file):
        assert failed.is_a("LocalEntryNotFoundError")
        assert failed.cause in ("ConnectError", "ConnectionError")
    assert by_branch.slept == []
    if CLIENT >= (2, 4):
        assert by_commit.slept == file.slept == [1, 2, 4, 8, 8]


@pytest.mark.slow
def test_unreachable_with_a_cache(hub, commit, tmp_path):
    call(hub.env(tmp_path), "snapshot_download", "owner/name")
    env = client_env(closed_endpoint(), tmp_path)
    for revision in ("main", commit):
        done = call(env, "snapshot_download", "owner/name", revision=revision)
        assert read(done.value) == FILES
        assert done.slept == []


@pytest.mark.slow
def test_model_info_can_be_told_how_long_to_wait(tmp_path):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        env = client_env(f"http://127.0.0.1:{silent.getsockname()[1]}", tmp_path)
        failed = call(env, "model_info", "owner/name", timeout=0.5)
    assert failed.raised[0].endswith(".ReadTimeout")
    assert failed.seconds < 10


@pytest.mark.slow
def test_offline(hub, commit, tmp_path):
    offline = hub.env(tmp_path, HF_HUB_OFFLINE="1")
    failed = call(offline, "snapshot_download", "owner/name")
    assert failed.is_a("LocalEntryNotFoundError")
    assert failed.cause == "OfflineModeIsEnabled"
    failed = call(offline, "hf_hub_download", "owner/name", "config.json")
    assert failed.is_a("LocalEntryNotFoundError")
    failed = call(offline, "model_info", "owner/name")
    assert failed.is_a("OfflineModeIsEnabled")
    assert hub.requests == []

    some = call(hub.env(tmp_path), "snapshot_download", "owner/name", allow_patterns="*.json")
    hub.requests.clear()
    again = call(offline, "snapshot_download", "owner/name", allow_patterns="*.json")
    assert again.value == some.value
    everything = call(offline, "snapshot_download", "owner/name")
    if CLIENT >= (2, 4):
        assert everything.is_a("IncompleteSnapshotError")
    else:  # the folder is returned as it is
        assert everything.value == some.value
    assert hub.requests == []
