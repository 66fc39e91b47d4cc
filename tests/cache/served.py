"""A folder served over HTTP on loopback: requests are counted, and may be held or refused."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Served(ThreadingHTTPServer):
    """Serves the files of a folder.

    Attributes:
        gets: How often each file was sent or begun, by name.
        status: The status of all answers, if not 200.
    """

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.gets = folder, Counter[str]()
        self.status = 200

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/cache"

    def handle_error(self, request, client_address) -> None:
        """Say nothing: clients are killed."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        body = self._answer()
        name, server = self.path.removeprefix("/cache/"), self.server
        if body is None:
            return
        server.gets[name] += 1
        self.wfile.write(body)

    def _answer(self) -> bytes | None:
        path = self.server.folder / self.path.removeprefix("/cache/")
        status = self.server.status if path.is_file() or self.server.status != 200 else 404
        body = path.read_bytes() if status == 200 else None
        self.send_response(status)
        self.send_header("Content-Length", str(len(body or b"")))
        self.end_headers()
        return body

    def log_message(self, *_) -> None:
        """Print nothing."""


@contextmanager
def served(folder: Path):
    """Serve a folder while the block runs."""
    with Served(folder) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
