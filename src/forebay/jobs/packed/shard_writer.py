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
from contextlib import suppress
from io import FileIO

from forebay.jobs.ledger.records import FileFields
from forebay.jobs.outputs.output_names import member_name
from forebay.jobs.packed.shard_files import ShardFiles, write_at
from forebay.jobs.packed.tar_member import BLOCK, header, padding

# More than this is not kept in memory until the input ends.
_HELD_BYTES = 1 << 20


class ShardWriter:
    """Writes the members of one worker, for one input at a time.

    Each incarnation of a worker writes to shards of its own. It holds a lock on the open one, so
    that a driver knows whether somebody, such as an abandoned thread, may still write to it.

    Args:
        root: The output folder.
        shard_bytes: A shard of at least this size gets no further input.
        syncs: Whether to flush each commit to disk, since the driver's flush does not.
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
            name: Its final name, checked by `packed_name`.
            data: Its bytes; they must not change until the input ends.

        Raises:
            OSError: The disk is full or broken.
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
        """Return the members of this input, which are in the shard now.

        Raises:
            OSError: The disk is full or broken.
        """
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
