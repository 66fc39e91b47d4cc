"""The process that fetches blocks of one cache for all processes of a node.

    clients ── socket ──> loop ──> Residency, Requests (pure) ──> threads ── GET, verify ──┐
                           └─< table: where each block lies <── memory, disk <─────────────┘

One thread owns the state. Others fetch, verify and write into memory or onto the disk; what they
did comes back through a queue. A reader finds a block in the table, which all processes map, and
sends a message only if the block is not there. When the last client has gone, the process ends.
"""

from __future__ import annotations

import json
import mmap
import os
import queue
import random
import secrets
import selectors
import signal
import socket
import struct
import sys
import time
import traceback
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
from forebay.base.process import OOM_AFTER_WORKERS, die_when_memory_runs_out
from forebay.base.store_errors import BROKEN, MISSING, THROTTLED, store_advice
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
from forebay.caching.layout import BLOCKS, DAMAGES, INDEX, Blocks, shard_name
from forebay.caching.link import (
    IN_MEMORY,
    ON_DISK,
    START_S,
    Place,
    described,
    entry_of,
    messages,
    packed,
)
from forebay.caching.stores import BucketError, Pins, bucket_at
from forebay.errors import ChangedError, ForebayError, InputError, shortened, shown_location
from forebay.memory.layout import Slot
from forebay.memory.slab import Slab

# How often clients hear what was fetched.
_FACTS_S = 1.0
_RECV_BYTES = 1 << 16


class _Target(NamedTuple):
    """Where the bytes of a block go: into a slot of the memory; without one, onto the disk."""

    offset: int
    slot: Slot | None = None


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

    def __init__(self, place: Place, listening: socket.socket) -> None:
        """Open the cache.

        Raises:
            ForebayError: It cannot be opened; clients get the words.
        """
        self._place, self._listening = place, listening
        self._bucket = bucket_at(place.url)
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
        self._lengths, self._per_shard = self._blocks.length, per_shard
        self._slab = Slab()
        self._slab.record_size(int(self._lengths.max()))
        self._id = secrets.token_hex(8)
        self._slots: dict[int, Slot] = {}
        folder = Path(place.directory) / place.name if place.directory and place.disk else None
        identity = f"{crc32(self._index_bytes):08x}{crc32(blocks_bytes):08x}"
        self._pins = Pins(folder, identity, place.disk, self._lengths)
        self._table_file = _in_memory("table", bytes(8 * len(self._blocks)))
        self._table = np.frombuffer(mmap.mmap(self._table_file, 8 * len(self._blocks)), np.uint64)
        self._residency, self._requests = Residency(), Requests(random.Random())  # noqa: S311
        self._generation = self._number = 0
        self._clients: dict[socket.socket, _Client] = {}
        self._questions: dict[Key, list[_Question]] = {}
        self._verifying: set[int] = set()
        # What threads did, each to be noted by a call.
        self._done: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake = os.eventfd(0)
        self._selector = selectors.DefaultSelector()
        self._hits = 0
        for block in self._pins.blocks.keys() - self._pins.unverified:
            self._publish_pinned(block)

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
        """Serve clients until the last one has gone."""
        until, next_facts = time.monotonic() + START_S, 0.0
        self._listening.setblocking(False)
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        while self._clients or (not self._number and time.monotonic() < until):
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
        if source is self._listening:
            with suppress(BlockingIOError):
                self._welcome(self._listening.accept()[0])
        elif source == self._wake:
            os.eventfd_read(self._wake)
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

    def _welcome(self, accepted: socket.socket) -> None:
        """Send a new client what it needs to read blocks."""
        credentials = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        if struct.unpack("3i", credentials)[1] != os.geteuid():
            accepted.close()
            return
        self._number += 1
        client = self._clients[accepted] = _Client(self._number, accepted)
        facts = {"id": self._id, "extent": self._slab.extent, "disk": self._place.disk}
        shared = [self._index_file, self._blocks_file, self._table_file, self._slab.fileno()]
        shared += [self._pins.descriptor] * (self._pins.descriptor >= 0)
        try:
            socket.send_fds(accepted, [packed(facts)], shared)
        except OSError:
            self._part(client)
            return
        accepted.setblocking(False)
        self._selector.register(accepted, selectors.EVENT_READ)

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
            case "hold":
                blocks = self._known(message["blocks"])
                epoch, due = int(message["epoch"]), int(message["due"])
                self._hits += sum(map(self._residency.is_here, blocks))
                self._fetch(self._residency.hold(client.number, blocks, epoch), (1, epoch, due))
            case "need":
                blocks = self._known(message["blocks"])
                whole = {*self._known(message["whole"])}  # the others only if they come anyway
                blocks = [each for each in blocks if each in whole or self._residency.is_held(each)]
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
        client.outgoing.append(memoryview(packed(message, sum(map(len, payload)))))
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
            "broken": counts.failed[BROKEN] + counts.failed[WRONG],
        }

    def _tell_facts(self) -> None:
        """Tell trainers what was fetched since they began, for all of the node."""
        totals, latencies = self._totals(), self._requests.counts.latencies or (0.0,)
        now = {f"p{part}_s": percentile(latencies, part / 100) for part in (50, 95)}
        now["on_disk"] = sum(int(self._lengths[block]) for block in self._pins.blocks)
        now["readers"] = sum(client.since is not None for client in self._clients.values())
        for client in list(self._clients.values()):
            if client.since is not None and not client.outgoing:
                since = {name: total - client.since[name] for name, total in totals.items()}
                self._tell(client, {"op": "facts", **since, **now})

    # ---- blocks --------------------------------------------------------------------------------

    def _fetch(self, blocks: Sequence[int], rank: Rank) -> None:
        for block in blocks:
            if block in self._pins.unverified:
                self._pins.unverified.discard(block)
                self._verifying.add(block)
                self._threads.submit(self._verify, block, self._pins.blocks[block])
            elif block not in self._verifying:
                self._requests.want(self._unit(block), rank)

    def _verify(self, block: int, offset: int) -> None:
        """Look whether a block that an earlier job put on disk is whole, in a thread."""
        found = os.pread(self._pins.descriptor, int(self._lengths[block]), offset)
        is_whole = crc32(found) == int(self._blocks.crc32[block])
        self._put(partial(self._note_verified, block, is_whole))

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

    def _target(self, block: int) -> _Target:
        """Return where a block that arrives goes: onto the disk if there is space."""
        if block not in self._pins.blocks:
            place = self._pins.take(block)
            if place is None and (stale := self._residency.stale()):
                for old in stale:
                    self._table[old] = 0
                    self._pins.remove(old)
                place = self._pins.take(block)
            if place is not None:
                return _Target(place)
        slot = self._slab.take()
        if slot is None:
            raise MemoryError("no address space is left for blocks")
        return _Target(slot.offset, slot)

    def _perform(self, get: Get, targets: dict[int, _Target]) -> None:
        """Fetch units, verify them and put them where they belong; in a thread."""
        first = get.units[0]
        wrong: dict[Key, int] = {}
        parts: dict[Key, memoryview] = {}
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
                else:
                    self._write(targets[unit.key], found)
        except Exception as failure:  # noqa: BLE001 - a full disk, for example
            words = f"{type(failure).__name__}: {failure}"
            error = failure if isinstance(failure, BucketError) else BucketError(BROKEN, words)
        self._put(partial(self._land, get, targets, wrong, parts, error))

    def _put(self, done: Callable[[], None]) -> None:
        self._done.put(done)
        os.eventfd_write(self._wake, 1)

    def _write(self, target: _Target, data: memoryview) -> None:
        file = self._slab.fileno() if target.slot else self._pins.descriptor
        at = target.offset
        while data:
            written = os.pwrite(file, data, at)
            data, at = data[written:], at + written

    def _land(
        self,
        get: Get,
        targets: dict[int, _Target],
        wrong: dict[Key, int],
        parts: dict[Key, memoryview],
        error: BucketError | None,
    ) -> None:
        """Note what a thread did.

        Args:
            wrong: Checksums that are not those of the index.
            parts: The bytes of units that are parts.
            error: Why there is nothing.
        """
        now, done = time.monotonic(), list[Unit]()
        if error is not None:
            lost = self._requests.failed(get.number, error.kind, str(error), now)
        else:
            done, lost = self._requests.arrived(get.number, wrong, now)
        for unit in done:
            if isinstance(unit.key, int):  # it is held, or it would not be wanted
                self._keep(unit.key, targets.pop(unit.key))
            self._settle(unit.key, parts.get(unit.key))
        for block, target in targets.items():
            if target.slot is None:
                self._pins.give_back(block, target.offset)
            else:
                self._slab.give_back(target.slot)
        for each in lost:
            self._give_up(each)

    def _note_verified(self, block: int, is_whole: bool) -> None:
        self._verifying.discard(block)
        if is_whole:
            self._publish_pinned(block)
            self._settle(block, None)
            return
        self._pins.remove(block)
        if self._residency.is_held(block):
            self._requests.want(self._unit(block), NEEDED)

    def _keep(self, block: int, target: _Target) -> None:
        if target.slot is None:
            self._pins.add(block, target.offset)
            self._publish_pinned(block)
        else:
            self._slots[block] = target.slot
            self._residency.put_in_memory(block)
            self._publish(block, target.offset, IN_MEMORY)

    def _publish_pinned(self, block: int) -> None:
        self._residency.put_on_disk(block)
        self._publish(block, self._pins.blocks[block], ON_DISK)

    def _publish(self, block: int, offset: int, kind: int) -> None:
        """Let readers find a block."""
        self._generation += 1
        self._table[block] = entry_of(offset, self._generation, kind)

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
        error = described(self._error_of(lost))
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
    what = "it cannot be read" if kind == BROKEN else kind
    return InputError(f"{where}: {what}: {words}\n  {advice}")


def _in_memory(name: str, data: bytes) -> int:
    """Return the descriptor of a file in memory."""
    file = memory_file(f"forebay-{name}")
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
    return file


def main(_lock: int, listening: int, config: int) -> None:
    """Run the process; the lock is released when it ends, however it does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer
    die_when_memory_runs_out(OOM_AFTER_WORKERS)
    with os.fdopen(config, "rb") as file:
        given: dict[str, Any] = json.load(file)
    path = given.pop("path")
    server = socket.socket(fileno=listening)
    try:
        try:
            fetcher = Fetcher(Place(**given), server)
        except ForebayError as error:
            _refuse_all(server, error)
        else:
            fetcher.run()
    except BaseException:  # noqa: BLE001 - readers start another, which may say more
        traceback.print_exc()
    for each in (path, Path(path).with_suffix(".lock")):
        with suppress(OSError):
            os.unlink(each)
    server.close()
    sys.stderr.flush()
    os._exit(0)


def _refuse_all(server: socket.socket, error: ForebayError) -> None:
    """Tell those who wait for a connection why there is none."""
    server.settimeout(0.0)
    message = packed(described(error))
    with suppress(OSError):
        while True:
            client, _ = server.accept()
            with client:
                client.sendall(message)
