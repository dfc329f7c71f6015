"""A server on loopback that takes uploads as the Hub does, for the real client.

Every file is asked for as a regular one, so that it comes within the commit.
"""

from __future__ import annotations

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any


class UploadHub:
    """`files` holds what was committed, by repository and name."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> UploadHub:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        """What the Hub says to a POST."""
        if path == "/api/repos/create":
            found = json.loads(body)
            name = "/".join(filter(None, (found.get("organization"), found["name"])))
            self.files[name] = {}
            return {"url": f"{self.endpoint}/{name}", "name": name}
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        owner, name, verb = path.removeprefix("/api/models/").split("/")[:3]
        if verb == "preupload":
            paths = [entry["path"] for entry in json.loads(body)["files"]]
            return {"files": [_regular(path) for path in paths]}
        assert verb == "commit", path
        for line in body.splitlines():
            entry = json.loads(line)
            if entry["key"] == "file":
                content = base64.b64decode(entry["value"]["content"])
                self.files[f"{owner}/{name}"][entry["value"]["path"]] = content
        url = f"{self.endpoint}/{owner}/{name}"
        return {"success": True, "commitOid": "0" * 40, "commitUrl": f"{url}/commit/{'0' * 40}"}


def _regular(path: str) -> dict[str, Any]:
    return {"path": path, "uploadMode": "regular", "shouldIgnore": False, "oid": None}


def _handler(hub: UploadHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Transfer-Encoding") == "chunked":
                body = self._chunks()
            text = json.dumps(hub.answer(self.path.partition("?")[0], body)).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def _chunks(self) -> bytes:
            body = b""
            while size := int(self.rfile.readline().strip() or b"0", 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            """Stay quiet."""

    return Handler
