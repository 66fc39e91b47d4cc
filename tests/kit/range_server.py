"""A server of buckets on loopback with scripted latency, rates and faults.

It serves a folder, whose subfolders are buckets, over HTTP/1.1 and with as much of S3's REST API
(path style, nothing is authenticated) as obstore, boto3, s3fs and fsspec's HTTP need::

    with RangeServer(folder, first_byte_s=0.03, rate=75e6, seed=1) as server:
        server.url                  # http://127.0.0.1:PORT; an object is at URL/bucket/key
        server.environment          # what S3 clients read from the environment
        server.set(faults=[Fault("slowdown", share=0.1), Fault("reset", count=3)])
        server.counters()           # requests, bytes, faults, connections

`range_faults` says what can be set. The same works from outside Python: GET /_control returns the
settings and the counters, POST /_control takes settings as JSON and sets the counters to zero. As a
program, it serves until it is ended: `python -m kit.range_server FOLDER --port 9000`, in `tests/`.

One process with one thread; `range_connections` has its loop.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Generator
from dataclasses import asdict, fields
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from kit.range_connections import (
    Body,
    Connection,
    Counters,
    Link,
    Loop,
    Request,
    Wait,
    Waits,
)
from kit.range_faults import Asked, Fault, Script, Settings
from kit.range_objects import (
    STATUS,
    Object,
    Objects,
    RefusedError,
    document,
    http_date,
    iso_date,
    refusal,
)

CONTROL = "/_control"
REFUSALS = {
    "slowdown": "SlowDown",
    "error": "InternalError",
    "expired": "ExpiredToken",
    "denied": "AccessDenied",
    "missing": "NoSuchKey",
}
BACKLOG = 1024


def environment_of(url: str) -> dict[str, str]:
    """Return what S3 clients read from the environment, for buckets at an address."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_PROXY": "127.0.0.1",
    }


class RangeServer:
    """A server in a process of its own; it ends with the block, and with the process that began it.

    Args:
        root: A folder; each folder in it is a bucket.
        settings: As for `Settings`.
    """

    def __init__(self, root: Path | str, **settings: Any) -> None:
        self._root = Path(root).resolve()
        self._settings = settings

    def __enter__(self) -> RangeServer:
        # Bound here, so that clients can connect at once, and inherited by the server.
        with socket.create_server(("127.0.0.1", 0), backlog=BACKLOG) as listening:
            self._port = listening.getsockname()[1]
            inherited = [str(listening.fileno()), str(os.getpid())]
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(self._root), "--inherited", *inherited],
                cwd=Path(__file__).parents[1],
                pass_fds=[listening.fileno()],
            )
        try:
            self.set(**self._settings)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    @property
    def pid(self) -> int:
        """The process of the server."""
        return self._process.pid

    @property
    def url(self) -> str:
        """The address of all buckets, such as http://127.0.0.1:4566."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def environment(self) -> dict[str, str]:
        """What S3 clients read from the environment."""
        return environment_of(self.url)

    def set(self, **settings: Any) -> None:
        """Replace all settings; sequences begin anew, and the counters are zero.

        Raises:
            ValueError: There is no such fault.
        """
        faults = [asdict(each) for each in settings.pop("faults", ())]
        control(self.url, json.dumps(settings | {"faults": faults}))

    def counters(self) -> dict[str, Any]:
        """Return what was counted since the settings were set: the fields of `Counters`."""
        return dict(control(self.url)["counters"])


def control(url: str, settings: str | None = None) -> dict[str, Any]:
    """Return the settings and counters of a running server, after new settings (JSON), if given.

    Raises:
        ValueError: There is no such fault.
    """
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    with contextlib.closing(connection):
        connection.request("GET" if settings is None else "POST", CONTROL, settings)
        with connection.getresponse() as answer:
            found = dict(json.loads(answer.read()))
    if "error" in found:
        raise ValueError(found["error"])
    return found


COUNTED = fields(Counters)


class Service:
    """Answers requests."""

    def __init__(self, root: Path, loop: Loop) -> None:
        self._objects = Objects(root)
        self._loop = loop
        self.set(Settings())

    def accept(self, listening: socket.socket) -> Waits:
        """Accept connections for ever."""
        listening.setblocking(False)
        while True:
            try:
                plug, _ = listening.accept()
            except BlockingIOError:
                yield listening.fileno(), select.EPOLLIN
                continue
            plug.setblocking(False)
            plug.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._loop.start(self._serve(Connection(plug)))

    def set(self, settings: Settings) -> None:
        """Replace the settings and begin to count anew."""
        self._script = Script(settings, time.monotonic())
        self._link = Link(settings.link)
        self._asked: Counter[tuple[str, str, str]] = Counter()
        before = getattr(self, "_counters", Counters())
        self._counters = Counters(connections=before.connections, serving=before.serving)

    def _serve(self, connection: Connection) -> Waits:
        with connection.plug:
            # What ends here is this client's connection; a bug is shown and ends it, too.
            try:
                while request := (yield from connection.request()):
                    if f"/{request.bucket}" == CONTROL:
                        yield from self._control(connection, request)
                        continue
                    self._count(connection, 1)
                    try:
                        go_on = yield from self._answer(connection, request)
                    finally:
                        self._counters.serving -= 1
                    if not go_on or request.headers.get("connection", "").lower() == "close":
                        break
            except OSError:
                pass
            except Exception:  # noqa: BLE001 - the other connections go on
                traceback.print_exc()
            finally:
                self._counters.connections -= connection.counted

    def _count(self, connection: Connection, serving: int) -> None:
        counters = self._counters
        counters.serving += serving
        counters.serving_most = max(counters.serving_most, counters.serving)
        counters.connections += not connection.counted
        counters.connections_most = max(counters.connections_most, counters.connections)
        connection.counted = True

    def _control(self, connection: Connection, request: Request) -> Waits:
        answer: dict[str, Any] = {}
        if request.method == "POST":
            try:
                self.set(Settings.of(json.loads(request.body)))
            except (TypeError, ValueError) as error:
                answer["error"] = str(error)
        self._counters.cpu_s = time.process_time()
        answer |= {
            "settings": asdict(self._script.settings),
            # Not asdict(), which rebuilds a Counter from pairs.
            "counters": {each.name: getattr(self._counters, each.name) for each in COUNTED},
        }
        yield from _reply(connection, 200, json.dumps(answer).encode(), kind="application/json")

    def _answer(self, connection: Connection, request: Request) -> Generator[Wait, None, bool]:
        """Answer a request; return whether the connection can serve another one."""
        now = time.monotonic()
        self._counters.requests[request.method] += 1
        span = request.headers.get("range", "")
        key = (request.method, request.name, span)
        asked = Asked(*key, self._asked[key], request.token)
        self._asked[key] += 1
        self._counters.repeated += request.method == "GET" and asked.before > 0
        throttled = self._script.throttled(now)
        fault = None if throttled else self._script.fault(asked, now)
        if throttled or fault:
            self._counters.faults[fault.kind if fault else "throttled"] += 1
        if delay := self._script.delay_s(asked):
            yield now + delay
        try:
            if throttled:
                raise RefusedError("SlowDown")
            if fault and fault.kind in REFUSALS:
                raise RefusedError(REFUSALS[fault.kind])
            if request.key and request.method in ("GET", "HEAD"):
                return (yield from self._get(connection, request, asked, fault))
            if fault and fault.kind == "reset":
                connection.reset()
                return False
            status, body, headers = self._change(request)
            yield from _reply(connection, status, body, *headers)
        except RefusedError as error:
            body = b"" if request.method == "HEAD" else refusal(error.code, request.name)
            yield from _reply(connection, STATUS[error.code], body)
        return True

    def _get(
        self, connection: Connection, request: Request, asked: Asked, fault: Fault | None
    ) -> Generator[Wait, None, bool]:
        found = self._objects.find(request.name)
        kind = fault.kind if fault else ""
        if kind == "rewritten":
            found = Object(found.path, found.size, f'"rewritten-{found.etag[1:]}', found.modified)
        headers = request.headers
        if headers.get("if-match", found.etag) not in (found.etag, found.etag.strip('"'), "*"):
            raise RefusedError("PreconditionFailed")
        described = [f"ETag: {found.etag}", f"Last-Modified: {http_date(found.modified)}"]
        if headers.get("if-none-match") == found.etag:
            yield from _reply(connection, 304, b"", *described)
            return True
        begin, end = spanned(asked.span, found.size)
        if asked.span:
            described.append(f"Content-Range: bytes {begin}-{end - 1}/{found.size}")
        stop = begin + int((end - begin) * (fault.at if fault else 0))
        length = (stop if kind == "short" else end) - begin
        head = _head(206 if asked.span else 200, length, "application/octet-stream", described)
        if request.method == "HEAD" or not length:
            yield from connection.send(head)
            return True
        file = os.open(found.path, os.O_RDONLY)
        try:
            body = Body(request.name, file, begin, self._counters)
            rate, link = self._script.settings.rate, self._link
            yield from connection.send(head, more=True)
            if kind == "flip":
                body.flip(end, self._script.draw("bit", asked))
            elif kind in ("short", "reset", "cut", "stall"):
                yield from connection.send_body(body, stop, rate, link)
            if fault and kind == "stall":
                yield time.monotonic() + fault.seconds
            if kind not in ("short", "reset", "cut"):
                yield from connection.send_body(body, end, rate, link)
        finally:
            os.close(file)
        if kind == "reset":
            connection.reset()
        return kind not in ("reset", "cut")

    def _change(self, request: Request) -> tuple[int, bytes, list[str]]:
        """Do what a request asks for that is no GET of an object; return status, body, headers."""
        objects, query, name = self._objects, request.query, request.name
        upload = query.get("uploadId", "")
        only_new = request.headers.get("if-none-match") == "*"
        match request.method, bool(request.key):
            case "GET", False if not request.bucket:
                return 200, objects.buckets(), []
            case "GET", False:
                return 200, objects.listing(request.bucket, query), []
            case "HEAD", False:
                objects.listing(request.bucket, {"max-keys": "0"})
                return 200, b"", []
            case "PUT", False:
                objects.make(request.bucket)
                return 200, b"", []
            case "DELETE", False:
                objects.drop(request.bucket)
                return 204, b"", []
            case "POST", False if "delete" in query:
                return 200, objects.delete_listed(request.bucket, request.body), []
            case "PUT", True if upload:
                etag = objects.put_part(upload, int(query["partNumber"]), self._content(request))
                return 200, b"", [f"ETag: {etag}"]
            case "PUT", True:
                etag = objects.put(name, self._content(request), only_new)
                if "x-amz-copy-source" not in request.headers:
                    return 200, b"", [f"ETag: {etag}"]
                changed = iso_date(objects.find(name).modified)
                inside = f"<LastModified>{changed}</LastModified><ETag>{etag}</ETag>"
                return 200, document("CopyObjectResult", inside), []
            case "POST", True if "uploads" in query:
                inside = f"<UploadId>{objects.begin_upload()}</UploadId>"
                return 200, document("InitiateMultipartUploadResult", inside), []
            case "POST", True if upload:
                etag = objects.end_upload(upload, name, only_new)
                return 200, document("CompleteMultipartUploadResult", f"<ETag>{etag}</ETag>"), []
            case "DELETE", True:
                if upload:
                    objects.drop_upload(upload)
                else:
                    objects.delete(name)
                return 204, b"", []
        raise RefusedError("MethodNotAllowed")

    def _content(self, request: Request) -> bytes:
        source = request.headers.get("x-amz-copy-source")
        if source is None:
            return request.body
        return self._objects.find(unquote(source).removeprefix("/")).path.read_bytes()


def spanned(span: str, size: int) -> tuple[int, int]:
    """Return begin and end of what a Range header asks for; without one, of all.

    Raises:
        RefusedError: Nothing of it is in the object.
    """
    if not span:
        return 0, size
    first, _, last = span.removeprefix("bytes=").partition("-")
    if first:
        begin, end = int(first), min(int(last) + 1, size) if last else size
    else:
        begin, end = max(size - int(last), 0), size
    if begin >= end:
        raise RefusedError("InvalidRange")
    return begin, end


def _head(status: int, length: int, kind: str, headers: list[str]) -> bytes:
    first = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"
    usual = [f"Content-Length: {length}", f"Content-Type: {kind}", "Accept-Ranges: bytes"]
    return "\r\n".join([first, *usual, *headers, "", ""]).encode("latin-1")


def _reply(
    connection: Connection, status: int, body: bytes, *headers: str, kind: str = "application/xml"
) -> Waits:
    yield from connection.send(_head(status, len(body), kind, list(headers)) + body)


def _end_with(parent: int) -> Waits:
    """End this process as soon as another one has ended, however it did."""
    try:
        watched = os.pidfd_open(parent)
    except ProcessLookupError:
        sys.exit()
    yield watched, select.EPOLLIN
    sys.exit()


def main() -> None:
    """Serve for ever."""
    parser = argparse.ArgumentParser(prog="python -m kit.range_server")
    parser.add_argument("root", type=Path, help="folder of buckets")
    parser.add_argument("--port", type=int, default=0, help="of loopback; 0: a free one")
    parser.add_argument("--settings", default="{}", help="as JSON; see tests/kit/range_faults.py")
    parser.add_argument("--inherited", nargs=2, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    loop = Loop()
    if options.inherited:
        descriptor, parent = options.inherited
        listening = socket.socket(fileno=descriptor)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever ends this process
        loop.start(_end_with(parent))
    else:
        listening = socket.create_server(("127.0.0.1", options.port), backlog=BACKLOG)
        print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    service = Service(options.root.resolve(), loop)
    service.set(Settings.of(json.loads(options.settings)))
    loop.start(service.accept(listening))
    loop.run()


if __name__ == "__main__":
    main()
