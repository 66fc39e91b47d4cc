"""A worker's end of packed outputs: members are appended to the worker's open shard.

    begin ── add, add ──> memory, or the shard if they are large
    commit ─────────────> in the shard: they survive the worker's death once the driver records them
    discard ────────────> cut off

Whatever follows the last recorded member, such as a part of one after a kill, belongs to no input
and is cut off when the shard is completed (`shards.py`).
"""

from __future__ import annotations

import fcntl
import os
import threading
import zlib
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from pathlib import Path

from forebay.base.files import open_regular
from forebay.base.output_names import OPEN_SHARDS, PACKED, member_name, shard_name, shard_number
from forebay.ledger.records import FileFields

# ---- shard files ---------------------------------------------------------------------------------
# Where shards are: open ones in forebay's own folder, complete ones in the folder `packed`.

_KEPT_OPEN = 16


class ShardFiles:
    """The shards of one output folder."""

    def __init__(self, root: str) -> None:
        self.opened = Path(root, OPEN_SHARDS)
        self.complete = Path(root, PACKED)

    def create(self) -> tuple[int, FileIO]:
        """Create an open shard with a number that no other has; return both."""
        self.opened.mkdir(exist_ok=True)
        number = max((*self.numbers(self.opened), *self.numbers(self.complete)), default=-1) + 1
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        while True:
            try:
                descriptor = os.open(self.opened / shard_name(number), flags, 0o666)
            except FileExistsError:
                number += 1  # another worker was faster
            else:
                return number, FileIO(descriptor, "r+")

    def numbers(self, folder: Path) -> set[int]:
        """Return the numbers of the shards in a folder; none if there is no folder."""
        try:
            names = os.listdir(folder)
        except (FileNotFoundError, NotADirectoryError):
            return set()
        return {number for number in map(shard_number, names) if number is not None}

    def path(self, number: int) -> Path:
        """Return where a shard is, or would be if it is complete."""
        path = self.opened / shard_name(number)
        return path if os.path.lexists(path) else self.complete / shard_name(number)


def write_at(file: FileIO, data: bytes, at: int) -> None:
    """Write all of `data` to a shard, beginning at the offset `at`."""
    rest = memoryview(data)
    while rest:
        count = os.pwrite(file.fileno(), rest, at)
        at, rest = at + count, rest[count:]


class OpenShards:
    """Opens shards for reading, and keeps the last few open."""

    def __init__(self, path_of: Callable[[int], Path]) -> None:
        self._path_of = path_of
        self._open: dict[int, FileIO] = {}  # the least recently used first

    def __getitem__(self, number: int) -> FileIO:
        """Return a shard."""
        file = self._open.pop(number, None)
        if file is None:
            file = open_regular(self._path_of(number), follows=False)
            if len(self._open) >= _KEPT_OPEN:
                self._open.pop(next(iter(self._open))).close()
        self._open[number] = file
        return file

    def close(self) -> None:
        """Close all."""
        for file in self._open.values():
            file.close()
        self._open.clear()


# ---- tar member ----------------------------------------------------------------------------------
# The bytes of one member of a tar file, as POSIX.1-2001 has them. PURE.
#
#   header      512 bytes (ustar); 1,536 or more for a name that is not ASCII, or has more than 100
#               characters, or for 8 GiB or more of data (pax)
#   data        as given
#   padding     zeros, up to a multiple of 512
#
# A header is a function of name and size alone, so it need not be recorded: the time and the
# owner are 0, the mode is 0644.

BLOCK = 512
# What a tar file ends with.
END = bytes(2 * BLOCK)

_MAX_NAME = 100
_MAX_SIZE = 8**11 - 1

# The fields between the name (100 bytes) and the size (11 octal digits), between the size and the
# checksum (6 octal digits), and after the type (1 character).
_MODE_AND_OWNER = b"0000644\0" + b"0000000\0" * 2
_TIME = b"\0" + b"0" * 11 + b"\0"
_REST = (bytes(100) + b"ustar\0" + b"00").ljust(355, b"\0")
# The checksum counts itself as 8 spaces.
_SUM = sum(_MODE_AND_OWNER) + sum(_TIME) + 8 * ord(" ") + sum(_REST)


def header(name: str, size: int) -> bytes:
    """Return the header blocks that precede the data of a member."""
    if name.isascii() and len(name) <= _MAX_NAME and size <= _MAX_SIZE:
        return _block(name.encode(), size, b"0")
    records = b""
    if not name.isascii() or len(name) > _MAX_NAME:
        records += _record(b"path", name.encode())
    if size > _MAX_SIZE:
        records += _record(b"size", b"%d" % size)
    short = name.encode("ascii", "replace")[:_MAX_NAME]
    return b"".join(
        (
            _block(b"././@PaxHeader", len(records), b"x"),
            records,
            padding(len(records)),
            _block(short, size if size <= _MAX_SIZE else 0, b"0"),
        )
    )


def header_bytes(name: str, size: int) -> int:
    """Return `len(header(name, size))`."""
    if name.isascii() and len(name) <= _MAX_NAME and size <= _MAX_SIZE:
        return BLOCK
    return len(header(name, size))


def padding(size: int) -> bytes:
    """Return the zero bytes that follow the data of a member."""
    return bytes(-size % BLOCK)


def _block(name: bytes, size: int, kind: bytes) -> bytes:
    digits = b"%011o" % size
    checksum = _SUM + sum(name) + sum(digits) + kind[0]
    return b"".join(
        (
            name.ljust(_MAX_NAME, b"\0"),
            _MODE_AND_OWNER,
            digits,
            _TIME,
            b"%06o\0 " % checksum,
            kind,
            _REST,
        )
    )


def _record(key: bytes, value: bytes) -> bytes:
    r"""Return `LENGTH key=value\n`, in which the length counts its own digits."""
    rest = len(key) + len(value) + 3
    length = rest + len(str(rest))
    length = rest + len(str(length))
    return b"%d %s=%s\n" % (length, key, value)


# ---- shard writer --------------------------------------------------------------------------------

# More than this is not kept in memory until the input ends.
_HELD_BYTES = 1 << 20


class ShardWriter:
    """Writes the members of one worker, for one input at a time.

    Each incarnation of a worker writes to shards of its own. It holds a lock on the open one, so
    that a driver knows whether somebody, such as an abandoned thread, may still write to it.

    Args:
        shard_bytes: A shard of at least this size gets no further input.
    """

    def __init__(self, root: str, shard_bytes: int, syncs: bool) -> None:
        self._files = ShardFiles(root)
        self._shard_bytes = shard_bytes
        self._syncs = syncs
        self._shard: tuple[int, FileIO] | None = None
        self._committed = 0  # where the members of earlier inputs end
        self._end = 0  # where those of this input end
        self._written = 0  # what is in the file already; the rest is in `_held`
        self._held: list[bytes] = []
        self._members: list[FileFields] = []
        self._lock = threading.Lock()  # a function may have threads of its own

    def add(self, name: str, data: bytes) -> None:
        """Append a member.

        Args:
            data: Its bytes; they must not change until the input ends.
        """
        with self._lock:
            number = self._begin()
            head = header(member_name(name), len(data))
            place = (number, self._end + len(head), zlib.crc32(data))
            self._held += (head, data, padding(len(data)))
            self._members.append((name, len(data), "", place))
            self._end = place[1] + len(data) + (-len(data) % BLOCK)
            if self._end - self._written > _HELD_BYTES:
                self._write_held()

    def commit(self) -> tuple[FileFields, ...]:
        """Return the members of this input, which are in the shard now."""
        if not self._members:
            return ()
        assert self._shard is not None, "there are members"
        self._write_held()
        if self._syncs:
            os.fdatasync(self._shard[1].fileno())
        members, self._members = tuple(self._members), []
        self._committed = self._end
        return members

    def discard(self) -> None:
        """Forget the members of this input."""
        self._held.clear()
        self._members.clear()
        self._end = self._committed
        if self._written > self._committed and self._shard is not None:
            with suppress(OSError):  # what is there will be overwritten, or cut off at the end
                os.ftruncate(self._shard[1].fileno(), self._committed)
        self._written = self._committed

    def close(self) -> None:
        """Close the open shard; the next member begins another."""
        self.discard()
        if self._shard is not None:
            self._shard[1].close()
        self._shard = None
        self._committed = self._end = self._written = 0

    def _begin(self) -> int:
        """Return the number of the open shard, opening one if there is none, or if it is full."""
        if self._committed >= self._shard_bytes and not self._members:
            self.close()
        if self._shard is None:
            self._shard = self._files.create()
            with suppress(OSError):  # without locks, the driver copies the shard
                fcntl.flock(self._shard[1].fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        return self._shard[0]

    def _write_held(self) -> None:
        assert self._shard is not None, "it was opened for the first member"
        if self._end - self._written <= 2 * _HELD_BYTES:  # large data are not copied
            self._held = [b"".join(self._held)]
        while self._held:
            write_at(self._shard[1], self._held[0], self._written)
            self._written += len(self._held.pop(0))
