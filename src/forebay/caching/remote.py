"""Read samples of a cache in a bucket: from blocks that the fetcher has, or has to fetch.

    position ──> block ── in the table ──> map of memory or disk ──> leaves, copied
                   └── not there ──> ask the fetcher: for the block, or for the parts of some rows

A reader looks into the table and copies; then it looks again. If the block was dropped meanwhile,
what it copied does not count. So reading a block that is there takes no message and no lock.
"""

from __future__ import annotations

import heapq
import math
import mmap
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from forebay.caching.blocks import Blocks
from forebay.caching.columns import Index, Spec, schema_of
from forebay.caching.layout import names_of
from forebay.caching.link import IN_MEMORY, Link, LinkBrokenError, Place, place_of
from forebay.caching.reader import Bytes, Getter, getter_of, refuse_compressed
from forebay.errors import ForebayError, InputError, shown_location
from forebay.memory.layout import Slot
from forebay.memory.slab import Slab
from forebay.observe.progress import log
from forebay.observe.record import Fetched
from forebay.windows import InOrder, Window, Windows

# A block is fetched whole if so large a share of it is read at once, if it is read in order, or if
# it is so small that its parts would be no less.
WHOLE_SHARE, SMALL_BYTES = 0.25, 64 << 10
# Blocks that are kept for the next call, and decoded ones that a process remembers.
HELD, DECODED, HEADS = 8, 4096, 4096
# Bytes at the beginning of a block that have Arrow's metadata, usually.
HEAD_BYTES = 4096
# Parts of a block that are so near to each other are one part.
GAP_BYTES = 16 << 10
# How often a fetcher may end before a reader gives up.
MOST_ENDS = 5
# What is fetched ahead of a loader that reads in order, and in how many epochs at a time.
AHEAD_BYTES, MOST_EPOCHS = 256 << 20, 64

Part = tuple[int, int, int]  # shard, offset, length


class _Block(NamedTuple):
    """A block that is decoded.

    Attributes:
        entry: What the table had when it was decoded.
    """

    entry: int
    getters: list[Getter]


class Shared:
    """What the fetcher shares with this process: the index, the table, and the memory of blocks."""

    def __init__(self, link: Link, place: Place) -> None:
        """Map it, and close the descriptors."""
        index, blocks, table, memory, *disk = link.descriptors
        where = shown_location(place.url)
        self.id = link.facts["id"]
        self.index = Index.from_json(_mapped(index).data, where)
        self.blocks = self.index.blocks_in(_mapped(blocks).data, where)
        self.table = _mapped(table).view(np.uint64)
        self._slab = Slab.attach(memory, link.facts["extent"])
        # Writable, since torch warns of what is not. It is only read.
        is_disk = bool(disk) and os.fstat(disk[0]).st_size > 0
        self._disk = _mapped(disk[0], mmap.ACCESS_WRITE) if is_disk else None
        for descriptor in (index, blocks, table, *disk):
            os.close(descriptor)
        names = names_of(self.index.plan.structure)
        kinds = {id(specs): specs for specs in self.index.specs}  # shards share few
        schemas = {kind: schema_of(names, specs) for kind, specs in kinds.items()}
        self.schemas = [schemas[id(specs)] for specs in self.index.specs]

    def bytes_of(self, block: int, entry: int) -> Bytes:
        """Return the memory of a block, which may be another's by now."""
        kind, offset = place_of(entry)
        length = int(self.blocks.length[block])
        if kind == IN_MEMORY:
            return np.frombuffer(self._slab.view(Slot(offset, length)), np.uint8)
        assert self._disk is not None
        return self._disk[offset : offset + length]


class BucketReader:
    """The samples of a cache in a bucket. Pickled as the place of the cache."""

    owns = True  # what is read owns its memory

    def __init__(self, place: Place) -> None:
        self.place = place
        self._begin()

    @property
    def location(self) -> str:
        """The URL of the cache."""
        return self.place.url

    def _begin(self) -> None:
        """Start without connections: in a new process, too."""
        self._process = os.getpid()
        self._shared: Shared | None = None
        self._local = threading.local()
        self._decoded: OrderedDict[int, _Block] = OrderedDict()
        self._heads: OrderedDict[int, bytes] = OrderedDict()

    def __reduce__(self) -> Any:
        return BucketReader, (self.place,)

    # ---- connection ----------------------------------------------------------------------------

    def link(self) -> Link:
        """Return this thread's connection to the fetcher."""
        if os.getpid() != self._process:
            self._begin()
        found: Link | None = getattr(self._local, "link", None)
        if found is None:
            found = self._local.link = Link(self.place)
            self._local.held, self._local.next = OrderedDict(), -1
            if self._shared is None or self._shared.id != found.facts["id"]:
                self._shared = Shared(found, self.place)
                self._decoded.clear()
                if (kept := found.facts["disk"]) != self.place.disk:
                    log.warning(
                        "%s: another program of this node reads it with disk=%r, which holds until "
                        "that one ends, instead of disk=%r",
                        *(shown_location(self.place.url), kept, self.place.disk),
                    )
            else:
                for descriptor in found.descriptors:
                    os.close(descriptor)
        return found

    def forget_link(self) -> None:
        """Close this thread's connection; the next call makes another."""
        if (found := getattr(self._local, "link", None)) is not None:
            found.close()
            self._local.link = None

    def tried(self, call: Callable[[], Any]) -> Any:
        """Return what a call returns that uses the connection; again if the fetcher ended."""
        for _ in range(MOST_ENDS):
            try:
                return call()
            except LinkBrokenError as error:
                broken = error
                self.forget_link()
        raise InputError(
            f"{shown_location(self.place.url)}: the process that fetches its blocks ended "
            f"{MOST_ENDS} times: {broken}\n"
            "  It may have been killed for its memory; what it printed is on stderr. Nothing is "
            "lost: make the same call again."
        ) from broken

    @property
    def shared(self) -> Shared:
        """What the fetcher shares."""
        if self._shared is None or os.getpid() != self._process:
            self.tried(self.link)
        assert self._shared is not None
        return self._shared

    @property
    def blocks(self) -> Blocks:
        """Where the blocks are."""
        return self.shared.blocks

    # ---- samples -------------------------------------------------------------------------------

    def leaves(self, position: int) -> list[Any]:
        """Return the leaves of a sample; they own their memory."""
        return self.many((position,))[0]

    def many(self, positions: Sequence[int]) -> list[list[Any]]:
        """Return the leaves of each sample."""
        found: list[Any] = [None] * len(positions)
        left = self._by_block(positions)
        self.tried(lambda: self._read_all(left, found))
        return found

    def _by_block(self, positions: Sequence[int]) -> dict[int, list[tuple[int, int]]]:
        """Return for each block the rows that are read, and where each goes."""
        first = self.blocks.first
        numbers = np.searchsorted(first, positions, "right") - 1
        by_block: dict[int, list[tuple[int, int]]] = {}
        for at, (position, block) in enumerate(zip(positions, numbers.tolist(), strict=True)):
            by_block.setdefault(block, []).append((position - int(first[block]), at))
        return by_block

    def _read_all(self, left: dict[int, list[tuple[int, int]]], found: list[Any]) -> None:
        """Read rows; a block is removed from `left` once its rows are read."""
        link = self.link()
        self._read_here(left, found)
        while left:  # again for what was dropped while it was read
            whole = [block for block, rows in left.items() if self._is_whole(block, rows)]
            answer, _ = link.ask("need", blocks=[*left], whole=whole)
            held = self._local.held
            for block in answer["blocks"]:
                held[block] = held.pop(block, 0) + 1
            parted = {block: rows for block, rows in left.items() if block not in held}
            self._read_here(left, found)
            released = []
            while len(held) > HELD:
                block, count = held.popitem(last=False)
                released += [block] * count
            if released:
                link.post("release", blocks=released)
            if parted := {block: rows for block, rows in parted.items() if block in left}:
                self._read_parts(link, parted, found)
                for block in parted:
                    del left[block]

    def _is_whole(self, block: int, rows: list[tuple[int, int]]) -> bool:
        first, last = min(rows)[0], max(rows)[0]
        start = int(self.blocks.first[block])
        is_next, self._local.next = start + first == self._local.next, start + last + 1
        is_small = int(self.blocks.length[block]) <= SMALL_BYTES
        return is_next or is_small or len(rows) >= WHOLE_SHARE * self.blocks.rows(block)

    def _read_here(self, left: dict[int, list[tuple[int, int]]], found: list[Any]) -> None:
        """Read the rows of blocks that are there."""
        shared = self.shared
        for block in [*left]:
            entry = int(shared.table[block])
            if not entry:
                continue
            known = self._decoded.get(block)
            with suppress(*_TORN):  # what was there may have been overwritten
                if known is None or known.entry != entry:
                    known = _Block(entry, self._getters(block, shared.bytes_of(block, entry)))
                    self._decoded[block] = known
                    while len(self._decoded) > DECODED:
                        self._decoded.popitem(last=False)
                for row, at in left[block]:
                    found[at] = [_own(get(row)) for get in known.getters]
            if int(shared.table[block]) == entry:
                if any(found[at] is None for _, at in left[block]):
                    raise self._damaged(block)
                del left[block]
            else:
                for _, at in left[block]:
                    found[at] = None

    def _getters(self, block: int, whole: Bytes) -> list[Getter]:
        shard = self._shard_of(block)
        batch = _batch(whole, self.shared.schemas[shard])
        if batch.num_rows != self.blocks.rows(block):
            raise ValueError(f"{batch.num_rows} rows")
        specs = self.shared.index.specs[shard]
        return [getter_of(*each, whole) for each in zip(specs, batch.columns, strict=True)]

    def _shard_of(self, block: int) -> int:
        return int(self.blocks.first[block]) // self.shared.index.plan.per_shard

    def _damaged(self, block: int) -> InputError:
        return InputError(
            f"{shown_location(self.place.url)}: block {block:,} cannot be read as a block of this "
            "cache\n"
            "  Its checksum is that of the index, so it was written like this. Call forebay.cache "
            "with resume=False."
        )

    # ---- parts ---------------------------------------------------------------------------------
    # Of a block of which few rows are read, only what these rows need is fetched: Arrow's metadata,
    # which says where the columns are; then offsets; then values. They are put where they belong
    # in a buffer of zeros as large as the block, which costs no memory where nothing is written.

    def _read_parts(
        self, link: Link, wanted: dict[int, list[tuple[int, int]]], found: list[Any]
    ) -> None:
        buffers = {block: np.zeros(self.blocks.length[block], np.uint8) for block in wanted}
        heads: dict[int, list[tuple[int, int]]] = {}
        for block, buffer in buffers.items():
            if (head := self._heads.get(block)) is None:
                heads[block] = [(0, min(HEAD_BYTES, len(buffer)))]
            else:
                buffer[: len(head)] = np.frombuffer(head, np.uint8)
        self._fill(link, buffers, heads)
        longer = {
            block: [(0, size)]
            for block, buffer in buffers.items()
            if (size := _head_bytes(buffer)) > HEAD_BYTES and block in heads
        }
        self._fill(link, buffers, longer)
        for block in heads:
            self._heads[block] = buffers[block][: _head_bytes(buffers[block])].tobytes()
            while len(self._heads) > HEADS:
                self._heads.popitem(last=False)
        columns = {}
        for block, buffer in buffers.items():
            shard = self._shard_of(block)
            try:
                batch = _batch(buffer, self.shared.schemas[shard])
            except _TORN as error:
                raise self._damaged(block) from error
            columns[block] = [*zip(self.shared.index.specs[shard], batch.columns, strict=True)]
        for spans in (_offsets, _values):
            parts = {
                block: [
                    span
                    for row, _ in rows
                    for spec, column in columns[block]
                    for span in spans(spec, column, row, buffers[block])
                ]
                for block, rows in wanted.items()
            }
            self._fill(link, buffers, parts)
        for block, rows in wanted.items():
            getters = [getter_of(*each, buffers[block]) for each in columns[block]]
            for row, at in rows:
                found[at] = [_own(get(row)) for get in getters]

    def _fill(
        self, link: Link, buffers: dict[int, Bytes], spans: dict[int, list[tuple[int, int]]]
    ) -> None:
        """Fetch parts of blocks into buffers."""
        places = [
            (block, *span) for block, some in spans.items() for span in _joined(some) if span[1]
        ]
        if not places:
            return
        for block, start, nbytes in places:
            if not 0 <= start <= len(buffers[block]) - nbytes:
                raise self._damaged(block)
        offset = self.blocks.offset
        parts: list[Part] = [
            (self._shard_of(block), int(offset[block]) + start, nbytes)
            for block, start, nbytes in places
        ]
        _, data = link.ask("parts", parts=parts)
        at = 0
        for block, start, nbytes in places:
            buffers[block][start : start + nbytes] = np.frombuffer(data, np.uint8, nbytes, at)
            at += nbytes


# ---- lookahead -----------------------------------------------------------------------------------


class _Sent(NamedTuple):
    """A window of which the fetcher knows."""

    number: int
    epoch: int  # counted by the lookahead
    due: int
    blocks: list[int]
    nbytes: int


class Lookahead:
    """Tells the fetcher which blocks a loader needs, before it needs them, and which no more.

    Nothing depends on it but how long reading takes. For one thread at a time.

    Args:
        order: How samples are read.
        lanes: The lanes that this loader reads.
        window: Bytes of the windows of all lanes; None for a few blocks.
        fetched: Where to note what the fetcher says of itself.
    """

    def __init__(
        self,
        reader: BucketReader,
        order: Windows | InOrder,
        lanes: range,
        window: int | None,
        fetched: Fetched,
    ) -> None:
        self._fetched = fetched
        fetched.total = int(reader.blocks.length.sum(dtype=np.int64))
        self._reader, self._order, self._lanes = reader, order, lanes
        share = len(lanes) / order.lanes
        self._room = int(2 * share * window) if window and share else AHEAD_BYTES
        self._link: Link | None = None
        self._seed: int | None = None  # of the windows that were sent
        self._begin()

    def _begin(self) -> None:
        self._epochs: deque[int] = deque()  # those of which windows are sent, in order
        self._coming: Iterator[Window] = iter(())
        self._sent: dict[int, _Sent] = {}
        self._ends: list[tuple[int, int, int]] = []  # epoch, last batch and number of each
        self._count = self._nbytes = self._number = 0

    def reached(self, seed: int, epoch: int, sample: int) -> None:
        """Note that a loader has made all batches before a sample of an epoch."""
        batch = sample // self._order.batch
        if seed != self._seed or epoch not in self._epochs:
            self._leave()
            self._begin()
            self._seed = seed
            self._open(epoch, batch)
        ended: list[int] = []
        while self._epochs[0] != epoch:
            self._epochs.popleft()
            self._count += 1
        while self._ends and self._ends[0][:2] < (self._count, batch):
            number = heapq.heappop(self._ends)[2]
            self._nbytes -= self._sent.pop(number).nbytes
            ended.append(number)
        self._tell(ended)

    def _open(self, epoch: int, batch: int) -> None:
        self._epochs.append(epoch)
        assert self._seed is not None
        self._coming = self._order.windows(self._seed, epoch, self._lanes, batch)

    def _next(self) -> Iterator[_Sent]:
        """Yield the windows to send now: the first are fetched while the next ones are found."""
        lengths = self._reader.blocks.length
        while self._nbytes < 2 * self._room and len(self._epochs) < MOST_EPOCHS:
            window = next(self._coming, None)
            if window is None:
                self._open(self._epochs[-1] + 1, 0)
                continue
            self._number += 1
            nbytes = int(lengths[window.blocks].sum(dtype=np.int64))
            epoch = self._count + len(self._epochs) - 1
            new = _Sent(self._number, epoch, window.due, window.blocks.tolist(), nbytes)
            self._nbytes += nbytes
            self._sent[self._number] = new
            heapq.heappush(self._ends, (epoch, window.until, self._number))
            yield new

    def _tell(self, ended: list[int]) -> None:
        """Send windows, and read what the fetcher says of itself."""
        try:
            if self._link is None:
                self._link = Link(self._reader.place)
                for descriptor in self._link.descriptors:
                    os.close(descriptor)
                self._link.post("room", bytes=self._room)
                ended = []
                for each in self._sent.values():
                    _send(self._link, each)
            for each in self._next():
                _send(self._link, each)
            if ended:
                self._link.post("ended", numbers=ended)
            for name, value in (self._link.heard() or {}).items():
                if name in Fetched.__slots__:
                    setattr(self._fetched, name, value)
        except (LinkBrokenError, ForebayError):  # a reader says what is wrong
            self._leave()

    def _leave(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def close(self) -> None:
        """Let the fetcher forget all windows."""
        self._leave()
        self._seed = None


def _send(link: Link, window: _Sent) -> None:
    link.post(
        "window",
        number=window.number,
        epoch=window.epoch,
        due=window.due,
        blocks=window.blocks,
    )


def _mapped(descriptor: int, access: int = mmap.ACCESS_READ) -> Bytes:
    return np.frombuffer(mmap.mmap(descriptor, 0, access=access), np.uint8)


def _own(leaf: Any) -> Any:
    """Return a leaf that does not view a block."""
    if isinstance(leaf, torch.Tensor):
        return leaf.clone()
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


# Exceptions of NumPy and Arrow for bytes that are not those of a block.
_TORN = (
    *(RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError),
    *(pa.ArrowException, UnicodeError, OSError),
)


def _batch(whole: Bytes, schema: pa.Schema) -> pa.RecordBatch:
    refuse_compressed(whole.data)
    return pa.ipc.read_record_batch(pa.py_buffer(whole), schema)


def _head_bytes(buffer: Bytes) -> int:
    """Return how many bytes Arrow's metadata has, with its length before it."""
    return 8 + int(buffer[4:8].view("<i4")[0])


def _joined(spans: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield spans of bytes, each as start and length; those near to each other as one."""
    start = end = 0
    for begin, nbytes in sorted(spans):
        if begin > end + GAP_BYTES and end > start:
            yield start, end - start
            start = end = begin
        start = begin if end == start else start
        end = max(end, begin + nbytes)
    if end > start:
        yield start, end - start


def _offsets(spec: Spec, column: pa.Array, row: int, whole: Bytes) -> Iterator[tuple[int, int]]:
    """Yield where the bytes are that say whether a row has a value and where it is."""
    storage = column.storage if isinstance(column, pa.ExtensionArray) else column
    base = whole.ctypes.data
    if spec.kind == "none":
        return
    if (bits := storage.buffers()[0]) is not None:
        yield bits.address - base + row // 8, 1
    if spec.kind in ("str", "bytes"):
        yield storage.buffers()[1].address - base + 8 * row, 16
    elif spec.shape is None:
        yield storage.field("data").buffers()[1].address - base + 8 * row, 16
        yield storage.field("shape").buffers()[1].address - base + 4 * row, 8


def _values(spec: Spec, column: pa.Array, row: int, whole: Bytes) -> Iterator[tuple[int, int]]:
    """Yield where the bytes of a row's value are, once its offsets are there."""
    storage = column.storage if isinstance(column, pa.ExtensionArray) else column
    base = whole.ctypes.data

    def values(ends: pa.Buffer, data: pa.Buffer | None, form: str, each: int) -> tuple[int, int]:
        size = np.dtype(form).itemsize
        at = ends.address - base + size * row
        begin, end = whole[at : at + 2 * size].view(form).tolist()
        if data is None or end == begin:
            return 0, 0
        return data.address - base + begin * each, (end - begin) * each

    if spec.kind == "none":
        return
    if spec.kind in ("str", "bytes"):
        _, ends, data = storage.buffers()
        yield values(ends, data, "<i8", 1)
    elif spec.shape is None:
        lists, shapes = storage.field("data"), storage.field("shape")
        yield values(lists.buffers()[1], lists.values.buffers()[1], "<i8", spec.stored[0].itemsize)
        yield values(shapes.buffers()[1], shapes.values.buffers()[1], "<i4", 8)
    elif (flat := storage.buffers()[-1]) is not None:
        start = flat.address - base
        if spec.kind == "bool":
            yield start + row // 8, 1
            return
        dtype, each = spec.stored
        width = math.prod((*spec.shape, *each)) * dtype.itemsize
        yield start + row * width, width
