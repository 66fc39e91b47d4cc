"""Blocks that stay on disk, from epoch to epoch and from job to job: one file for each lane.

    lane-007.blocks   header, table of records, blocks; each block begins at a page of its own

A loader locks the files of the lanes that it reads, and alone writes to them; the locks end with
its process. Space is allocated with the lock, so the disk cannot be full later. A record is written
after its block, and each block is compared with its checksum when it is first used: a kill, a
restart of the machine, or somebody else's file cost a request and no sample. So whoever reads
without a loader may use all files, without locks.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import struct
import time
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from zlib import crc32

import numpy as np
import numpy.typing as npt

from forebay.base.files import open_regular
from forebay.errors import OutputError

PAGE = mmap.PAGESIZE
_HEADER = struct.Struct("<16sQ")  # the version of the format, and how many records there may be
_FORMAT = b"forebay lane 2\0\0"
# The place of each block, plus one, or 0; the check is of all that has to be true.
_RECORD = np.dtype([(name, "<u8") for name in ("block", "place", "crc32", "check")])
# How long another process may keep the lock of the folder, which it has only to allocate space.
_PATIENCE_S, _LOOK_S = 5.0, 0.02


def rounded(nbytes: int) -> int:
    """Return a number of bytes in whole pages."""
    return -(-nbytes // PAGE) * PAGE


def shares_of(needs: Mapping[int, int], room: int, blocks: int, largest: int) -> dict[int, int]:
    """Return how many bytes of the disk the file of each lane may take. PURE.

    Each takes an equal part in whole blocks, and no more than it needs; what is left goes to those
    after it. So where there is room for nearly all blocks, one is missing, and not one of each
    lane.

    Args:
        needs: The bytes of the blocks of each lane, each in whole pages.
        room: The bytes for all.
        blocks: How many blocks a lane has at most.
        largest: The bytes of the largest block.
    """
    shares, head = {}, _head_bytes(2 * blocks)
    for at, lane in enumerate(sorted(needs, key=lambda lane: needs[lane])):
        share = room // (len(needs) - at)
        if at + 1 < len(needs):
            share -= max(share - head, 0) % largest
        shares[lane] = min(share, head + needs[lane])
        room -= shares[lane]
    return shares


def _head_bytes(records: int) -> int:
    """Return how many bytes come before the blocks of a file."""
    return rounded(PAGE + records * _RECORD.itemsize)


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


class LaneFile:
    """A file of blocks.

    Attributes:
        blocks: Those that are there: where each begins in the file, its record, and its CRC-32.
        is_locked: Whether this process has the lock; otherwise another one may write to the file.
    """

    def __init__(
        self,
        file: FileIO,
        identity: str,
        lengths: Sequence[int] | npt.NDArray[np.uint32],
        *,
        is_locked: bool = True,
    ) -> None:
        self.is_locked = is_locked
        self._file, self._identity, self._lengths = file, identity, lengths
        self.blocks: dict[int, tuple[int, int, int]] = {}
        self._extents, self._records, self._begin = Extents(0), list[int](), 0

    @property
    def nbytes(self) -> int:
        """What the file takes on disk."""
        return _allocated(self._file.fileno())

    def allocate(self, nbytes: int, blocks: int) -> None:
        """Give the file a size, and adopt the blocks that are in it.

        Args:
            nbytes: What the file may take.
            blocks: How many blocks have to fit in the table.

        Raises:
            OSError: The disk has no space for so much.
        """
        file, count = self._file.fileno(), self._known_count()
        if not blocks <= count <= 8 * blocks + PAGE:
            os.ftruncate(file, 0)
            count = 2 * blocks
        self._begin = _head_bytes(count)
        size = max(nbytes - self._begin, 0) // PAGE * PAGE
        os.ftruncate(file, self._begin + size)
        if not size:
            return
        os.posix_fallocate(file, 0, self._begin + size)
        os.pwrite(file, _HEADER.pack(_FORMAT, count), 0)
        self._adopt(count, size)

    def find(self) -> None:
        """Find the blocks that are in the file now, and change nothing."""
        count = min(self._known_count(), os.fstat(self._file.fileno()).st_size)
        self._begin = _head_bytes(count)
        self._adopt(count, max(os.fstat(self._file.fileno()).st_size - self._begin, 0))

    def _known_count(self) -> int:
        """Return how many records the file says that it has room for; 0 if it is none of ours."""
        head = os.pread(self._file.fileno(), _HEADER.size, 0)
        known, count = _HEADER.unpack(head) if len(head) == _HEADER.size else (b"", 0)
        return int(count) if known == _FORMAT else 0

    def _adopt(self, count: int, size: int) -> None:
        """Read the records; those that cannot be true do not count."""
        data = os.pread(self._file.fileno(), count * _RECORD.itemsize, PAGE)
        found, end = np.frombuffer(data, _RECORD, len(data) // _RECORD.itemsize), 0
        used = np.flatnonzero(found["place"])
        for record in used[np.argsort(found["place"][used], kind="stable")].tolist():
            block, place, checksum, check = (int(value) for value in found[record])
            place -= 1
            if block >= len(self._lengths) or check != self._check(block, place, checksum):
                continue
            length = rounded(int(self._lengths[block]))
            if place % PAGE or not end <= place <= size - length or block in self.blocks:
                continue
            if place > end:
                self._extents.give_back(end, place - end)
            self.blocks[block], end = (place, record, checksum), place + length
        if size > end:
            self._extents.give_back(end, size - end)
        taken = {record for _, record, _ in self.blocks.values()}
        self._records = [each for each in range(count)[::-1] if each not in taken]

    def _check(self, block: int, place: int, checksum: int) -> int:
        words = f"{self._identity} {block} {place} {self._lengths[block]} {checksum}"
        return crc32(words.encode())

    def take(self, block: int) -> int | None:
        """Return where to write a block; None if there is no space."""
        return self._extents.take(rounded(int(self._lengths[block]))) if self._records else None

    def give_back(self, block: int, place: int) -> None:
        """Return space that `take` returned and that was not used."""
        self._extents.give_back(place, rounded(int(self._lengths[block])))

    def write(self, place: int, data: memoryview) -> None:
        """Write a block where `take` said; any thread may."""
        at = self._begin + place
        while data:
            written = os.pwrite(self._file.fileno(), data, at)
            data, at = data[written:], at + written

    def read(self, place: int, view: memoryview) -> bool:
        """Read a block; return whether all of it was there. Any thread may."""
        at = self._begin + place
        while view:
            if not (count := os.preadv(self._file.fileno(), [view], at)):
                return False
            view, at = view[count:], at + count
        return True

    def add(self, block: int, place: int, checksum: int) -> None:
        """Note that a block has been written."""
        record = self._records.pop()
        check = self._check(block, place, checksum)
        self._note(record, (block, place + 1, checksum, check))
        self.blocks[block] = place, record, checksum

    def remove(self, block: int) -> None:
        """Forget a block, whose space is then free."""
        place, record, _ = self.blocks.pop(block)
        if not self.is_locked:
            return
        self._note(record, (0, 0, 0, 0))
        self._records.append(record)
        self.give_back(block, place)

    def _note(self, record: int, values: tuple[int, int, int, int]) -> None:
        data = np.array([values], _RECORD).tobytes()
        os.pwrite(self._file.fileno(), data, PAGE + record * _RECORD.itemsize)

    def close(self) -> None:
        """Release the lock; the file stays."""
        self._file.close()


class LaneFiles:
    """The files of a cache in a folder.

    Attributes:
        by_lane: Those that this process has locked, by their numbers.
        on_disk: For each block that is known to be in a file, that file.
    """

    def __init__(
        self,
        folder: Path | None,
        identity: str,
        nbytes: int,
        lengths: Sequence[int] | npt.NDArray[np.uint32],
    ) -> None:
        """Make the folder; no file is locked yet.

        Args:
            folder: None to keep nothing.
            identity: Of the cache.
            nbytes: How much of the disk all files in the folder may take.
            lengths: Bytes of each block.

        Raises:
            OutputError: There is no space for so many bytes, or the folder cannot be written to.
        """
        self.by_lane: dict[int, LaneFile] = {}
        self.on_disk: dict[int, LaneFile] = {}
        self._others: list[LaneFile] = []  # which this process only reads
        self._folder, self._identity = folder, identity
        self._nbytes, self._lengths = nbytes, lengths
        if folder is None:
            return
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder.stat().st_uid != os.geteuid():
                raise OSError("another user owns it")
            with self._locked():
                used = sum(map(_allocated, self._paths().values()))
            free = shutil.disk_usage(folder).free
            if nbytes - used > free:
                raise OSError(f"only {free:,} bytes are free")
        except OSError as error:
            raise OutputError(
                f"directory={str(folder)!r} cannot keep {nbytes:,} bytes of blocks: "
                f"{error.strerror or error}\n"
                "  Nothing was fetched. Choose a smaller disk=, or a directory on a disk with free "
                "space that you own."
            ) from error

    def claim(self, shares: Mapping[int, int], blocks: int) -> int:
        """Lock the files of lanes; return of how many another process has the lock.

        What files in the folder take together stays within the limit: files that nobody has locked
        are removed for that, those of the most distant lanes first.

        Args:
            shares: How many bytes each lane may take.
            blocks: How many blocks a lane has at most.
        """
        wanted = [lane for lane in shares if lane not in self.by_lane]
        if self._folder is None or not wanted:
            return 0
        missing = 0
        with self._locked():
            new: dict[int, LaneFile] = {}
            for lane in wanted:
                if (own := _locked_file(self._folder / _name(lane))) is None:
                    missing += 1
                else:
                    new[lane] = LaneFile(own, self._identity, self._lengths)
            others = self._paths().items() - {(lane, self._folder / _name(lane)) for lane in new}
            used = {lane: _allocated(path) for lane, path in others}
            left, taken = self._nbytes - sum(used.values()), sum(shares[lane] for lane in new)
            for lane in sorted(used, key=lambda lane: -min(abs(lane - own) for own in wanted)):
                if left >= taken or lane in self.by_lane:
                    continue
                path = self._folder / _name(lane)
                if (file := _locked_file(path)) is not None:
                    with file:
                        path.unlink()
                    left += used[lane]
            part = min(max(left, 0) / max(taken, 1), 1.0)
            try:
                # Those that shrink come first, so that others have their space.
                for lane in sorted(new, key=lambda lane: -new[lane].nbytes):
                    new[lane].allocate(int(part * shares[lane]), blocks)
            except OSError:
                for lane_file in new.values():
                    lane_file.close()
                raise
            self.by_lane |= new
            for lane_file in new.values():
                self.on_disk |= dict.fromkeys(lane_file.blocks, lane_file)
        return missing

    def find(self) -> None:
        """Find the blocks in all files, whoever has their locks; nothing is written to these."""
        if self._folder is None:
            return
        for lane, path in self._paths().items():
            with suppress(OSError):
                if lane not in self.by_lane:
                    file = open_regular(path, follows=False)
                    found = LaneFile(file, self._identity, self._lengths, is_locked=False)
                    self._others.append(found)
                    found.find()
                    self.on_disk = dict.fromkeys(found.blocks, found) | self.on_disk

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Have the lock of the folder, so that space is counted by one process at a time."""
        assert self._folder is not None
        until = time.monotonic() + _PATIENCE_S
        with open_regular(self._folder / "lock", os.O_RDWR | os.O_CREAT, follows=False) as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until:
                        raise
                    time.sleep(_LOOK_S)
            yield

    def _paths(self) -> dict[int, Path]:
        """Return the files of the folder, by their lanes."""
        assert self._folder is not None
        found = {}
        for path in self._folder.glob("lane-*.blocks"):
            if (number := path.name[5:-7]).isdecimal() and path.name == _name(int(number)):
                found[int(number)] = path
        return found

    def add(self, block: int, file: LaneFile, place: int, checksum: int) -> None:
        """Note that a block has been written to a file."""
        file.add(block, place, checksum)
        self.on_disk[block] = file

    def remove(self, block: int) -> None:
        """Forget a block, whose space is then free."""
        self.on_disk.pop(block).remove(block)

    def close(self) -> None:
        """Release all locks."""
        for file in (*self.by_lane.values(), *self._others):
            file.close()


def _name(lane: int) -> str:
    return f"lane-{lane:03}.blocks"


def _allocated(file: int | Path) -> int:
    with suppress(FileNotFoundError):
        return os.stat(file, follow_symlinks=isinstance(file, int)).st_blocks * 512
    return 0


def _locked_file(path: Path) -> FileIO | None:
    """Open or make a file and lock it; None if another process has the lock."""
    while True:
        file = open_regular(path, os.O_RDWR | os.O_CREAT, follows=False)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        except BlockingIOError:
            file.close()
            return None
        except FileNotFoundError:
            pass
        file.close()  # another process removed it meanwhile
