"""Shards of images, and a server that has them."""

from __future__ import annotations

import io
import tarfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

HEAD_ONLY = -1  # a length that says: there when it is asked about, gone when it is asked for


def write_tar(path: Path, members: Mapping[str, bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, data in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return path


@contextmanager
def server(answers: Mapping[str, tuple[int, bytes, int]]) -> Iterator[str]:
    """A server with an answer for each path: code, body, and the length that it announces.

    A path whose length is HEAD_ONLY is there when it is asked about, and gone when it is asked for.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            code, body, length = answers.get(self.path, (404, b"", 0))
            if length == HEAD_ONLY:
                code, length = (200 if self.command == "HEAD" else 404), 0
            self.send_response(code)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

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
