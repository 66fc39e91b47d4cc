"""The blocks of a cache that its fetcher has: fetched, verified, in memory, and on disk.

    Residency, Requests (pure) ──> threads ── GET, verify ──┐
    table: where each block lies <── memory <── disk <──────┘

One thread owns the state. Others fetch from the bucket, read the disk, verify, and write into
memory and onto the disk; what they did comes back through a queue.
"""

from __future__ import annotations

import json
import mmap
import os
import queue
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from forebay.base.output_names import PRIVATE
from forebay.base.process import memory_file
from forebay.base.store_errors import BROKEN, MISSING, REFUSED, THROTTLED, store_advice
from forebay.caching.fetch_policy import (
    MOST_REQUESTS,
    NEEDED,
    WRONG,
    Get,
    GivenUp,
    Key,
    Rank,
    Requests,
    Unit,
)
from forebay.caching.fetcher_process import Place
from forebay.caching.lane_files import LaneFile, LaneFiles
from forebay.caching.layout import BLOCKS, DAMAGES, INDEX, Blocks, shard_name
from forebay.caching.link import entry_of
from forebay.caching.residency import Residency
from forebay.caching.stores import BucketError, bucket_at
from forebay.errors import ChangedError, ForebayError, InputError, shortened, shown_location
from forebay.memory.layout import Slot
from forebay.memory.slab import Slab

# How many threads read the disk.
_DISK_THREADS = 4


class _Target(NamedTuple):
    """Where the bytes of a block go: into memory, and onto the disk if there is space."""

    slot: Slot
    file: LaneFile | None = None
    place: int = 0


class FetchedBlocks(ABC):
    """Blocks of a cache, fetched from its bucket into memory, and kept on disk where that is asked.

    Whoever waits for a unit is a subclass's concern: it is told what came and what is given up.
    """

    def __init__(self, place: Place) -> None:
        """Open the cache.

        Raises:
            ForebayError: It cannot be opened.
        """
        self._place = place
        try:
            self._bucket = bucket_at(place.url)
        except BucketError as error:
            raise _refused(shown_location(place.url), error.kind, str(error)) from error
        self._threads = ThreadPoolExecutor(MOST_REQUESTS, "forebay-fetch")
        self._index_bytes, blocks = self._threads.map(self._read, (INDEX, BLOCKS))
        # Written once for all clients: of a large cache, it has tens of megabytes.
        self._index_file = _in_memory("index", self._index_bytes)
        self._blocks_file = _in_memory("blocks", blocks)
        del blocks
        try:  # readers look at the rest of the index, and say more
            index = json.loads(self._index_bytes)
            samples, per_shard = (int(index["plan"][name]) for name in ("samples", "per_shard"))
            known = int(index["blocks"]["count"]), int(index["blocks"]["crc32"])
            sizes, compression = [*map(int, index["sizes"])], index["plan"]["compression"]
            blocks_bytes = memoryview(mmap.mmap(self._blocks_file, 0, access=mmap.ACCESS_READ))
            self._blocks = Blocks(blocks_bytes, samples, per_shard, sizes, known, compression)
        except DAMAGES as error:
            raise InputError(
                f"{shown_location(place.url)}/{PRIVATE}: the index of the cache is damaged: "
                f"{shortened(error)}\n  Call forebay.cache with the same dataset and URL."
            ) from error
        self._lengths, self._per_shard, self._samples = self._blocks.length, per_shard, samples
        self._slab = Slab()
        self._compression = compression
        self._slab.record_size(int(self._blocks.nbytes.max()))
        self._slots: dict[int, Slot] = {}
        folder = Path(place.directory) / place.name if place.directory and place.disk else None
        identity = f"{crc32(self._index_bytes):08x}{crc32(blocks_bytes):08x}"
        self._files = LaneFiles(folder, identity, place.disk, self._lengths)
        self._disk_threads = ThreadPoolExecutor(_DISK_THREADS, "forebay-disk")
        self._lanes: list[int] = []  # of each block; empty without a loader that keeps blocks
        self._has_looked = False  # into the files that others have locked
        self._verified: set[int] = set()  # blocks on disk that were compared with their checksums
        self._loading: dict[int, Slot] = {}
        self._table_file = _in_memory("table", bytes(8 * len(self._blocks)))
        self._table = np.frombuffer(mmap.mmap(self._table_file, 8 * len(self._blocks)), np.uint64)
        self._residency, self._requests = Residency(), Requests(random.Random())  # noqa: S311
        self._generation = 0
        # What threads did, each to be noted by a call.
        self._done: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake = os.eventfd(0)

    @abstractmethod
    def _settle(self, key: Key, part: memoryview | None) -> None:
        """Note that a unit is there: a block in the table, or the bytes of a part."""

    @abstractmethod
    def _give_up(self, lost: GivenUp) -> None:
        """Note that a unit does not come."""

    def _read(self, name: str) -> bytes:
        where = f"{shown_location(self._place.url)}/{name}"
        try:
            return bytes(self._bucket.read(name))
        except BucketError as error:
            if error.kind == MISSING:
                advice = store_advice(
                    error,
                    "Check the URL; forebay.cache(dataset, url) makes a cache there, or finishes "
                    "one.",
                )
                raise InputError(
                    f"{where}: there is no such object, so there is no finished cache\n"
                    f"  The bucket said: {str(error).rstrip('.')}. {advice}"
                ) from error
            raise _refused(where, error.kind, str(error)) from error

    def _known(self, blocks: Any) -> list[int]:
        found = [int(block) for block in blocks]
        if found and not 0 <= min(found) <= max(found) < len(self._lengths):
            raise ValueError(f"blocks {min(found)} to {max(found)}")
        return found

    def _fetch(self, blocks: Sequence[int], rank: Rank) -> None:
        for block in blocks:
            if block in self._files.on_disk:
                self._load(block)
            elif block not in self._loading:
                self._requests.want(self._unit(block), rank)

    def _comes(self, block: int) -> bool:
        """Return whether a block need not be fetched for who needs a few of its samples."""
        return block in self._files.on_disk or self._residency.is_held(block)

    def _look_on_disk(self) -> None:
        """Look into all files, once, if no loader has said which lanes it reads."""
        if not self._has_looked and not self._files.by_lane:
            self._files.find()
        self._has_looked = True

    def _load(self, block: int) -> None:
        """Read a block from disk into memory, in a thread."""
        if block not in self._loading:
            self._loading[block] = slot = self._slot()
            file = self._files.on_disk[block]
            place, _ = file.blocks[block]
            is_known = file.is_locked and block in self._verified
            self._disk_threads.submit(self._read_disk, block, file, place, slot, is_known)

    def _read_disk(
        self, block: int, file: LaneFile, place: int, slot: Slot, is_known: bool
    ) -> None:
        is_whole = False
        with suppress(OSError, BucketError):
            length = int(self._lengths[block])
            view = self._slab.view(slot)[:length] if self._compression is None else None
            data = memoryview(bytearray(length)) if view is None else view
            is_whole = file.read(place, data) and (
                is_known or crc32(data) == int(self._blocks.crc32[block])
            )
            if is_whole and view is None:
                is_whole = False  # unless it can be decompressed
                self._fill(block, slot, data)
                is_whole = True
        self._put(partial(self._note_read, block, file, is_whole))

    def _note_read(self, block: int, file: LaneFile, is_whole: bool) -> None:
        slot, is_held = self._loading.pop(block), self._residency.is_held(block)
        if is_whole and file.is_locked:
            self._verified.add(block)
        if not is_whole and self._files.on_disk.get(block) is file:
            self._files.remove(block)
            self._residency.forget(block)
        if is_whole and is_held:
            self._publish(block, slot)
            self._settle(block, None)
            return
        self._slab.give_back(slot)
        if is_held:
            self._requests.want(self._unit(block), NEEDED)

    def _unit(self, block: int) -> Unit:
        place = int(self._blocks.first[block]) // self._per_shard, int(self._blocks.offset[block])
        return Unit(block, *place, int(self._lengths[block]))

    def _drop(self, blocks: Sequence[int]) -> None:
        """Free the memory of blocks that nobody holds."""
        for block in blocks:
            self._requests.cancel(block)
            if (slot := self._slots.pop(block, None)) is not None:
                self._table[block] = 0  # before the memory is used again
                self._slab.give_back(slot)

    def _slot(self) -> Slot:
        if (slot := self._slab.take()) is None:
            raise MemoryError("no address space is left for blocks")
        return slot

    def _target(self, block: int) -> _Target:
        """Return where a block that arrives goes: onto the disk, too, if there is space."""
        file = self._files.by_lane.get(self._lanes[block]) if self._lanes else None
        if file is None or block in self._files.on_disk:
            return _Target(self._slot())
        if (place := file.take(block)) is None:
            for old in self._residency.stale():
                self._files.remove(old)
                self._verified.discard(old)
            place = file.take(block)
        return _Target(self._slot(), *(() if place is None else (file, place)))

    def _perform(self, get: Get, targets: dict[int, _Target]) -> None:
        """Fetch units, verify them and put them where they belong; in a thread."""
        first = get.units[0]
        wrong: dict[Key, int] = {}
        parts: dict[Key, memoryview] = {}
        written: set[int] = set()
        error: BucketError | None = None
        try:
            data = self._bucket.read(shard_name(first.shard), first.offset, get.length)
            for unit in get.units:
                start = unit.offset - first.offset
                found = data[start : start + unit.length]
                if not isinstance(unit.key, int):
                    parts[unit.key] = found
                    continue
                checksum = crc32(found)
                if checksum != int(self._blocks.crc32[unit.key]):
                    wrong[unit.key] = checksum
                elif self._write(unit.key, targets[unit.key], found):
                    written.add(unit.key)
        except Exception as failure:  # noqa: BLE001 - a full disk, for example
            words = f"{type(failure).__name__}: {failure}"
            error = failure if isinstance(failure, BucketError) else BucketError(BROKEN, words)
        self._put(partial(self._land, get, targets, wrong, parts, written, error))

    def _put(self, done: Callable[[], None]) -> None:
        self._done.put(done)
        os.eventfd_write(self._wake, 1)

    def _fill(self, block: int, slot: Slot, data: memoryview) -> None:
        """Write a block into memory, decompressed, for all who read it."""
        view = self._slab.view(slot)[: int(self._blocks.nbytes[block])]
        if self._compression is None:
            view[:] = data
            return
        from forebay.caching.record_batches import decompress  # loads Arrow

        try:
            decompress(data, self._compression, view)
        except ValueError as error:  # its checksum is that of the index: no other bytes will come
            raise BucketError(REFUSED, str(error)) from error

    def _write(self, block: int, target: _Target, data: memoryview) -> bool:
        """Write a block into memory; return whether it is on disk, too."""
        self._fill(block, target.slot, data)
        with suppress(OSError):  # a broken disk, for example
            if target.file is not None:
                target.file.write(target.place, data)
                return True
        return False

    def _land(
        self,
        get: Get,
        targets: dict[int, _Target],
        wrong: dict[Key, int],
        parts: dict[Key, memoryview],
        written: set[int],
        error: BucketError | None,
    ) -> None:
        """Note what a thread did.

        Args:
            wrong: Checksums that are not those of the index.
            parts: The bytes of units that are parts.
            written: The blocks that were written to disk.
            error: Why there is nothing.
        """
        now, done = time.monotonic(), list[Unit]()
        if error is not None:
            lost = self._requests.failed(get.number, error.kind, str(error), now)
        else:
            done, lost = self._requests.arrived(get.number, wrong, now)
        for unit in done:
            if isinstance(unit.key, int):  # it is held, or it would not be wanted
                target = targets.pop(unit.key)
                if target.file is not None:
                    self._note_written(unit.key, target.file, target.place, written)
                self._publish(unit.key, target.slot)
            self._settle(unit.key, parts.get(unit.key))
        for block, target in targets.items():
            self._slab.give_back(target.slot)
            if target.file is not None:
                target.file.give_back(block, target.place)
        for each in lost:
            self._give_up(each)

    def _note_written(self, block: int, file: LaneFile, place: int, written: set[int]) -> None:
        if block in written and block not in self._files.on_disk:
            self._files.add(block, file, place)
            self._residency.put_on_disk(block)
            self._verified.add(block)
        else:
            file.give_back(block, place)

    def _publish(self, block: int, slot: Slot) -> None:
        """Let readers find a block."""
        self._generation += 1
        self._slots[block] = slot
        self._residency.put_in_memory(block)
        self._table[block] = entry_of(slot.offset, self._generation)

    def _error_of(self, lost: GivenUp) -> ForebayError:
        unit, kind = lost.unit, lost.kind
        where = f"{shown_location(self._place.url)}/{shard_name(unit.shard)}"
        span = f"bytes {unit.offset:,} to {unit.offset + unit.length - 1:,}"
        if kind in (WRONG, MISSING):
            with suppress(BucketError):
                if self._bucket.read(INDEX) != self._index_bytes:
                    return ChangedError(
                        f"{where}: the cache was written anew while it was read\n"
                        "  Samples of both would mix, so nothing more was read. Open it again, and "
                        "begin the epoch anew."
                    )
        if kind == MISSING and self._is_there(unit.shard):
            return ChangedError(
                f"{where}: the object ends before {span}, and was longer when it was written\n"
                "  Nothing more was read. If the cache is being written anew, open it again after "
                "that; otherwise remove the object and call forebay.cache again, with the same "
                "dataset and URL: it writes that shard again."
            )
        if kind == WRONG:
            wanted = int(self._blocks.crc32[unit.key])
            return InputError(
                f"{where}: {span} have the checksum {lost.message} instead of {wanted:08x}\n"
                "  They arrived like this twice, so the object is damaged. Remove it and call "
                "forebay.cache again, with the same dataset and URL: it writes that shard again."
            )
        return _refused(f"{where}, {span}", kind, lost.message)

    def _is_there(self, shard: int) -> bool:
        with suppress(BucketError):
            return bool(self._bucket.read(shard_name(shard), 0, 1))
        return False


def _refused(where: str, kind: str, words: str) -> ForebayError:
    known = {
        MISSING: "Call forebay.cache again, with the same dataset and URL: it writes what is "
        "missing.",
        THROTTLED: "Lower the number of nodes that read, or keep more of the cache on disk: disk=.",
    }
    otherwise = known.get(kind, "Check the bucket; then make the same call again.")
    advice = store_advice(BucketError(kind, words), otherwise)
    what = "it cannot be read" if kind in (BROKEN, REFUSED) else kind
    return InputError(f"{where}: {what}: {words}\n  {advice}")


def _in_memory(name: str, data: bytes) -> int:
    """Return the descriptor of a file in memory."""
    file = memory_file(f"forebay-{name}")
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
    return file
