"""Blocks that stay on disk, from epoch to epoch and from job to job: a file for each.

    1f03b9…-1234-9c0d22ab.block    its set, its number, and the CRC-32 of its bytes

A file gets its name when it is complete, and is compared with that checksum whenever it is read. So
nothing needs to be known of who wrote it: any sets and jobs share a directory, without locks, and a
damaged file costs a request. The first blocks that arrive stay, since with a new order in each
epoch the block that was used last is no less likely to be needed next (see docs/design/0011). Where
there is no room, the oldest files are deleted of those that nobody uses any more.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from forebay.base.files import open_regular
from forebay.errors import OutputError
from forebay.options import ranks_on_node

_PAGE = 4096
_named = re.compile(r"([0-9a-f]{16})-(\d{1,18})-([0-9a-f]{8})\.block(\.[0-9a-f]{16})?").fullmatch
# How often to look for room in a full directory; how old a file is that a kill left incomplete.
_LOOK_S, _LEFT_S = 10.0, 3600.0


class KeptBlocks:
    """The blocks of a set that are in a directory; any thread may use it.

    Attributes:
        on_disk: Those that are there, and the CRC-32 of each.
        why: Why the last block could not be written; "" if there was no error.
    """

    def __init__(
        self, folder: Path | None, identity: str, limit: int, lengths: npt.NDArray[Any]
    ) -> None:
        """Make the directory, and find the blocks in it.

        Args:
            folder: None to keep nothing.
            identity: What differs for another set.
            limit: Bytes that all files of the directory may take, whichever set they are of.
            lengths: Bytes of each block.

        Raises:
            OutputError: There is no space for so many bytes, or the directory cannot be used.
        """
        self.on_disk: dict[int, int] = {}
        self.why = ""
        self._folder, self._limit, self._lengths = folder, limit, lengths
        self._set = sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()[:16]
        self._lock = threading.Lock()
        self._room, self._next_look = 0, 0.0
        # Files that were used before these times are deleted: of other sets, of this one.
        self._others_until, self._own_until, self._epoch_began = time.time(), 0.0, 0.0
        if folder is None:
            return
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder.stat().st_uid != os.geteuid():
                raise OSError("another user owns it")
            used = self._look(0)
            free = shutil.disk_usage(folder).free
            if limit - used > free:
                raise OSError(f"only {free:,} bytes are free")
        except OSError as error:
            raise OutputError(
                f"directory={str(folder)!r} cannot keep {limit:,} bytes of blocks: "
                f"{error.strerror or error}\n"
                "  Nothing was fetched. Choose a smaller disk=, or a directory on a disk with free "
                "space that you own."
            ) from error

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks of this set."""
        return int(self._lengths[[*self.on_disk]].sum(dtype=np.int64)) if self.on_disk else 0

    def begin_epoch(self) -> None:
        """Note that an epoch begins: blocks that the last two did not use make room for others."""
        with self._lock:
            self._own_until, self._epoch_began = self._epoch_began, time.time()
            self._others_until = max(self._others_until, self._own_until)
            self._next_look = 0.0

    def read(self, block: int, view: memoryview, checksum: int | None) -> bool:
        """Read a block; return whether it is what was written, and forget it if it is not.

        Args:
            checksum: The one that it must have; None if that is not known.
        """
        if (found := self.on_disk.get(block)) is None:
            return False
        path = self._path(block, found)
        with suppress(OSError), open_regular(path, follows=False) as file:
            is_whole = os.fstat(file.fileno()).st_size == len(view) == file.readinto(view)
            if is_whole and crc32(view) == found and checksum in (None, found):
                os.utime(file.fileno())  # it is used now
                return True
        self.on_disk.pop(block, None)
        with suppress(OSError):
            path.unlink()
        return False

    def add(self, block: int, data: memoryview) -> None:
        """Write a block if there is room."""
        if self._folder is None or block in self.on_disk:
            return
        size = _rounded(len(data))
        with self._lock:
            if self._room < size and time.monotonic() >= self._next_look:
                with suppress(OSError):
                    self._look(size)
                self._next_look = time.monotonic() + _LOOK_S * (self._room < size)
            if self._room < size:
                return
            self._room -= size
        checksum = crc32(data)
        path = self._path(block, checksum)
        temporary = path.with_name(f"{path.name}.{os.urandom(8).hex()}")
        try:
            with temporary.open("xb") as file:
                file.write(data)
            os.replace(temporary, path)
            self.on_disk[block] = checksum
        except OSError as error:
            self.why = error.strerror or str(error)
            with suppress(OSError):
                temporary.unlink()

    def _path(self, block: int, checksum: int) -> Path:
        assert self._folder is not None
        return self._folder / f"{self._set}-{block}-{checksum:08x}.block"

    def _look(self, wanted: int) -> int:
        """Find what is there, delete the oldest files if more room is wanted; return the bytes."""
        assert self._folder is not None
        used, old, now = 0, list[tuple[float, int, str]](), time.time()
        there = dict[int, int]()
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if (found := _named(entry.name)) is None:
                    continue
                with suppress(FileNotFoundError):
                    state = entry.stat(follow_symlinks=False)
                    used += _rounded(state.st_size)
                    is_own, block = found[1] == self._set, int(found[2])
                    until = self._own_until if is_own else self._others_until
                    if found[4]:
                        until = now - _LEFT_S
                    elif is_own and block < len(self._lengths):
                        there[block] = int(found[3], 16)
                    if state.st_mtime < until:
                        old.append((state.st_mtime, state.st_size, entry.name))
        self.on_disk = there
        # Other ranks of this node fill the same directory, and look less often than they write.
        share = ranks_on_node() if "LOCAL_WORLD_SIZE" in os.environ else 1
        for _, size, name in sorted(old):
            if (self._limit - used) // share >= wanted:
                break
            with suppress(OSError):
                (self._folder / name).unlink()
                used -= _rounded(size)
                if (found := _named(name)) is not None and found[1] == self._set:
                    self.on_disk.pop(int(found[2]), None)
        self._room = max(self._limit - used, 0) // share
        return used


def _rounded(nbytes: int) -> int:
    """Return what a file takes on disk."""
    return -(-nbytes // _PAGE) * _PAGE
