"""A Hub-compatible HTTP server on loopback, for tests with the real ``huggingface_hub`` client.

    with Hub() as hub:
        commit = hub.add("owner/name", {"config.json": b"{}"}, tags=["v1"])
        subprocess.run([...], env=hub.env(tmp_path / "home"))
        assert hub.gets("config.json")

It answers what the client asks for when it reads a repository of a model, or of a dataset
(``datasets/owner/name``): info, file trees, refs, and files by ``HEAD`` and ``GET`` with ranges;
and collections.
There are no uploads, no Xet storage, no redirects.

Two answers differ from the Hub's on purpose. A missing repository is 404 to everybody (the Hub says
401 to callers without a token), and a private one is 401 *with* ``X-Error-Code: RepoNotFound`` (the
Hub sends no code): the client takes a bare 401 for "repository not found" only at https addresses,
so over plain http the code is needed for the same exception as in production.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

LFS_SUFFIXES = (".safetensors", ".bin", ".pt")
LFS_BYTES = 1024  # any file above this size is an LFS file as well

_KEPT_HEADERS = ("Range", "Authorization", "User-Agent")
_DATE = "2024-01-01T00:00:00.000Z"


class Request(NamedTuple):
    """One request as it came in; ``path`` is not unquoted and has the query."""

    method: str
    path: str
    headers: dict[str, str]


@dataclass(frozen=True)
class Blob:
    """The content of one file and the names the Hub gives it."""

    data: bytes
    oid: str
    lfs: dict[str, Any] | None

    @classmethod
    def of(cls, path: str, data: bytes) -> Blob:
        if not (path.endswith(LFS_SUFFIXES) or len(data) > LFS_BYTES):
            return cls(data, _git_oid("blob", data), None)
        sha256 = hashlib.sha256(data).hexdigest()
        pointer = (
            f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {len(data)}\n"
        ).encode()
        lfs = {"oid": sha256, "size": len(data), "pointerSize": len(pointer)}
        return cls(data, _git_oid("blob", pointer), lfs)

    @property
    def etag(self) -> str:
        return self.lfs["oid"] if self.lfs else self.oid


@dataclass
class _Repo:
    commits: dict[str, dict[str, Blob]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    token: str | None = None
    gated: bool = False

    def resolve(self, revision: str) -> str | None:
        """Return the commit of a branch, a tag or a full commit id."""
        named = self.branches.get(revision) or self.tags.get(revision)
        return named or (revision if revision in self.commits else None)


@dataclass
class _Cut:
    nbytes: int
    times: int
    reset: bool


class _Answer(Exception):  # noqa: N818
    """An error response, raised from wherever it is found out."""

    def __init__(self, status: int, code: str = "", message: str = "", **headers: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}
        if code:
            self.headers["X-Error-Code"] = code
        if message:
            self.headers["X-Error-Message"] = message


class Hub:
    """A context manager: the server runs in a thread while the block does."""

    endpoint: str

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self._repos: dict[str, _Repo] = {}
        self._cuts: dict[str, _Cut] = {}
        self._failures: list[int] = []
        self._collections: dict[str, list[tuple[str, str]]] = {}
        self.on_get: Callable[[str], None] = lambda path: None
        self._lock = threading.Lock()

    def __enter__(self) -> Hub:
        self._server = _Server(self)
        self.endpoint = "http://{}:{}".format(*self._server.server_address[:2])
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._server.drop_connections()
        self._thread.join()

    def add(
        self,
        repo: str,
        folder: Path | Mapping[str, bytes],
        *,
        branch: str = "main",
        tags: Sequence[str] = (),
    ) -> str:
        """Commit ``folder`` as the whole content of ``repo`` and return the commit id.

        The branch moves to the new commit, and so do the tags. The id depends on the content and
        on the commit the branch pointed to before.
        """
        if isinstance(folder, Path):
            folder = {
                path.relative_to(folder).as_posix(): path.read_bytes()
                for path in folder.rglob("*")
                if path.is_file()
            }
        files = {path: Blob.of(path, folder[path]) for path in sorted(folder)}
        with self._lock:
            entry = self._repos.setdefault(repo, _Repo())
            lines = [f"parent {entry.branches.get(branch)}"]
            lines += [f"{blob.oid} {path}" for path, blob in files.items()]
            commit = _git_oid("commit", "\n".join(lines).encode())
            entry.commits[commit] = files
            entry.branches[branch] = commit
            entry.tags.update(dict.fromkeys(tags, commit))
        return commit

    def remove(self, repo: str) -> None:
        """Have a repository vanish."""
        with self._lock:
            del self._repos[repo]

    def add_collection(self, slug: str, items: Sequence[tuple[str, str]]) -> None:
        """A collection of items, each a type (model, dataset, ...) and a name."""
        with self._lock:
            self._collections[slug] = list(items)

    def require_token(self, repo: str, token: str, *, gated: bool = False) -> None:
        """Answer 401 to requests without the token.

        A private repository hides everything. With ``gated``, info and file lists stay public and
        only the files are closed.
        """
        with self._lock:
            entry = self._repos.setdefault(repo, _Repo())
            entry.token, entry.gated = token, gated

    def cut_after(self, filename: str, nbytes: int, times: int = 1, *, reset: bool = False) -> None:
        """Drop the connection after ``nbytes`` of the body in the next ``times`` GETs of the file.

        The headers promise the whole body. The connection is closed, or with ``reset`` aborted.
        """
        with self._lock:
            self._cuts[filename] = _Cut(nbytes, times, reset)

    def fail_with(self, status: int, times: int) -> None:
        """Answer the next ``times`` requests, whatever they ask for, with ``status``."""
        with self._lock:
            self._failures += [status] * times

    def gets(self, filename: str) -> list[Request]:
        """Return the GET requests for the content of a file so far."""
        return [
            request
            for request in list(self.requests)
            if request.method == "GET"
            and "/resolve/" in request.path
            and unquote(request.path).endswith("/" + filename)
        ]

    def env(self, home: Path | str, **more: str) -> dict[str, str]:
        """Return an environment for a client process with its own cache and this endpoint."""
        return client_env(self.endpoint, home, **more)

    # What the request handler calls, from its threads.

    def _record(self, method: str, path: str, headers: Message) -> None:
        kept = {name: headers[name] for name in _KEPT_HEADERS if name in headers}
        with self._lock:
            self.requests.append(Request(method, path, kept))

    def _next_failure(self) -> int | None:
        with self._lock:
            return self._failures.pop(0) if self._failures else None

    def _next_cut(self, filename: str) -> _Cut | None:
        with self._lock:
            cut = self._cuts.get(filename)
            if cut is None or cut.times < 1:
                return None
            cut.times -= 1
            return cut

    def _find(self, name: str, authorization: str | None, *, content: bool) -> _Repo:
        repo = self._repos.get(name)
        if repo is None or not repo.commits:
            raise _Answer(404, "RepoNotFound", "Repository not found")
        if repo.token is None or authorization == f"Bearer {repo.token}":
            return repo
        if repo.gated:
            if not content:
                return repo
            message = (
                f"Access to model {name} is restricted. You must have access to it and be "
                "authenticated to access it. Please log in."
            )
            raise _Answer(401, "GatedRepo", message)
        if authorization is not None:
            raise _Answer(401, "", "Invalid credentials in Authorization header")
        raise _Answer(401, "RepoNotFound", "Invalid username or password.")


def client_env(endpoint: str, home: Path | str, **more: str) -> dict[str, str]:
    """Return an environment for a client process, without anything from the caller's own setup."""
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HF_", "HUGGING")) and not name.lower().endswith("_proxy")
    }
    env |= {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1",
    }
    return env | more


def closed_endpoint() -> str:
    """Return an address on loopback where nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def _git_oid(kind: str, data: bytes) -> str:
    return hashlib.sha1(f"{kind} {len(data)}\0".encode() + data).hexdigest()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self._open: set[socket.socket] = set()
        super().__init__(("127.0.0.1", 0), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the traceback, unless the client has just gone away."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    def drop_connections(self) -> None:
        """End the connections that clients keep alive; their threads then close them."""
        for connection in list(self._open):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        deadline = time.monotonic() + 5
        while self._open and time.monotonic() < deadline:
            time.sleep(0.001)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def do_GET(self) -> None:
        self._handle()

    def do_HEAD(self) -> None:
        self._handle()

    def do_POST(self) -> None:
        self._handle()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Stay silent."""

    def _handle(self) -> None:
        hub = self.server.hub
        hub._record(self.command, self.path, self.headers)
        try:
            url = urlsplit(self.path)
            parts = [unquote(part) for part in url.path.strip("/").split("/")]
            query = {name: values[-1] for name, values in parse_qs(url.query).items()}
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if parts[:2] == ["api", "collections"]:
                self._send(200, json.dumps(self._collection("/".join(parts[2:]))).encode())
                return
            api = parts[:2] in (["api", "models"], ["api", "datasets"])
            kind = "datasets/" if "datasets" in parts[:2] else ""
            parts = parts[1:] if parts[:1] == ["datasets"] else parts
            if not (api or "resolve" in parts[1:3][: len(parts) - 3]):
                raise _Answer(404, "", "Sorry, we can't find the page you are looking for.")
            status = hub._next_failure()
            if status is not None:
                raise _Answer(status)
            if api:
                self._send(200, json.dumps(self._api(kind, parts[2:], query, body)).encode())
            else:
                self._resolve(kind, parts)
        except _Answer as answer:
            body = json.dumps({"error": answer.message or self.responses[answer.status][0]})
            self._send(answer.status, body.encode(), answer.headers)

    def _repo(self, name: str, *, content: bool = False) -> _Repo:
        return self.server.hub._find(name, self.headers.get("Authorization"), content=content)

    def _api(self, kind: str, parts: list[str], query: dict[str, str], body: bytes) -> Any:
        verbs = (["revision"], ["tree"], ["refs"], ["paths-info"])
        cut = next((i for i in (1, 2) if parts[i : i + 1] in verbs), len(parts))
        name, rest = "/".join(parts[:cut]), parts[cut:]
        repo = self._repo(kind + name)
        if rest[:1] == ["refs"]:
            return {
                "branches": _refs("heads", repo.branches),
                "tags": _refs("tags", repo.tags),
                "converts": [],
                "pullRequests": [],
            }
        revision = rest[1] if len(rest) > 1 else "main"
        commit = _commit(repo, revision)
        if rest[:1] == ["tree"]:
            recursive = query.get("recursive", "").lower() in ("true", "1")
            return _tree(repo.commits[commit], "/".join(rest[2:]), recursive=recursive)
        if rest[:1] == ["paths-info"]:
            every = _tree(repo.commits[commit], "", recursive=True)
            return [entry for entry in every if entry["path"] in _asked_paths(body)]
        with_blobs = query.get("blobs", "").lower() in ("true", "1")
        return {
            "_id": _git_oid("repo", name.encode())[:24],
            "id": name,
            "modelId": name,
            "author": name.split("/")[0],
            "sha": commit,
            "private": repo.token is not None and not repo.gated,
            "gated": "manual" if repo.gated else False,
            "disabled": False,
            "createdAt": _DATE,
            "lastModified": _DATE,
            "downloads": 0,
            "likes": 0,
            "tags": [],
            "cardData": _card_data(repo.commits[commit]),
            "siblings": [
                _sibling(path, blob, with_blobs) for path, blob in repo.commits[commit].items()
            ],
        }

    def _collection(self, slug: str) -> dict[str, Any]:
        items = self.server.hub._collections.get(slug)
        if items is None:
            raise _Answer(404, "", "Collection not found")
        return {
            "slug": slug,
            "title": slug,
            "owner": {"name": slug.split("/")[0]},
            "items": [
                {"_id": _git_oid("item", name.encode())[:24], "id": name, "type": kind}
                | {"position": number}
                for number, (kind, name) in enumerate(items)
            ],
            "lastUpdated": _DATE,
            "position": 0,
            "private": False,
            "theme": "blue",
            "upvotes": 0,
        }

    def _resolve(self, kind: str, parts: list[str]) -> None:
        cut = parts.index("resolve", 1, 3)
        repo = self._repo(kind + "/".join(parts[:cut]), content=True)
        revision, filename = parts[cut + 1], "/".join(parts[cut + 2 :])
        commit = _commit(repo, revision)
        blob = repo.commits[commit].get(filename)
        if blob is None:
            raise _Answer(404, "EntryNotFound", "Entry not found", X_Repo_Commit=commit)
        headers = {
            "X-Repo-Commit": commit,
            "ETag": f'"{blob.etag}"',
            "Accept-Ranges": "bytes",
            "Content-Type": "application/octet-stream",
            "Content-Disposition": f'inline; filename="{Path(filename).name}";',
        }
        if blob.lfs:
            headers["X-Linked-Etag"] = f'"{blob.etag}"'
            headers["X-Linked-Size"] = str(len(blob.data))
        size = len(blob.data)
        status, start, stop = 200, 0, size
        asked = self.headers.get("Range")
        if asked is not None:
            span = _span(asked, size)
            if span is None:
                raise _Answer(416, "", "", Content_Range=f"bytes */{size}")
            status, (start, stop) = 206, span
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        if self.command == "GET":
            self.server.hub.on_get(self.path)
        taken = self.server.hub._next_cut(filename) if self.command == "GET" else None
        self._send(status, blob.data[start:stop], headers, taken)

    def _send(
        self,
        status: int,
        body: bytes,
        headers: Mapping[str, str] | None = None,
        cut: _Cut | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if cut is None:
            self.wfile.write(body)
            return
        self.wfile.write(body[: cut.nbytes])
        self.close_connection = True
        if cut.reset:
            time.sleep(0.05)  # let the client read what was sent
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.server._open.discard(self.connection)
            socket.close(self.connection.detach())


def _card_data(files: Mapping[str, Blob]) -> dict[str, str] | None:
    """The front matter of README.md, of which tests need lines with one word each."""
    text = files["README.md"].data.decode() if "README.md" in files else ""
    if not text.startswith("---\n"):
        return None
    lines = text.split("---\n")[1].splitlines()
    return dict(line.split(": ", 1) for line in lines if ": " in line and line[0] not in " -")


def _commit(repo: _Repo, revision: str) -> str:
    commit = repo.resolve(revision)
    if commit is None:
        raise _Answer(404, "RevisionNotFound", f"Invalid rev id: {revision}")
    return commit


def _asked_paths(body: bytes) -> set[str]:
    """The paths that a form or a JSON object asks for."""
    if body.startswith(b"{"):
        return set(json.loads(body)["paths"])
    return set(parse_qs(body.decode())["paths"])


def _refs(kind: str, named: Mapping[str, str]) -> list[dict[str, str]]:
    return [
        {"name": name, "ref": f"refs/{kind}/{name}", "targetCommit": commit}
        for name, commit in named.items()
    ]


def _sibling(path: str, blob: Blob, with_blobs: bool) -> dict[str, Any]:
    if not with_blobs:
        return {"rfilename": path}
    entry: dict[str, Any] = {"rfilename": path, "size": len(blob.data), "blobId": blob.oid}
    if blob.lfs:
        entry["lfs"] = {"sha256": blob.lfs["oid"], **blob.lfs}
    return entry


def _tree(files: Mapping[str, Blob], folder: str, *, recursive: bool) -> list[dict[str, Any]]:
    prefix = f"{folder}/" if folder else ""
    inside = {path: blob for path, blob in files.items() if path.startswith(prefix)}
    if prefix and not inside:
        raise _Answer(404, "EntryNotFound", f"{folder} does not exist")
    entries: dict[str, dict[str, Any]] = {}
    for path, blob in inside.items():
        names = path[len(prefix) :].split("/")
        for depth in range(1, len(names) if recursive else min(2, len(names))):
            parent = prefix + "/".join(names[:depth])
            oid = _git_oid("tree", parent.encode())
            entries[parent] = {"type": "directory", "oid": oid, "size": 0, "path": parent}
        if recursive or len(names) == 1:
            entries[path] = {"type": "file", "oid": blob.oid, "size": len(blob.data), "path": path}
            if blob.lfs:
                entries[path]["lfs"] = blob.lfs
    return list(entries.values())


def _span(header: str, size: int) -> tuple[int, int] | None:
    """Return the start and the end of a single byte range, or nothing if it cannot be served."""
    unit, _, span = header.partition("=")
    first, dash, last = span.strip().partition("-")
    if unit.strip() != "bytes" or not dash or not (first or last):
        return None
    try:
        if not first:
            start, stop = max(0, size - int(last)), size
        else:
            start, stop = int(first), min(size, int(last) + 1) if last else size
    except ValueError:
        return None
    return (start, stop) if start < stop else None
