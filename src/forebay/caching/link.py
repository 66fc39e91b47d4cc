"""Talk to the fetcher of a cache: find it or start it, send messages, receive answers.

    reader, trainer ── messages ──> socket in the user's runtime folder ──> fetcher
                    <── answers; at first the descriptors of what it shares

Whoever finds no fetcher takes a lock, which the new one keeps as long as it lives: there is one for
each node and cache. It ends when the last connection to it does.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import mmap
import os
import select
import socket
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forebay.base.process import private_folder, standard_library_first
from forebay.errors import ChangedError, ForebayError, InputError, OutputError, shown_location

# Bytes of the JSON of a message, and of what follows it.
_HEAD = struct.Struct("<IQ")
# More than any message has.
_MOST_JSON = 1 << 26
# How long a new fetcher may take until it answers, and how often a look is taken for one.
START_S, LOOK_S = 60.0, 0.02
# Reads and writes return that often, so that Ctrl-C is noticed.
_STEP_S = 1.0
_MOST_DESCRIPTORS = 8
# Variables of the environment that say how to reach a bucket.
_SETTINGS = ("AWS_", "AZURE_", "FSSPEC_", "GOOGLE_", "GCS_")
_ERRORS = {each.__name__: each for each in (ChangedError, InputError, OutputError)}

_BOOT = (
    "import os, sys; os.fork() and os._exit(0); sys.path[:] = sys.argv[4:]; "
    "from forebay.caching.fetcher import main; main(*map(int, sys.argv[1:4]))"
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a cache is, and what of it may be kept here.

    Attributes:
        url: Of its folder, with credentials if the user put some there.
        directory: Where blocks are kept; None for memory only.
        disk: Bytes to keep there.
    """

    url: str
    directory: str | None = None
    disk: int = 0

    @property
    def name(self) -> str:
        """The name of the folder of this cache in its directory."""
        return _hashed(self.url)

    @property
    def socket_name(self) -> str:
        """The name of the socket of its fetcher: another one for other credentials or endpoints."""
        folder = self.directory and os.path.realpath(self.directory)
        environment = sorted(item for item in os.environ.items() if item[0].startswith(_SETTINGS))
        return _hashed(self.url, folder, environment)


def _hashed(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


class LinkBrokenError(ConnectionError):
    """The fetcher has ended, or does not answer."""


class Link:
    """A connection to the fetcher; for one thread at a time.

    Attributes:
        facts: What the fetcher said first.
        descriptors: Of what it shares; they belong to the caller.
        close: Closes the connection, which the end of this object does, too.
    """

    def __init__(self, place: Place) -> None:
        """Connect, and start a fetcher if there is none.

        Raises:
            ForebayError: The fetcher could not open the cache; it has ended.
            LinkBrokenError: It did not answer.
        """
        self._socket = _connected(place)
        self.close = weakref.finalize(self, self._socket.close)
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
        until = time.monotonic() + START_S
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(self._socket, 1, _MOST_DESCRIPTORS)
                if not data:
                    raise LinkBrokenError("the fetcher ended before it answered")
                head = data + self._received(_HEAD.size - 1)
                return self._message(head)[0], descriptors
            except TimeoutError:
                pass
            except OSError as error:
                raise LinkBrokenError(str(error)) from error
            if time.monotonic() > until:
                raise LinkBrokenError(f"the fetcher did not answer in {START_S:g} s")

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self._socket.fileno()

    def post(self, op: str, **fields: Any) -> None:
        """Send a message that has no answer."""
        data = memoryview(packed({"op": op, **fields}))
        try:
            while data:
                with suppress(TimeoutError):
                    data = data[self._socket.send(data) :]
        except OSError as error:
            raise LinkBrokenError(str(error)) from error

    def ask(self, op: str, **fields: Any) -> tuple[dict[str, Any], bytearray]:
        """Send a message, and return the answer and the bytes that come with it.

        Raises:
            ForebayError: The fetcher could not do it.
            LinkBrokenError: It has ended.
        """
        try:
            self.post(op, **fields)
            answer, payload = self._message(self._received(_HEAD.size))
        except BaseException:  # such as Ctrl-C: the next call would get the rest of this answer
            self.close()
            raise
        if "error" in answer:
            raise error_of(answer)
        return answer, payload

    def heard(self) -> dict[str, Any] | None:
        """Return the last message that came by itself; None if there is none."""
        found = None
        while select.select([self._socket], [], [], 0)[0]:
            found = self._message(self._received(_HEAD.size))[0]
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
                with suppress(TimeoutError):
                    count = self._socket.recv_into(view)
                    if not count:
                        raise LinkBrokenError("the fetcher ended")
                    view = view[count:]
        except OSError as error:
            raise LinkBrokenError(str(error)) from error
        return data


def packed(message: dict[str, Any], payload_bytes: int = 0) -> bytes:
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


def described(error: Exception) -> dict[str, str]:
    """Return an error as a message has it."""
    return {"error": type(error).__name__, "message": str(error)}


def error_of(message: dict[str, Any]) -> ForebayError:
    """Return the error that a message has."""
    return _ERRORS.get(message["error"], InputError)(str(message["message"]))


# ---- starting ------------------------------------------------------------------------------------


def _connected(place: Place) -> socket.socket:
    """Return a connection to the fetcher of a cache; start it if there is none."""
    folder = private_folder()
    if folder is None:
        raise OutputError(
            "no private folder for the socket of a cache can be made\n"
            "  Nothing was fetched. Set XDG_RUNTIME_DIR, or TMPDIR, to a folder that you own."
        )
    path = os.path.join(folder, f"{place.socket_name}.socket")
    until = time.monotonic() + START_S
    while True:
        found = socket.socket(socket.AF_UNIX)
        with suppress(FileNotFoundError, ConnectionRefusedError):
            found.connect(path)
            return found
        found.close()
        lock_path = Path(path).with_suffix(".lock")
        with lock_path.open("ab", buffering=0) as lock, suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock.fileno()), lock_path.stat()):
                    _start(place, path, lock.fileno())
            continue  # otherwise a fetcher that ended has removed the file
        if time.monotonic() > until:
            raise LinkBrokenError(f"the fetcher of {shown_location(place.url)} does not answer")
        time.sleep(LOOK_S)  # another process is about to start it


def _start(place: Place, path: str, lock: int) -> None:
    """Start a fetcher that listens at a path; it is no child of this process."""
    with suppress(FileNotFoundError):
        os.unlink(path)
    config, write = os.pipe()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen(128)
        descriptors = lock, listening.fileno(), config
        try:
            # In a pipe, since a command line can be read by everybody.
            os.write(write, json.dumps({**asdict(place), "path": path}).encode())
            os.close(write)
            process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-c", _BOOT),
                    *map(str, descriptors),
                    *standard_library_first(),
                ],
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            process.wait()
        finally:
            os.close(config)


# ---- table ---------------------------------------------------------------------------------------

# For each block, where it lies: 0, or page << 22 | generation << 2 | one of these.
IN_MEMORY, ON_DISK = 1, 2
GENERATIONS = 1 << 20


def entry_of(offset: int, generation: int, kind: int) -> int:
    """Return the entry of a block in the table."""
    return offset // mmap.PAGESIZE << 22 | generation % GENERATIONS << 2 | kind


def place_of(entry: int) -> tuple[int, int]:
    """Return kind and offset of a block that has an entry."""
    return entry & 3, (entry >> 22) * mmap.PAGESIZE
