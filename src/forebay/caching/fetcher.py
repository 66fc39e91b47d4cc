"""The process that fetches blocks of one cache for the processes of one training.

    clients ── socket ──> loop ──> Residency, Requests (pure) ──> threads ── GET, verify ──┐
                           └─< table: where each block lies <── memory <── disk <──────────┘

One thread owns the state. Others fetch from the bucket, read the disk, verify, and write into
memory and onto the disk; what they did comes back through a queue. A reader finds a block in the
table, which all processes map, and sends a message only if the block is not there. The process ends
with the one that opened the cache (see `fetcher_process.py`).
"""

from __future__ import annotations

import json
import mmap
import os
import queue
import random
import secrets
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from forebay.base.memory_files import memory_file
from forebay.base.output_names import PRIVATE
from forebay.base.process_ties import watch_maker_of
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
    Residency,
    Unit,
    percentile,
)
from forebay.caching.fetcher_process import Place
from forebay.caching.lane_files import LaneFile, LaneFiles
from forebay.caching.layout import BLOCKS, DAMAGES, INDEX, Blocks, shard_name
from forebay.caching.link import ALIVE, accepted, entry_of, error_as_sent, messages, packed_message
from forebay.caching.stores import BucketError, bucket_at
from forebay.errors import ChangedError, ForebayError, InputError, shortened, shown_location
from forebay.memory.layout import Slot
from forebay.memory.slab import Slab
from forebay.windows import dealt

# How often clients hear what was fetched, and that this process lives.
_FACTS_S = 1.0
_RECV_BYTES = 1 << 16
# How many threads read the disk.
_DISK_THREADS = 4
# What a loader says of its lanes.
_LANES = "lanes", "first", "stop", "nbytes"


class _Target(NamedTuple):
    """Where the bytes of a block go: into memory, and onto the disk if there is space."""

    slot: Slot
    file: LaneFile | None = None
    place: int = 0


@dataclass(eq=False, slots=True)
class _Client:
    number: int
    socket: socket.socket
    incoming: bytearray = field(default_factory=bytearray)
    outgoing: deque[memoryview] = field(default_factory=deque)
    since: dict[str, float] | None = None  # totals at its beginning; None if it is sent no facts


@dataclass(eq=False, slots=True)
class _Question:
    """A message that is answered when some units are there."""

    client: _Client
    missing: set[Key]
    order: Sequence[Key]
    parts: dict[Key, memoryview] = field(default_factory=dict)


class Fetcher:
    """The state of the process; see the module."""

    def __init__(self, place: Place, incoming: socket.socket) -> None:
        """Open the cache.

        Args:
            incoming: Where clients hand over their connections.

        Raises:
            ForebayError: It cannot be opened; clients get the words.
        """
        self._place, self._incoming = place, incoming
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
            sizes = [*map(int, index["sizes"])]
            blocks_bytes = memoryview(mmap.mmap(self._blocks_file, 0, access=mmap.ACCESS_READ))
            self._blocks = Blocks(blocks_bytes, samples, per_shard, sizes, known)
        except DAMAGES as error:
            raise InputError(
                f"{shown_location(place.url)}/{PRIVATE}: the index of the cache is damaged: "
                f"{shortened(error)}\n  Call forebay.cache with the same dataset and URL."
            ) from error
        self._lengths, self._per_shard, self._samples = self._blocks.length, per_shard, samples
        self._slab = Slab()
        self._slab.record_size(int(self._lengths.max()))
        self._id = secrets.token_hex(8)
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
        self._generation = self._number = 0
        self._is_over = False
        self._clients: dict[socket.socket, _Client] = {}
        self._questions: dict[Key, list[_Question]] = {}
        # What threads did, each to be noted by a call.
        self._done: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake = os.eventfd(0)
        self._selector = selectors.DefaultSelector()
        self._hits = 0

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

    # ---- the loop ------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve clients until the process that opened the cache has ended."""
        next_facts = 0.0
        self._selector.register(self._incoming, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        for ended in watch_maker_of(self._incoming):
            self._selector.register(ended, selectors.EVENT_READ)
        while not self._is_over:
            now = time.monotonic()
            for get in self._requests.due(now):
                keys = [unit.key for unit in get.units if isinstance(unit.key, int)]
                self._threads.submit(self._perform, get, {key: self._target(key) for key in keys})
            wait = min(self._requests.wakes_at(now), next_facts, now + _FACTS_S) - now
            for key, mask in self._selector.select(max(wait, 0.0)):
                self._handle(key.fileobj, mask)
            while not self._done.empty():
                self._done.get()()
            if self._requests.must_renew:
                self._requests.must_renew = False
                with suppress(Exception):  # then requests say what is wrong
                    self._bucket.renew()
            if (now := time.monotonic()) >= next_facts:
                next_facts = now + _FACTS_S
                self._tell_facts()

    def _handle(self, source: Any, mask: int) -> None:
        if source is self._incoming:
            connection, self._is_over = accepted(self._incoming)
            if connection is not None:
                self._welcome(connection)
        elif source == self._wake:
            os.eventfd_read(self._wake)
        elif isinstance(source, int):  # the process that opened the cache has ended
            self._is_over = True
        elif (client := self._clients.get(source)) is not None:
            try:
                if mask & selectors.EVENT_WRITE:
                    self._flush(client)
                if mask & selectors.EVENT_READ:
                    data = client.socket.recv(_RECV_BYTES)
                    if not data:
                        raise ConnectionResetError
                    client.incoming += data
                    for message in messages(client.incoming):
                        self._obey(client, message)
            except BlockingIOError:
                pass
            except (OSError, ValueError, KeyError, TypeError):  # it has gone, or is none of ours
                self._part(client)

    def _welcome(self, connection: socket.socket) -> None:
        """Send a new client what it needs to read blocks."""
        self._number += 1
        client = self._clients[connection] = _Client(self._number, connection)
        facts = {"id": self._id, "extent": self._slab.extent}
        shared = [self._index_file, self._blocks_file, self._table_file, self._slab.fileno()]
        try:
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ)
            socket.send_fds(connection, [packed_message(facts)], shared)
        except OSError:
            self._part(client)

    def _part(self, client: _Client) -> None:
        """Forget a client that has gone."""
        del self._clients[client.socket]
        with suppress(KeyError, ValueError):
            self._selector.unregister(client.socket)
        client.socket.close()
        for key, questions in list(self._questions.items()):
            questions[:] = [each for each in questions if each.client is not client]
            if not questions:
                del self._questions[key]
                if not isinstance(key, int):
                    self._requests.cancel(key)
        self._drop(self._residency.leave(client.number))

    # ---- messages ------------------------------------------------------------------------------

    def _obey(self, client: _Client, message: dict[str, Any]) -> None:
        match message["op"]:
            case "facts":
                client.since = self._totals()
            case "lanes":
                self._keep_lanes(client, **{name: int(message[name]) for name in _LANES})
            case "hold":
                blocks = self._known(message["blocks"])
                epoch, due = int(message["epoch"]), int(message["due"])
                on_disk = self._files.on_disk
                self._hits += sum(
                    each in on_disk or self._residency.is_here(each) for each in blocks
                )
                self._fetch(self._residency.hold(client.number, blocks, epoch), (1, epoch, due))
            case "need":
                blocks = self._known(message["blocks"])
                whole = {*self._known(message["whole"])}  # the others only if they come anyway
                if whole:
                    self._look_on_disk()
                blocks = [each for each in blocks if each in whole or self._comes(each)]
                self._fetch(self._residency.hold(client.number, blocks), NEEDED)
                self._ask(
                    _Question(client, {each for each in blocks if not self._table[each]}, blocks)
                )
            case "release":
                self._drop(self._residency.release(client.number, self._known(message["blocks"])))
            case "parts":
                self._number += 1
                keys = [(self._number, at) for at in range(len(message["parts"]))]
                self._ask(_Question(client, {*keys}, keys))
                for key, part in zip(keys, message["parts"], strict=True):
                    self._requests.want(Unit(key, *map(int, part)), NEEDED)

    def _known(self, blocks: Any) -> list[int]:
        found = [int(block) for block in blocks]
        if found and not 0 <= min(found) <= max(found) < len(self._lengths):
            raise ValueError(f"blocks {min(found)} to {max(found)}")
        return found

    def _ask(self, question: _Question) -> None:
        if not question.missing:
            self._answer(question)
        for key in question.missing:
            self._questions.setdefault(key, []).append(question)

    def _answer(self, question: _Question) -> None:
        parts = [question.parts[key] for key in question.order if key in question.parts]
        blocks = [key for key in question.order if isinstance(key, int)]
        self._tell(question.client, {"blocks": blocks}, parts)

    def _tell(
        self, client: _Client, message: dict[str, Any], payload: Sequence[memoryview] = ()
    ) -> None:
        client.outgoing.append(memoryview(packed_message(message, sum(map(len, payload)))))
        client.outgoing.extend(payload)
        self._flush(client)

    def _flush(self, client: _Client) -> None:
        """Send what can be sent now."""
        try:
            while client.outgoing:
                sent = client.socket.send(client.outgoing[0])
                if sent < len(client.outgoing[0]):
                    client.outgoing[0] = client.outgoing[0][sent:]
                else:
                    client.outgoing.popleft()
        except BlockingIOError:
            pass
        except OSError:
            client.outgoing.clear()  # reading from it says that it has gone
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.outgoing else 0)
        self._selector.modify(client.socket, events)

    def _totals(self) -> dict[str, float]:
        counts = self._requests.counts
        return {
            "requests": counts.requests,
            "nbytes": counts.nbytes,
            "hits": self._hits,
            "busy_s": counts.busy_s,
            "lost_s": counts.lost_s,
            "elapsed_s": time.monotonic(),
            "throttled": counts.failed[THROTTLED],
            "broken": sum(counts.failed[each] for each in (BROKEN, REFUSED, WRONG)),
        }

    def _tell_facts(self) -> None:
        """Tell trainers what was fetched since they began, for all of the node."""
        totals, latencies = self._totals(), self._requests.counts.latencies or (0.0,)
        now = {f"p{part}_s": percentile(latencies, part / 100) for part in (50, 95)}
        now["on_disk"] = sum(int(self._lengths[block]) for block in self._files.on_disk)
        now["readers"] = sum(client.since is not None for client in self._clients.values())
        for client in list(self._clients.values()):
            if client.since is not None and not client.outgoing:
                since = {name: total - client.since[name] for name, total in totals.items()}
                self._tell(client, {"op": "facts", **since, **now})
        for number in {each.client.number for asked in self._questions.values() for each in asked}:
            client = next(each for each in self._clients.values() if each.number == number)
            if not client.outgoing:
                self._tell(client, ALIVE)

    # ---- blocks --------------------------------------------------------------------------------

    def _fetch(self, blocks: Sequence[int], rank: Rank) -> None:
        for block in blocks:
            if block in self._files.on_disk:
                self._load(block)
            elif block not in self._loading:
                self._requests.want(self._unit(block), rank)

    def _comes(self, block: int) -> bool:
        """Return whether a block need not be fetched for who needs a few of its samples."""
        return block in self._files.on_disk or self._residency.is_held(block)

    def _keep_lanes(
        self, client: _Client, *, lanes: int, first: int, stop: int, nbytes: int
    ) -> None:
        """Lock the files of lanes, and keep their blocks there; tell the client what is not."""
        if not 0 <= first < stop <= lanes:
            raise ValueError(f"lanes {first} to {stop} of {lanes}")
        if not self._lanes or lanes > max(self._lanes) + 1:  # those of the loader that has most
            rows = np.diff(np.append(self._blocks.first, self._samples))
            self._lanes = dealt(rows, lanes).tolist()
        most = -(-len(self._lengths) // lanes)
        try:
            missing, why = self._files.claim(range(first, stop), nbytes, most), ""
        except OSError as error:
            missing, why = stop - first, error.strerror or str(error)
        for block, file in self._files.on_disk.items():
            if file.is_locked:
                self._residency.put_on_disk(block)
        if missing:
            self._tell(client, {"op": "facts", "off_disk": [missing, stop - first, why]})

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
        with suppress(OSError):
            view = self._slab.view(slot)[: int(self._lengths[block])]
            is_whole = file.read(place, view) and (
                is_known or crc32(view) == int(self._blocks.crc32[block])
            )
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
                elif self._write(targets[unit.key], found):
                    written.add(unit.key)
        except Exception as failure:  # noqa: BLE001 - a full disk, for example
            words = f"{type(failure).__name__}: {failure}"
            error = failure if isinstance(failure, BucketError) else BucketError(BROKEN, words)
        self._put(partial(self._land, get, targets, wrong, parts, written, error))

    def _put(self, done: Callable[[], None]) -> None:
        self._done.put(done)
        os.eventfd_write(self._wake, 1)

    def _write(self, target: _Target, data: memoryview) -> bool:
        """Write a block into memory; return whether it is on disk, too."""
        self._slab.view(target.slot)[: len(data)] = data
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

    def _settle(self, key: Key, part: memoryview | None) -> None:
        """Answer those who waited for a unit."""
        for question in self._questions.pop(key, ()):
            question.missing.discard(key)
            if part is not None:
                question.parts[key] = part
            if not question.missing:
                self._answer(question)

    def _give_up(self, lost: GivenUp) -> None:
        """Tell those who waited for a unit why it does not come."""
        error = error_as_sent(self._error_of(lost))
        for question in self._questions.pop(lost.unit.key, ()):
            for key in question.missing:
                others = self._questions.get(key, [])
                if question in others:
                    others.remove(question)
            self._tell(question.client, error)

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
        if kind == WRONG:
            wanted = int(self._blocks.crc32[unit.key])
            return InputError(
                f"{where}: {span} have the checksum {lost.message} instead of {wanted:08x}\n"
                "  They arrived like this twice, so the object is damaged. Remove it and call "
                "forebay.cache again, with the same dataset and URL: it writes that shard again."
            )
        return _refused(f"{where}, {span}", kind, lost.message)


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
