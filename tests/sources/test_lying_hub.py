"""A Hub that answers with anything, and a system that gives nothing: one line each."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from conftest import TIMEOUT

from atlas_cli.errors import UnreachableError
from atlas_cli.sources import hub

COMMIT = "0" * 40
Answer = tuple[dict[str, str], bytes]


@contextmanager
def answering(
    answer: Callable[[str], Answer], then: Callable[[], object] = lambda: None
) -> Iterator[str]:
    """A server that answers 200 to everything, with headers and a body for each path.

    `then` happens after a body that is shorter than it was said to be.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            headers, body = answer(self.path)
            self.send_response(200)
            for name, value in ({"Content-Length": str(len(body))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)
                if headers.get("Content-Length", str(len(body))) != str(len(body)):
                    then()

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_port}"
        finally:
            listening.shutdown()
            thread.join()


def listing(*names: str, commit: str = COMMIT) -> bytes:
    files = [{"rfilename": name} for name in names]
    return json.dumps({"id": "o/n", "sha": commit, "siblings": files}).encode()


LISTINGS = {
    b"<html><title>Sign in</title></html>": "answers as no Hub does",
    b"\x89\xff\x00 garbage": "answers as no Hub does",
    b"[]": "answers as no Hub does",
    b"null": "answers as no Hub does",
    b'{"siblings": 3}': "answers as no Hub does",
    b"9" * 5000: "answers as no Hub does",
    listing(): "o/n: is an empty repository",
    listing("../../x"): "o/n: lists a file outside its folder: ../../x",
    listing("a\x1b[2J"): "o/n: lists a file outside its folder",
    b'{"id": "o/n", "siblings": [{"rfilename": "a"}, {"rfilename": []}]}': "outside its folder: []",
}


def test_a_listing_that_is_none_is_one_line(monkeypatch: pytest.MonkeyPatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    now: list[bytes] = []
    with answering(lambda path: ({}, now[-1])) as address:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        for body, words in LISTINGS.items():
            now.append(body)
            with pytest.raises(UnreachableError) as raised:
                hub.ask("o/n", None)
            assert words in str(raised.value), body
            assert "\n" not in str(raised.value)


def test_files_that_are_endless_or_of_another_commit_are_one_line(run, tmp_path: Path):
    for headers in (
        {"Content-Length": str(10**13), "X-Repo-Commit": COMMIT},
        {"X-Repo-Commit": "../../x"},
        {},
    ):

        def answer(path: str, headers: dict[str, str] = headers) -> Answer:
            if path.startswith("/api/"):
                return {}, listing("config.json", "model.safetensors")
            return {"ETag": '"a"', **headers}, b"{}"

        home = tmp_path / f"hf{len(headers)}"
        with answering(answer) as address:
            given = {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "HF_HOME": str(home)}
            result = run("inspect", "hf:o/n", HF_HUB_DISABLE_XET="1", **given)
        assert (result.code, len(result.error_lines)) == (3, 1), (headers, result)
        assert sum(path.stat().st_size for path in home.rglob("*") if path.is_file()) < 10**6
        assert {path.name for path in tmp_path.iterdir()} <= {"hf0", "hf1", "hf2"}


@pytest.mark.slow
def test_a_download_that_stalls_ends(run, tmp_path: Path):
    """Of the file, a part comes, and then nothing; asked again, the same."""
    over = threading.Event()

    def answer(path: str) -> Answer:
        if path.startswith("/api/"):
            return {}, listing("config.json", "model.safetensors")
        return {"ETag": '"a"', "X-Repo-Commit": COMMIT, "Content-Length": "1000"}, b"{" * 10

    with answering(answer, then=lambda: over.wait(TIMEOUT)) as address:
        given = {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf")}
        more = {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DOWNLOAD_TIMEOUT": "1"}
        start = time.monotonic()
        result = run("inspect", "hf:o/n", **given, **more)
        over.set()
    assert (result.code, len(result.error_lines)) == (3, 1), result
    assert time.monotonic() - start < TIMEOUT
    assert not list((tmp_path / "hf").rglob("*.safetensors"))


def test_a_file_that_is_not_what_the_hub_named_is_dropped(tmp_path: Path):
    for content, named in ((b"right", b"right"), (b"wrong", b"right")):
        blob = tmp_path / "blobs" / hashlib.sha256(named).hexdigest()
        link = tmp_path / "snapshots" / COMMIT / "model.safetensors"
        blob.parent.mkdir(exist_ok=True)
        link.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        link.unlink(missing_ok=True)
        link.symlink_to(blob)
        if content == named:
            hub.verify(link)
            assert link.exists()
        else:
            with pytest.raises(UnreachableError, match="not what the Hub named: sha256"):
                hub.verify(link)
            assert not blob.exists()


def test_a_folder_that_is_gone_memory_that_ends_and_a_library_that_gives_up_are_one_line(
    call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for given in (("merge", "r.yaml", "-o", "out"), ("inspect", "x"), ("draw", "builtin:digits")):
        result = call(*given)
        assert (result.code in (1, 2), len(result.error_lines)) == (True, 1), (given, result)
    monkeypatch.chdir(tmp_path)

    class PanicException(BaseException):
        pass

    for problem, words in ((MemoryError(), "memory"), (PanicException("no file"), "gave up: no")):

        def exhausted(*given: object, problem: BaseException = problem, **more: object) -> None:
            raise problem

        monkeypatch.setattr("atlas_cli.sources.locate.locate", exhausted)
        result = call("inspect", "builtin:tiny")
        assert (result.code, len(result.error_lines)) == (1, 1), result
        assert words in result.err
