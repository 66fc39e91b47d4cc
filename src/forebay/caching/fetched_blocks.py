"""The blocks of a cache that its fetcher has: fetched, verified, in memory, and on disk.

    Residency, Requests (pure) ──> threads ── GET, verify ──┐
    table: where each block lies <── memory <── disk <──────┘

One thread owns the state. Others fetch from the bucket, read the disk, verify, and write into
memory and onto the disk; what they did comes back through a queue.
"""

from __future__ import annotations

import mmap
import os
import queue
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

from forebay.base.process import memory_file_of
from forebay.base.store_errors import BROKEN, MISSING, store_advice
from forebay.caching.block_source import BlockSource, refused_by_bucket
from forebay.caching.fetch_policy import (
    CHANGED,
    MOST_REQUESTS,
    NEEDED,
    Get,
    GivenUp,
    Key,
    Rank,
    Requests,
    Unit,
)
from forebay.caching.fetcher_process import Place
from forebay.caching.kept_blocks import KeptBlocks
from forebay.caching.link import entry_of
from forebay.caching.residency import Residency
from forebay.caching.stores import BucketError, bucket_at
from forebay.errors import ForebayError, InputError, shown_location
from forebay.memory.layout import Slot
from forebay.memory.slab import Slab

# How many threads read the disk.
_DISK_THREADS = 4


class _Arrived(NamedTuple):
    """What a thread fetched.

    Attributes:
        slots: Where the bytes of blocks go.
        sums: The checksums of units.
        wrong: Those that are not as they were, or as the index has them.
        parts: The bytes of units that are no blocks.
        filled: Of those that are, how many bytes are in memory; or what is to be there, if it did
            not fit.
    """

    get: Get
    slots: dict[int, Slot]
    sums: dict[Key, int]
    wrong: dict[Key, int]
    parts: dict[Key, memoryview]
    filled: dict[int, int | memoryview]


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
            raise refused_by_bucket(shown_location(place.url), error.kind, str(error)) from error
        self._threads = ThreadPoolExecutor(MOST_REQUESTS, "forebay-fetch")
        self._source: BlockSource = place.source(
            lambda names: [*self._threads.map(self._read, names)]
        )
        source = self._source
        self._lengths = source.lengths
        self._slab = Slab()
        self._slab.record_size(source.most_bytes)
        self._slots: dict[int, Slot] = {}
        folder = Path(place.directory) if place.directory and place.disk else None
        identity = f"{place.name} {source.identity}"
        self._kept = KeptBlocks(folder, identity, place.disk, self._lengths)
        self._disk_threads = ThreadPoolExecutor(_DISK_THREADS, "forebay-disk")
        self._loading: dict[int, Slot] = {}
        # For each block where it is, and then for each how many bytes it has there.
        size = 16 * len(self._lengths)
        self._table_file = memory_file_of("table", bytes(size))
        self._table = np.frombuffer(mmap.mmap(self._table_file, size), np.uint64)
        self._sums: dict[Key, int] = {}  # of units whose checksum was taken when they arrived first
        self._tags: dict[int, str] = {}  # of objects
        # Units of blocks of which others are missing yet; blocks that are put together.
        self._pieces: dict[int, dict[Key, memoryview]] = {}
        self._assembling: set[int] = set()
        self._residency, self._requests = Residency(), Requests()
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
            raise refused_by_bucket(where, error.kind, str(error)) from error

    def _known(self, blocks: Any) -> list[int]:
        found = [int(block) for block in blocks]
        if found and not 0 <= min(found) <= max(found) < len(self._lengths):
            raise ValueError(f"blocks {min(found)} to {max(found)}")
        return found

    def _fetch(self, blocks: Sequence[int], rank: Rank) -> None:
        for block in blocks:
            if block in self._kept.on_disk:
                self._load(block)
            elif block not in self._loading and block not in self._assembling:
                self._want(block, rank)

    def _comes(self, block: int) -> bool:
        """Return whether a block need not be fetched for who needs a few of its samples."""
        return block in self._kept.on_disk or self._residency.is_held(block)

    def _load(self, block: int) -> None:
        """Read a block from disk into memory, in a thread."""
        if block not in self._loading:
            self._loading[block] = slot = self._slot()
            self._disk_threads.submit(self._read_disk, block, slot)

    def _read_disk(self, block: int, slot: Slot) -> None:
        nbytes, is_plain = int(self._lengths[block]), self._source.is_as_fetched
        filled: int | memoryview = 0
        with suppress(BucketError):
            data = self._slab.view(slot)[:nbytes] if is_plain else memoryview(bytearray(nbytes))
            if self._kept.read(block, data, self._source.checksum(block)):
                filled = nbytes if is_plain else self._fill(block, slot, data)
        self._put(partial(self._note_read, block, filled))

    def _note_read(self, block: int, filled: int | memoryview) -> None:
        slot, is_held = self._loading.pop(block), self._residency.is_held(block)
        if filled and is_held:
            self._keep(block, slot, filled)
            self._settle(block, None)
            return
        self._slab.give_back(slot)
        if is_held:
            self._want(block, NEEDED)

    def _want(self, block: int, rank: Rank) -> None:
        """Fetch what is missing of a block."""
        there = self._pieces.get(block, {})
        for unit in self._source.units(block):
            if unit.key not in there:
                self._requests.want(unit, rank)

    def _cancel(self, block: int) -> None:
        self._pieces.pop(block, None)
        for unit in self._source.units(block):
            self._requests.cancel(unit.key)

    def _drop(self, blocks: Sequence[int]) -> None:
        """Free the memory of blocks that nobody holds."""
        for block in blocks:
            self._cancel(block)
            if (slot := self._slots.pop(block, None)) is not None:
                self._table[block] = 0  # before the memory is used again
                self._slab.give_back(slot)

    def _slot(self) -> Slot:
        if (slot := self._slab.take()) is None:
            raise MemoryError("no address space is left for blocks")
        return slot

    def _perform(self, get: Get, slots: dict[int, Slot]) -> None:
        """Fetch units, verify them and put them where they belong; in a thread."""
        first = get.units[0]
        arrived = _Arrived(get, slots, {}, {}, {}, {})
        error: BucketError | None = None
        try:
            data = self._bytes_of(get)
            for unit in get.units:
                start = unit.offset - first.offset
                found = data[start : start + unit.length]
                if _is_part(unit.key):
                    arrived.parts[unit.key] = found  # of a reader's own
                    continue
                checksum = arrived.sums[unit.key] = crc32(found)
                known = self._source.checksum(unit.key) if isinstance(unit.key, int) else None
                known = self._sums.get(unit.key) if known is None else known
                if known not in (None, checksum):
                    arrived.wrong[unit.key] = checksum
                elif isinstance(unit.key, int):
                    found = self._source.joined(unit.key, [found])
                    arrived.filled[unit.key] = self._write(unit.key, slots[unit.key], found)
                else:
                    arrived.parts[unit.key] = found
        except Exception as failure:  # noqa: BLE001 - a full disk, for example
            error = _as_bucket_error(failure)
        self._put(partial(self._land, arrived, error))

    def _bytes_of(self, get: Get) -> memoryview:
        """Return bytes of an object, which must be the same one at each call."""
        number, span = get.units[0].shard, (get.units[0].offset, get.length)
        name, wanted = self._source.name_of(number), self._source.tag(number)
        is_compared = wanted is None or not any(_is_part(unit.key) for unit in get.units)
        found, tag = self._bucket.read_tagged(name, *span)
        if self._source.has_checksums and is_compared:
            return found
        if number not in self._tags and wanted is not None:
            tag = tag or self._source.tag_now(number)
            self._tags[number] = wanted
        if tag and self._tags.setdefault(number, tag) != tag:
            raise BucketError(CHANGED, f"its ETag is {tag}, and was {self._tags[number]}")
        return found

    def _put(self, done: Callable[[], None]) -> None:
        self._done.put(done)
        os.eventfd_write(self._wake, 1)

    def _write(self, block: int, slot: Slot, data: memoryview) -> int | memoryview:
        """Write a block into memory, as `_fill` does, and onto the disk if it has room there."""
        filled = self._fill(block, slot, data)
        self._kept.add(block, data)
        return filled

    def _fill(self, block: int, slot: Slot, data: memoryview) -> int | memoryview:
        """Write a block into memory; return its bytes there, or what to write if it has no room."""
        view = self._slab.view(slot)
        filled = self._source.fill(block, data, view)
        if not isinstance(filled, int) and len(filled) <= len(view):
            self._slab.write(slot, filled)
            return len(filled)
        return filled

    def _land(self, arrived: _Arrived, error: BucketError | None) -> None:
        """Note what a thread did; `error` is why there is nothing."""
        now, done, number = time.monotonic(), list[Unit](), arrived.get.number
        if error is not None:
            lost = self._requests.failed(number, error.kind, str(error), now)
        else:
            done, lost = self._requests.arrived(number, arrived.wrong, now)
        for unit in done:
            if not self._source.has_checksums and unit.key in arrived.sums:
                self._sums.setdefault(unit.key, arrived.sums[unit.key])
            if isinstance(unit.key, int):  # it is held, or it would not be wanted
                self._keep(unit.key, arrived.slots.pop(unit.key), arrived.filled[unit.key])
            elif len(unit.key) == 3:
                self._collect(unit.key, arrived.parts[unit.key])
                continue
            self._settle(unit.key, arrived.parts.get(unit.key))
        for slot in arrived.slots.values():
            self._slab.give_back(slot)
        for each in lost:
            self._lose(each)

    def _keep(self, block: int, slot: Slot, filled: int | memoryview) -> None:
        """Let readers find a block that is in memory, or does not fit into its slot."""
        if not isinstance(filled, int):  # it needs more memory than any block before
            data, filled = filled, len(filled)
            self._slab.give_back(slot)
            self._slab.record_size(filled)
            slot = self._slot()
            self._slab.write(slot, data)
        self._generation += 1
        self._slots[block] = slot
        self._residency.put_in_memory(block)
        self._table[len(self._lengths) + block] = filled
        self._table[block] = entry_of(slot.offset, self._generation)

    # ---- blocks of several units ---------------------------------------------------------------

    def _collect(self, key: tuple[int, int, int], data: memoryview) -> None:
        """Note that a unit of a block is there; the last one has the block put together."""
        block = key[0]
        pieces = self._pieces.setdefault(block, {})
        pieces[key] = data
        units = self._source.units(block)
        if len(pieces) == len(units):
            del self._pieces[block]
            self._assembling.add(block)
            parts = [pieces[unit.key] for unit in units]
            self._threads.submit(self._assemble, block, parts, self._slot())

    def _assemble(self, block: int, parts: list[memoryview], slot: Slot) -> None:
        filled, error = None, None
        try:
            filled = self._write(block, slot, self._source.joined(block, parts))
        except Exception as failure:  # noqa: BLE001 - as of a single unit
            error = _as_bucket_error(failure)
        self._put(partial(self._note_assembled, block, slot, filled, error))

    def _note_assembled(
        self, block: int, slot: Slot, filled: int | memoryview | None, error: BucketError | None
    ) -> None:
        self._assembling.discard(block)
        if filled is not None and self._residency.is_held(block):
            self._keep(block, slot, filled)
            self._settle(block, None)
            return
        self._slab.give_back(slot)
        if error is not None:
            unit = self._source.units(block)[0]
            self._lose(GivenUp(unit, error.kind, str(error)))

    def _lose(self, lost: GivenUp) -> None:
        """Give up a unit, and with it the rest of its block."""
        if isinstance(lost.unit.key, tuple) and len(lost.unit.key) == 3:
            block = lost.unit.key[0]
            self._cancel(block)
            lost = lost._replace(unit=lost.unit._replace(key=block))
        self._give_up(lost)

    def _error_of(self, lost: GivenUp) -> ForebayError:
        error: ForebayError = self._source.error_of(lost, self._bucket)
        return error


def _is_part(key: Key) -> bool:
    """Return whether a unit is some bytes for one reader."""
    return isinstance(key, tuple) and len(key) == 2


def _as_bucket_error(failure: Exception) -> BucketError:
    words = f"{type(failure).__name__}: {failure}"
    return failure if isinstance(failure, BucketError) else BucketError(BROKEN, words)
