"""Talk to the fetcher of a cache: send messages, receive answers.

    reader, trainer ── messages ──> one end of a pair of sockets, the other end ──> fetcher
                    <── answers; at first the descriptors of what it shares

A fetcher that is asked says every second that it lives. One that is silent for longer is continued,
in case it was stopped, and then given up with an error.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import socket
import struct
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from forebay.caching.fetcher_process import FetcherProcess
from forebay.errors import ChangedError, ForebayError, InputError, OutputError

# Bytes of the JSON of a message, and of what follows it.
_HEAD = struct.Struct("<IQ")
# More than any message has.
_MOST_JSON = 1 << 26
# After how long a silent fetcher is continued, and after how long it is given up.
CHECK_S, SILENT_S = 3.0, 60.0
# Reads and writes return that often, so that Ctrl-C and the end of the fetcher are noticed.
_STEP_S = 1.0
_MOST_DESCRIPTORS = 4
_ERRORS = {each.__name__: each for each in (ChangedError, InputError, OutputError)}


class LinkBrokenError(ConnectionError):
    """The fetcher has ended."""


class Link:
    """A connection to the fetcher; for one thread at a time.

    Attributes:
        facts: What the fetcher said first.
        descriptors: Of what it shares; they belong to the caller.
        close: Closes the connection, which the end of this object does, too.
    """

    def __init__(self, process: FetcherProcess) -> None:
        """Connect, and start a fetcher if there is none.

        Raises:
            ForebayError: The fetcher could not open the cache, and has ended; or it is silent.
            LinkBrokenError: It ended before it answered.
        """
        self._process, self._silent_s = process, 0.0
        self._socket = process.connect()
        self.close = weakref.finalize(self, _close, self._socket, os.getpid())
        try:
            self._socket.settimeout(_STEP_S)
            self.facts, self.descriptors = self._welcomed()
        except BaseException:
            self.close()
            raise
        if "error" in self.facts:
            self.close()
            raise error_of(self.facts)

    def _welcomed(self) -> tuple[dict[str, Any], list[int]]:
        while True:
            began = time.monotonic()
            try:
                data, descriptors, _, _ = socket.recv_fds(self._socket, 1, _MOST_DESCRIPTORS)
                if not data:
                    raise LinkBrokenError("the fetcher ended before it answered")
                head = data + self._received(_HEAD.size - 1)
                return self._message(head)[0], descriptors
            except TimeoutError:
                self._wait_longer(began)
            except OSError as error:
                raise LinkBrokenError(str(error)) from error

    def _wait_longer(self, began: float) -> None:
        """Note that nothing came in a step; raise InputError after too many of them."""
        if self._process.pid is None:  # perhaps before it took the connection
            raise LinkBrokenError("the fetcher ended")
        # A pause of this process, such as by Ctrl-Z, does not count against the fetcher.
        before = self._silent_s
        self._silent_s += min(time.monotonic() - began, _STEP_S)
        if before < CHECK_S <= self._silent_s:
            self._process.resume()
        if self._silent_s >= SILENT_S:
            error = self._process.silent_error(SILENT_S)
            self._process.kill()
            self.close()
            raise error

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self._socket.fileno()

    def post(self, op: str, **fields: Any) -> None:
        """Send a message that has no answer."""
        data = memoryview(packed_message({"op": op, **fields}))
        try:
            while data:
                began = time.monotonic()
                try:
                    data = data[self._socket.send(data) :]
                    self._silent_s = 0.0
                except TimeoutError:
                    self._wait_longer(began)
        except OSError as error:
            raise LinkBrokenError(str(error)) from error

    def ask(self, op: str, **fields: Any) -> tuple[dict[str, Any], bytearray]:
        """Send a message, and return the answer and the bytes that come with it.

        Raises:
            ForebayError: The fetcher could not do it, or is silent.
            LinkBrokenError: It has ended.
        """
        try:
            self.post(op, **fields)
            answer, payload = self._message(self._received(_HEAD.size))
            while answer == ALIVE:
                answer, payload = self._message(self._received(_HEAD.size))
        except BaseException:  # such as Ctrl-C: the next call would get the rest of this answer
            self.close()
            raise
        if "error" in answer:
            raise error_of(answer)
        return answer, payload

    def heard(self) -> dict[str, Any]:
        """Return what came by itself, the last value of each name."""
        found: dict[str, Any] = {}
        arrivals = select.poll()  # unlike select() it takes numbers beyond 1,023
        arrivals.register(self._socket, select.POLLIN)
        while arrivals.poll(0):
            found |= self._message(self._received(_HEAD.size))[0]
        return found

    def _message(self, head: bytes | bytearray) -> tuple[dict[str, Any], bytearray]:
        json_bytes, payload_bytes = _HEAD.unpack(head)
        found = json.loads(self._received(json_bytes))
        return found, self._received(payload_bytes)

    def _received(self, nbytes: int) -> bytearray:
        data = bytearray(nbytes)
        view = memoryview(data)
        try:
            while view:
                began = time.monotonic()
                try:
                    count = self._socket.recv_into(view)
                    if not count:
                        raise LinkBrokenError("the fetcher ended")
                    view, self._silent_s = view[count:], 0.0
                except TimeoutError:
                    self._wait_longer(began)
        except OSError as error:
            raise LinkBrokenError(str(error)) from error
        return data


def _close(connection: socket.socket, owner: int) -> None:
    if os.getpid() == owner:  # a process that was forked meanwhile has it, too
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
    connection.close()


# What a client that waits for an answer is told meanwhile.
ALIVE = {"op": "alive"}


def packed_message(message: dict[str, Any], payload_bytes: int = 0) -> bytes:
    """Return a message as it is sent, before its payload."""
    data = json.dumps(message).encode()
    return _HEAD.pack(len(data), payload_bytes) + data


def messages(data: bytearray) -> Iterator[dict[str, Any]]:
    """Take the messages of a client that are complete; raise ValueError for anything else."""
    while len(data) >= _HEAD.size:
        json_bytes, payload_bytes = _HEAD.unpack_from(data)
        if json_bytes > _MOST_JSON or payload_bytes:
            raise ValueError(f"a message of {json_bytes} and {payload_bytes} bytes")
        end = _HEAD.size + json_bytes
        if len(data) < end:
            return
        found = json.loads(data[_HEAD.size : end])
        del data[:end]
        yield found


def error_as_sent(error: Exception) -> dict[str, str]:
    """Return an error as a message has it."""
    return {"error": type(error).__name__, "message": str(error)}


def error_of(message: dict[str, Any]) -> ForebayError:
    """Return the error that a message has."""
    return _ERRORS.get(message["error"], InputError)(str(message["message"]))


def accepted(incoming: socket.socket) -> tuple[socket.socket | None, bool]:
    """Return the next connection, or None; and whether nobody is left who may hand over one."""
    try:
        data, descriptors, _, _ = socket.recv_fds(incoming, 1, 1, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None, False
    if not descriptors:
        if data:
            sys.stderr.write(
                "forebay: the process that fetches blocks can take no connection: it has as many "
                "open files as it may (ulimit -n)\n"
            )
        return None, not data
    return socket.socket(fileno=descriptors[0]), False


# ---- table ---------------------------------------------------------------------------------------

# For each block, where it lies in the fetcher's memory: 0, or page << 22 | generation << 1 | 1.
GENERATIONS = 1 << 21


def entry_of(offset: int, generation: int) -> int:
    """Return the entry of a block in the table."""
    return offset // mmap.PAGESIZE << 22 | generation % GENERATIONS << 1 | 1


def offset_of(entry: int) -> int:
    """Return the offset of a block that has an entry."""
    return (entry >> 22) * mmap.PAGESIZE
