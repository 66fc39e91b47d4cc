"""Connections of the range server in one thread: who waits for what, and what may be sent when.

A connection is a generator that yields what it waits for, a file descriptor or a time, and bodies
go from the page cache to the socket without a copy.
"""

from __future__ import annotations

import heapq
import itertools
import os
import select
import socket
import struct
import time
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote

# Bytes sent at once at most: with a rate, as many as keep the pauses at some milliseconds.
AT_ONCE, AT_ONCE_PACED = 2**20, 2**18
# What a connection with a rate may make up for, if the server was late, in seconds.
BURST_S = 0.02
RECEIVED_AT_ONCE = 2**18
HEAD_LIMIT = 2**16
# A descriptor and what to wait for, or a time of the monotonic clock.
Wait = tuple[int, int] | float
Waits = Generator[Wait, None, Any]


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


class Link:
    """What all connections share: those that want to send take turns.

    Args:
        rate: Bytes per second; None for no limit.
    """

    def __init__(self, rate: float | None) -> None:
        self.rate = rate
        self._free_at = 0.0

    def reserve(self, nbytes: int) -> float | None:
        """Return when so many bytes may be sent; None for now."""
        if self.rate is None:
            return None
        now = time.monotonic()
        when = max(self._free_at, now - BURST_S)
        self._free_at = when + nbytes / self.rate
        return when if when > now else None

    def give_back(self, nbytes: int) -> None:
        """Return what was not sent."""
        if self.rate is not None:
            self._free_at -= nbytes / self.rate


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

    def send_body(self, body: Body, end: int, rate: float | None, link: Link) -> Waits:
        """Send a body from where it stands to `end`, at most at a rate and at that of the link."""
        is_paced = rate is not None or link.rate is not None
        at_once = AT_ONCE_PACED if is_paced else AT_ONCE
        while body.at < end:
            if rate is not None:
                now = time.monotonic()
                self._allowed_at = max(self._allowed_at, now - BURST_S)
                if self._allowed_at > now:
                    yield self._allowed_at
            asked = min(end - body.at, at_once)
            if (when := link.reserve(asked)) is not None:
                yield when
            try:
                sent = body.send(self.plug, asked)
            except BlockingIOError:
                link.give_back(asked)
                yield self.plug.fileno(), select.EPOLLOUT
                continue
            link.give_back(asked - sent)
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
