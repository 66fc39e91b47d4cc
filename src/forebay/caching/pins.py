"""Blocks that stay on disk from epoch to epoch, and from job to job.

    blocks.data   preallocated; each block lies at a page of its own
    blocks.pins   for each block: where it lies, and a check of that; written after the block

So the disk can be full only at the start, and usage never exceeds the limit. A kill leaves a block
without its entry, which does not count. After a restart of the machine, entries may be there
without their blocks: then each block is verified before it is used.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
from bisect import bisect_left, insort
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from zlib import crc32

import numpy as np
import numpy.typing as npt

from forebay.base.files import atomic_file, open_regular, read_regular
from forebay.base.process import kernel
from forebay.errors import OutputError

PAGE = mmap.PAGESIZE
_ENTRY = np.dtype([("place", "<u8"), ("check", "<u8")])  # 0 and 0 for a block that is not there
_META_BYTES = 4096


def rounded(nbytes: int) -> int:
    """Return a number of bytes in whole pages."""
    return -(-nbytes // PAGE) * PAGE


class Extents:
    """The free parts of a file: first fit, and neighbours become one. PURE."""

    def __init__(self, size: int) -> None:
        self._free = [(0, size)] if size else []

    def take(self, nbytes: int) -> int | None:
        """Return where so many bytes are free; None if they are nowhere."""
        for at, (offset, length) in enumerate(self._free):
            if length >= nbytes:
                rest = [(offset + nbytes, length - nbytes)] if length > nbytes else []
                self._free[at : at + 1] = rest
                return offset
        return None

    def give_back(self, offset: int, nbytes: int) -> None:
        """Make bytes free again."""
        at = bisect_left(self._free, (offset, 0))
        if at < len(self._free) and offset + nbytes == self._free[at][0]:
            nbytes += self._free.pop(at)[1]
        if at and sum(self._free[at - 1]) == offset:
            before, length = self._free.pop(at - 1)
            offset, nbytes = before, length + nbytes
        insort(self._free, (offset, nbytes))


class Pins:
    """The blocks of one cache in a folder; used by one process at a time.

    Attributes:
        blocks: Those that are there, and where each begins in the file.
        unverified: Those of them that were there before the machine restarted.
        descriptor: Of the file; -1 if nothing fits into it.
    """

    def __init__(
        self,
        folder: Path | None,
        identity: str,
        nbytes: int,
        lengths: Sequence[int] | npt.NDArray[np.int64],
    ) -> None:
        """Open the files; make them anew if they are of another cache.

        Args:
            folder: None to keep nothing.
            identity: Of the cache.
            nbytes: How much of the disk may be used.
            lengths: Bytes of each block.

        Raises:
            OutputError: There is no space for so many bytes, or the folder cannot be written to.
        """
        self.blocks: dict[int, int] = {}
        self.unverified: set[int] = set()
        self.descriptor, self._lengths, self._extents = -1, lengths, Extents(0)
        if folder is None:
            return
        entries = len(lengths) * _ENTRY.itemsize
        size = max(nbytes - rounded(entries) - PAGE, 0) // PAGE * PAGE
        meta = {"cache": identity, "size": size, "boot": kernel()}
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder.stat().st_uid != os.geteuid():
                raise OSError("another user owns it")
            known = self._known(folder, meta)
            self._check_space(folder, size + entries)
            flags = os.O_RDWR | os.O_CREAT
            self._data = open_regular(folder / "blocks.data", flags, follows=False)
            self._pins = open_regular(folder / "blocks.pins", flags, follows=False)
            if not known:
                os.ftruncate(self._pins.fileno(), 0)
                os.ftruncate(self._data.fileno(), 0)
            os.ftruncate(self._data.fileno(), size)
            os.ftruncate(self._pins.fileno(), entries)
            if size:
                self.descriptor = self._data.fileno()
                os.posix_fallocate(self.descriptor, 0, size)
            with atomic_file(folder / "blocks.json") as file:
                file.write(json.dumps(meta).encode())
        except OSError as error:
            raise OutputError(
                f"directory={str(folder)!r} cannot keep {nbytes:,} bytes of blocks: "
                f"{error.strerror or error}\n"
                "  Nothing was fetched. Choose a smaller disk=, or a directory on a disk with free "
                "space that you own."
            ) from error
        self._adopt(size)
        if known != meta["boot"]:
            self.unverified = set(self.blocks)

    @staticmethod
    def _known(folder: Path, meta: dict[str, object]) -> str:
        """Return on which boot of the machine the blocks were written; "" if they are of no use."""
        with suppress(OSError, ValueError, TypeError, KeyError):
            found = json.loads(read_regular(folder / "blocks.json", _META_BYTES))
            if (found["cache"], found["size"]) == (meta["cache"], meta["size"]):
                return str(found["boot"]) or "unknown"
        return ""

    @staticmethod
    def _check_space(folder: Path, nbytes: int) -> None:
        used = 0
        for name in ("blocks.data", "blocks.pins"):
            with suppress(OSError):
                used += os.lstat(folder / name).st_blocks * 512
        free = shutil.disk_usage(folder).free
        if nbytes - used > free:
            raise OSError(f"only {free:,} bytes are free")

    def _adopt(self, size: int) -> None:
        """Read the entries; those that cannot be true do not count."""
        found = np.frombuffer(os.pread(self._pins.fileno(), len(self._lengths) * 16, 0), _ENTRY)
        blocks, end = np.flatnonzero(found["place"]), 0
        for block in blocks[np.argsort(found["place"][blocks], kind="stable")].tolist():
            place, check = int(found["place"][block]) - 1, int(found["check"][block])
            length = rounded(int(self._lengths[block]))
            is_true = check == self._check(block, place) and not place % PAGE
            if not is_true or not end <= place <= size - length:
                continue
            if place > end:
                self._extents.give_back(end, place - end)
            self.blocks[block], end = place, place + length
        if size > end:
            self._extents.give_back(end, size - end)

    def _check(self, block: int, place: int) -> int:
        return crc32(f"{block} {place} {self._lengths[block]}".encode())

    def take(self, block: int) -> int | None:
        """Return where to write a block; None if there is no space."""
        return self._extents.take(rounded(int(self._lengths[block])))

    def give_back(self, block: int, place: int) -> None:
        """Return space that `take` returned and that was not used."""
        self._extents.give_back(place, rounded(int(self._lengths[block])))

    def add(self, block: int, place: int) -> None:
        """Note that a block has been written."""
        entry = np.array([(place + 1, self._check(block, place))], _ENTRY)
        os.pwrite(self._pins.fileno(), entry.tobytes(), block * _ENTRY.itemsize)
        self.blocks[block] = place

    def remove(self, block: int) -> None:
        """Forget a block, whose space is then free."""
        os.pwrite(self._pins.fileno(), bytes(_ENTRY.itemsize), block * _ENTRY.itemsize)
        self.unverified.discard(block)
        self.give_back(block, self.blocks.pop(block))

    def close(self) -> None:
        """Close the files, which stay."""
        self._data.close()
        self._pins.close()
