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
program, it serves until it is ended: `python -m benchmarks.range_server FOLDER --port 9000`.

One process with one thread: a connection is a generator that yields what it waits for, a file
descriptor or a time, and bodies go from the page cache to the socket without a copy.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import http.client
import itertools
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Generator
from dataclasses import asdict, dataclass, field, fields
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote

from benchmarks.range_faults import Asked, Fault, Script, Settings
from benchmarks.range_objects import (
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
# Bytes sent at once at most: with a rate, as many as keep the pauses at some milliseconds.
AT_ONCE, AT_ONCE_PACED = 2**20, 2**18
# What a connection with a rate may make up for, if the server was late, in seconds.
BURST_S = 0.02
RECEIVED_AT_ONCE = 2**18
HEAD_LIMIT = 2**16
BACKLOG = 1024
# A descriptor and what to wait for, or a time of the monotonic clock.
Wait = tuple[int, int] | float
Waits = Generator[Wait, None, Any]


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
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": "127.0.0.1",
        }

    def set(self, **settings: Any) -> None:
        """Replace all settings; sequences begin anew, and the counters are zero.

        Raises:
            ValueError: There is no such fault.
        """
        faults = [asdict(each) for each in settings.pop("faults", ())]
        self._call("POST", json.dumps(settings | {"faults": faults}))

    def counters(self) -> dict[str, Any]:
        """Return what was counted since the settings were set; see `Counters`."""
        return dict(self._call("GET")["counters"])

    def _call(self, method: str, body: str | None = None) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        with contextlib.closing(connection):
            connection.request(method, CONTROL, body)
            with connection.getresponse() as answer:
                found = dict(json.loads(answer.read()))
        if "error" in found:
            raise ValueError(found["error"])
        return found


@dataclass(slots=True)
class Counters:
    """What was served since the settings were set; the calls of /_control do not count.

    Attributes:
        requests: By method.
        bytes: Of bodies of objects, as far as they were sent.
        bytes_by_key: The same by "bucket/key".
        repeated: GET requests for a range that had been asked for before.
        faults: By kind; "throttled" are requests above `requests_per_s`.
        serving: Requests being answered now.
        serving_most: The most at once.
        connections: Open now.
        connections_most: The most at once.
        cpu_s: Processor time of the server since it was started.
    """

    requests: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
    bytes_by_key: Counter[str] = field(default_factory=Counter)
    repeated: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    serving: int = 0
    serving_most: int = 0
    connections: int = 0
    connections_most: int = 0
    cpu_s: float = 0.0


COUNTED = fields(Counters)


class Loop:
    """Runs generators that yield what they wait for."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._waiting: dict[int, Waits] = {}
        self._asleep: list[tuple[float, int, Waits]] = []
        self._order = itertools.count()

    def start(self, task: Waits) -> None:
        """Run a generator until it first waits."""
        try:
            wait = next(task)
        except StopIteration:
            return
        if isinstance(wait, float):
            heapq.heappush(self._asleep, (wait, next(self._order), task))
            return
        descriptor, event = wait
        self._waiting[descriptor] = task
        try:
            self._poll.modify(descriptor, event | select.EPOLLONESHOT)
        except FileNotFoundError:  # a new one: the kernel forgets those that are closed
            self._poll.register(descriptor, event | select.EPOLLONESHOT)

    def run(self) -> None:
        """Run for ever."""
        while True:
            until = max(self._asleep[0][0] - time.monotonic(), 0) if self._asleep else None
            for descriptor, _ in self._poll.poll(until):
                self.start(self._waiting.pop(descriptor))
            now = time.monotonic()
            while self._asleep and self._asleep[0][0] <= now:
                self.start(heapq.heappop(self._asleep)[-1])


@dataclass(frozen=True, slots=True)
class Request:
    """A request; the names of headers are in lower case."""

    method: str
    bucket: str
    key: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes

    @property
    def name(self) -> str:
        """What `Objects` calls the object."""
        return f"{self.bucket}/{self.key}" if self.key else self.bucket

    @property
    def token(self) -> str:
        """The session token or access key ID that it was signed with."""
        signed = self.headers.get("authorization", "").partition("Credential=")[2]
        return self.headers.get("x-amz-security-token") or signed.partition("/")[0]


class Connection:
    """A socket, what was received from it and not used, and how much it may send."""

    def __init__(self, plug: socket.socket) -> None:
        self.plug = plug
        self.counted = False
        self._received = bytearray()
        self._allowed_at = 0.0

    def request(self) -> Generator[Wait, None, Request | None]:
        """Return the next request; None if the client is gone."""
        while (end := self._received.find(b"\r\n\r\n")) < 0:
            if len(self._received) > HEAD_LIMIT or not (yield from self._receive()):
                return None
        first, *lines = bytes(self._received[:end]).decode("latin-1").split("\r\n")
        del self._received[: end + 4]
        pairs = (line.partition(":") for line in lines)
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        if headers.get("expect", "").lower() == "100-continue":
            yield from self.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        length = int(headers.get("content-length", 0))
        while len(self._received) < length:
            if not (yield from self._receive()):
                return None
        body = bytes(self._received[:length])
        del self._received[:length]
        method, target, _ = first.split(" ")
        path, _, query = target.partition("?")
        bucket, _, key = unquote(path).removeprefix("/").partition("/")
        found = dict(parse_qsl(query, keep_blank_values=True)) if query else {}
        return Request(method, bucket, key, found, headers, body)

    def send(self, data: bytes, more: bool = False) -> Waits:
        """Send a few bytes; with `more`, together with what comes next."""
        left = memoryview(data)
        while left:
            try:
                left = left[self.plug.send(left, socket.MSG_MORE if more else 0) :]
            except BlockingIOError:
                yield self.plug.fileno(), select.EPOLLOUT

    def send_body(self, body: Body, end: int, rate: float | None) -> Waits:
        """Send a body from where it stands to `end`, at most at a rate."""
        at_once = AT_ONCE if rate is None else AT_ONCE_PACED
        while body.at < end:
            if rate is not None:
                now = time.monotonic()
                self._allowed_at = max(self._allowed_at, now - BURST_S)
                if self._allowed_at > now:
                    yield self._allowed_at
            try:
                sent = body.send(self.plug, min(end - body.at, at_once))
            except BlockingIOError:
                yield self.plug.fileno(), select.EPOLLOUT
                continue
            if rate is not None:
                self._allowed_at += sent / rate

    def reset(self) -> None:
        """Have the socket reset when it is closed."""
        self.plug.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def _receive(self) -> Generator[Wait, None, bool]:
        while True:
            try:
                data = self.plug.recv(RECEIVED_AT_ONCE)
            except BlockingIOError:
                yield self.plug.fileno(), select.EPOLLIN
                continue
            self._received += data
            return bool(data)


class Body:
    """What is being sent of an object: bytes of a file or, where they were changed, of a string."""

    def __init__(self, name: str, file: int, begin: int, counters: Counters) -> None:
        self.at = begin
        self._name, self._file, self._counters = name, file, counters
        self._begin, self._changed = begin, memoryview(b"")

    def flip(self, end: int, where: float) -> None:
        """Flip one bit of what is left up to `end`."""
        changed = bytearray(os.pread(self._file, end - self.at, self.at))
        bit = int(where * len(changed) * 8)
        changed[bit // 8] ^= 1 << bit % 8
        self._changed = memoryview(changed)

    def send(self, plug: socket.socket, most: int) -> int:
        """Send some bytes and return how many."""
        if self._changed:
            inside = self.at - self._begin
            sent = plug.send(self._changed[inside : inside + most])
        else:
            sent = os.sendfile(plug.fileno(), self._file, self.at, most)
        if not sent:
            raise ConnectionError("the file has become shorter")
        self.at += sent
        self._counters.bytes += sent
        self._counters.bytes_by_key[self._name] += sent
        return sent


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
            rate = self._script.settings.rate
            yield from connection.send(head, more=True)
            if kind == "flip":
                body.flip(end, self._script.draw("bit", asked))
            elif kind in ("short", "reset", "cut", "stall"):
                yield from connection.send_body(body, stop, rate)
            if fault and kind == "stall":
                yield time.monotonic() + fault.seconds
            if kind not in ("short", "reset", "cut"):
                yield from connection.send_body(body, end, rate)
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
    parser = argparse.ArgumentParser(prog="python -m benchmarks.range_server")
    parser.add_argument("root", type=Path, help="folder of buckets")
    parser.add_argument("--port", type=int, default=0, help="of loopback; 0: a free one")
    parser.add_argument("--settings", default="{}", help="as JSON; see benchmarks/range_faults.py")
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
