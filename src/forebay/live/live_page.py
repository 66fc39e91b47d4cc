"""One file of fixed size that a loader or a run renews and `forebay top` reads, without a lock.

    | magic | version | checksum | length | JSON … zeros … | version |

The writer never waits for a reader. A reader that comes in the middle of a write finds two
versions, or a wrong checksum, and reads again.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import struct
import sys
import threading
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from forebay.live.live_folder import writable_folder
from forebay.process_identity import is_alive, kernel, state_and_start

PAGE_BYTES = 16_384
_SUFFIX = ".page"

_MAGIC = b"forebay1"
_HEAD, _TAIL = struct.Struct("<8sQII"), struct.Struct("<Q")
_ROOM = PAGE_BYTES - _HEAD.size - _TAIL.size
# A writer that is killed within a write leaves a page that stays inconsistent.
_TRIES = 5
# Files of dead processes that one writer removes.
_SWEPT = 100
# A page that cannot be read, and was not written for this long, has no writer any more.
_ABANDONED_S = 3600.0


class LivePage:
    """The file of one loader or run, made when there is something to write.

    Nothing here raises: without a folder, on a full disk, or with data that does not fit, there is
    no file, or an older one.
    """

    def __init__(self) -> None:
        self._path: str | None = None
        self._owner = 0
        self._versions = itertools.count(2, 2)
        self._lock = threading.Lock()  # two threads may record at a time: one of them writes

    def publish(self, data: Mapping[str, Any]) -> None:
        """Write what is to be seen now.

        Args:
            data: JSON-serializable; the process and the time are added.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            with suppress(Exception):
                self._write(data)
        finally:
            self._lock.release()

    def _write(self, data: Mapping[str, Any]) -> None:
        pid = os.getpid()
        if pid != self._owner:  # a fork has its own
            self._path, self._owner = None, pid
            self._process = {
                "pid": pid,
                "process_start": state_and_start(pid)[1],
                "kernel": kernel(),
                "program": os.path.basename(sys.argv[0]) if sys.argv else "",
            }
        data = {**data, "at": time.time(), **self._process}
        content = encode_page(data, next(self._versions))
        if content is None:
            return
        if self._path is not None:
            with suppress(FileNotFoundError):  # the folder may end with the user's session
                _overwrite(self._path, content, 0)
                return
        folder = writable_folder()
        if folder is None:
            return
        remove_dead(folder)
        path = os.path.join(folder, f"{pid}-{secrets.token_hex(4)}{_SUFFIX}")
        try:
            _overwrite(path, content, os.O_CREAT | os.O_EXCL)
        except OSError:
            with suppress(OSError):
                os.unlink(path)
            raise
        self._path = path

    def remove(self) -> None:
        """Remove the file, unless it is that of the process that this one was forked from."""
        path, self._path = self._path, None
        if path is not None and self._owner == os.getpid():
            with suppress(OSError):
                os.unlink(path)


def encode_page(data: Mapping[str, Any], version: int) -> bytes | None:
    """Return a page with the data; None if they do not fit."""
    body = json.dumps(data, allow_nan=False, separators=(",", ":")).encode()
    if len(body) > _ROOM:
        return None
    head = _HEAD.pack(_MAGIC, version, zlib.crc32(body), len(body))
    return head + body.ljust(_ROOM, b"\0") + _TAIL.pack(version)


def decode_page(content: bytes) -> dict[str, Any] | None:
    """Return the data of a page; None if it is none, damaged, or was read during a write."""
    if len(content) != PAGE_BYTES:
        return None
    magic, version, checksum, length = _HEAD.unpack_from(content)
    if (
        magic != _MAGIC
        or length > _ROOM
        or _TAIL.unpack_from(content, PAGE_BYTES - 8) != (version,)
    ):
        return None
    body = content[_HEAD.size : _HEAD.size + length]
    if zlib.crc32(body) != checksum:
        return None
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def read_page(path: str) -> dict[str, Any] | None:
    """Return the data of a file; None if it is gone, or no page."""
    for _ in range(_TRIES):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                content = os.read(descriptor, PAGE_BYTES + 1)
            finally:
                os.close(descriptor)
        except OSError:
            return None
        if (data := decode_page(content)) is not None:
            return data
    return None


def pages_in(folder: str) -> list[str]:
    """Return the paths of the files in a folder; none if it cannot be listed."""
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(_SUFFIX))
    except OSError:
        return []
    return [os.path.join(folder, name) for name in names]


def remove_dead(folder: str) -> None:
    """Remove the files of processes that have ended, as far as this process can see them."""
    for path in pages_in(folder)[:_SWEPT]:
        data = read_page(path)
        with suppress(OSError):
            if _is_abandoned(path) if data is None else is_dead(data):
                os.unlink(path)


def _is_abandoned(path: str) -> bool:
    """Tell whether a file that cannot be read is one whose writer was killed within a write."""
    return time.time() - os.lstat(path).st_mtime > _ABANDONED_S


def is_dead(data: Mapping[str, Any]) -> bool:
    """Tell whether the process of a page is known to have ended."""
    pid, start = data.get("pid"), data.get("process_start")
    if type(pid) is not int or not 0 < pid < 2**31 or not isinstance(start, str):
        return False
    return data.get("kernel") == kernel() and not is_alive(pid, start)


def _overwrite(path: str, content: bytes, flags: int) -> None:
    flags |= os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        if os.pwrite(descriptor, content, 0) != len(content):
            raise OSError(f"{path}: the disk is full")
    finally:
        os.close(descriptor)
