"""Read samples of a cache in a bucket: from blocks that the fetcher has, or has to fetch.

    position ──> block ── in the table ──> map of memory or disk ──> leaves, copied
                   └── not there ──> ask the fetcher: for the block, or for the parts of some rows

A reader looks into the table and copies; then it looks again. If the block was dropped meanwhile,
what it copied does not count. So reading a block that is there takes no message and no lock.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import product
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import types

from forebay.base.arrow_messages import read_message
from forebay.base.value_classes import Classes
from forebay.base.value_readers import Bytes, Getter, getter_of, own
from forebay.base.value_types import Spec, schema_of
from forebay.caching.fetcher_process import FetcherProcess, Place
from forebay.caching.index import Index
from forebay.caching.layout import Blocks
from forebay.caching.link import Link, LinkBrokenError, offset_of
from forebay.caching.structure import rebuilder
from forebay.errors import InputError, shown_location
from forebay.memory.layout import Slot
from forebay.memory.slab import Slab

# A block is fetched whole if so large a share of it is read at once, if it is read in order, if it
# is compressed, or if it is so small that its parts would be no less.
WHOLE_SHARE, SMALL_BYTES = 0.25, 64 << 10
# Blocks that are kept for the next call, and decoded ones that a process remembers.
HELD, DECODED, HEADS = 8, 4096, 4096
# Bytes at the beginning of a block that have Arrow's metadata, usually.
HEAD_BYTES = 4096
# Parts of a block that are so near to each other are one part.
GAP_BYTES = 16 << 10
# How often a fetcher may end before a reader gives up.
MOST_ENDS = 5

Span = tuple[int, int, int]  # block, first byte in it, number of bytes


class Shared:
    """What the fetcher shares with this process: the index, the table, and the memory of blocks."""

    def __init__(self, link: Link, place: Place) -> None:
        """Map it, and close the descriptors."""
        index, blocks, table, memory = link.descriptors
        where = shown_location(place.url)
        self.id = link.facts["id"]
        self.index = Index.from_json(_mapped(index).data, where)
        self.blocks = self.index.blocks_in(_mapped(blocks).data, where)
        self.table = _mapped(table).view(np.uint64)
        self._slab = Slab.attach(memory, link.facts["extent"])
        for descriptor in (index, blocks, table):
            os.close(descriptor)
        known = {id(layout): layout for layout in self.index.layouts}  # shards share few
        schemas = {at: schema_of(each.names, each.specs) for at, each in known.items()}
        self.schemas = [schemas[id(layout)] for layout in self.index.layouts]

    def bytes_of(self, block: int, entry: int) -> Bytes:
        """Return the memory of a block, which may be another's by now."""
        slot = Slot(offset_of(entry), int(self.blocks.nbytes[block]))
        return np.frombuffer(self._slab.view(slot), np.uint8)


class BucketReader:
    """The samples of a cache in a bucket. Pickled as the place of the cache, and its fetcher."""

    def __init__(self, place: Place, process: FetcherProcess | None = None) -> None:
        self.place = place
        self.process = process or FetcherProcess.of(place)
        self.classes: Classes = {}
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
        # Of decoded blocks, what the table had then.
        self._decoded: OrderedDict[int, tuple[int, list[Getter]]] = OrderedDict()
        self._heads: OrderedDict[int, bytes] = OrderedDict()
        self._rebuilders: dict[int, Callable[[Iterator[Any]], Any]] = {}

    def __reduce__(self) -> Any:
        return BucketReader, (self.place, self.process)

    # ---- connection ----------------------------------------------------------------------------

    def link(self) -> Link:
        """Return this thread's connection to the fetcher."""
        if os.getpid() != self._process:
            self._begin()
        found: Link | None = getattr(self._local, "link", None)
        if found is None:
            found = self._local.link = Link(self.process)
            self._local.held, self._local.next = [], -1
            if self._shared is None or self._shared.id != found.facts["id"]:
                self._shared = Shared(found, self.place)
                self._decoded.clear()
                self._rebuilders.clear()
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
            "  It may have been killed for its memory, or have no open files left (ulimit -n); it "
            "prints why to stderr. Make the same call again."
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

    def sample(self, position: int, *, is_copy: bool = True) -> Any:
        """Return a sample, which is always a copy."""
        return self.samples((position,))[0]

    def samples(self, positions: Sequence[int], *, are_copies: bool = True) -> list[Any]:
        """Return samples, which are always copies."""
        found: list[Any] = [None] * len(positions)
        left = self._by_block(positions)
        self.tried(lambda: self._read_all(left, found))
        per_shard = self.shared.index.plan.per_shard
        pairs = zip(positions, found, strict=True)
        return [self._rebuilder(at // per_shard)(iter(leaves)) for at, leaves in pairs]

    def _rebuilder(self, shard: int) -> Callable[[Iterator[Any]], Any]:
        """Return the function that makes samples of a shard of their leaves."""
        layout = self.shared.index.layouts[shard]
        if (known := self._rebuilders.get(id(layout))) is None:
            known = self._rebuilders[id(layout)] = rebuilder(layout.structure, self.classes)
        return known

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
            held: list[int] = self._local.held
            comes = link.ask("need", blocks=[*left], whole=whole)[0]["blocks"]
            held += comes
            parted = {block: left[block] for block in left.keys() - comes}
            self._read_here(left, found)
            if released := held[:-HELD]:
                del held[:-HELD]
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
        is_compressed = self.shared.index.plan.compression is not None
        return (
            is_next
            or is_small
            or is_compressed
            or len(rows) >= WHOLE_SHARE * self.blocks.rows(block)
        )

    def _read_here(self, left: dict[int, list[tuple[int, int]]], found: list[Any]) -> None:
        """Read the rows of blocks that are there."""
        shared = self.shared
        for block in [*left]:
            entry = int(shared.table[block])
            if not entry:
                continue
            known = self._decoded.get(block)
            with suppress(*_TORN):  # what was there may have been overwritten
                if known is None or known[0] != entry:
                    whole = shared.bytes_of(block, entry)
                    columns = self._columns(block, whole)
                    known = entry, [getter_of(*each, whole, self.classes) for each in columns]
                    self._decoded[block] = known
                    while len(self._decoded) > DECODED:
                        self._decoded.popitem(last=False)
                for row, at in left[block]:
                    found[at] = [own(get(row)) for get in known[1]]
            if int(shared.table[block]) == entry:
                if any(found[at] is None for _, at in left[block]):
                    raise self._damaged(block)
                del left[block]
            else:
                for _, at in left[block]:
                    found[at] = None

    def _columns(self, block: int, whole: Bytes) -> list[tuple[Spec, pa.Array]]:
        """Return the columns of a block of which the head is there, and their types."""
        shard = self._shard_of(block)
        if read_message(whole.data).is_compressed:  # the fetcher would have decompressed it
            raise ValueError("its columns are compressed, and the index says that they are not")
        batch = pa.ipc.read_record_batch(pa.py_buffer(whole), self.shared.schemas[shard])
        if batch.num_rows != self.blocks.rows(block):
            raise ValueError(f"{batch.num_rows} rows")
        specs = self.shared.index.layouts[shard].specs
        return [*zip(specs, batch.columns, strict=True)]

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
        new = [block for block in wanted if block not in self._heads]
        for block in wanted.keys() - new:
            head = self._heads[block]
            buffers[block][: len(head)] = np.frombuffer(head, np.uint8)
        self._fill(link, buffers, {(each, 0, min(HEAD_BYTES, len(buffers[each]))) for each in new})
        sizes = {block: _head_bytes(buffers[block]) for block in new}
        longer = {(block, 0, size) for block, size in sizes.items() if size > HEAD_BYTES}
        self._fill(link, buffers, longer)
        for block, size in sizes.items():
            self._heads[block] = buffers[block][:size].tobytes()
            while len(self._heads) > HEADS:
                self._heads.popitem(last=False)
        columns = {}
        for block, buffer in buffers.items():
            with self._decoding(block):
                columns[block] = self._columns(block, buffer)
        there: set[Span] = set()
        while True:  # what has a fixed place, and offsets; then what these say, at each depth
            spans: set[Span] = set()
            for block, rows in wanted.items():
                with self._decoding(block):
                    for (row, _), (_, column) in product(rows, columns[block]):
                        found_spans = _spans(column, range(row, row + 1), buffers[block])
                        spans.update((block, *span) for span in found_spans)
            if spans <= there:
                break
            self._fill(link, buffers, spans - there)
            there = spans
        for block, rows in wanted.items():
            with self._decoding(block):
                getters = [
                    getter_of(*each, buffers[block], self.classes) for each in columns[block]
                ]
                for row, at in rows:
                    found[at] = [own(get(row)) for get in getters]

    @contextmanager
    def _decoding(self, block: int) -> Iterator[None]:
        try:
            yield
        except _TORN as error:
            raise self._damaged(block) from error

    def _fill(self, link: Link, buffers: dict[int, Bytes], spans: set[Span]) -> None:
        """Fetch parts of blocks into buffers."""
        joined = _joined(spans)
        for block, start, nbytes in joined:
            if not 0 <= start <= len(buffers[block]) - nbytes:
                raise self._damaged(block)
        if not joined:
            return
        parts = [  # shard, offset, length
            (self._shard_of(block), int(self.blocks.offset[block]) + start, nbytes)
            for block, start, nbytes in joined
        ]
        _, data = link.ask("parts", parts=parts)
        at = 0
        for block, start, nbytes in joined:
            buffers[block][start : start + nbytes] = np.frombuffer(data, np.uint8, nbytes, at)
            at += nbytes


def _mapped(descriptor: int) -> Bytes:
    return np.frombuffer(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ), np.uint8)


# Exceptions of NumPy and Arrow for bytes that are not those of a block.
_TORN = (
    *(RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError),
    *(pa.ArrowException, UnicodeError, OSError),
)


def _head_bytes(buffer: Bytes) -> int:
    """Return how many bytes Arrow's metadata has, with its length before it."""
    return 8 + int(buffer[4:8].view("<i4")[0])


def _joined(spans: set[Span]) -> list[Span]:
    """Return spans in order; those near to each other as one."""
    joined: list[Span] = []
    for block, start, nbytes in sorted(spans):
        before, first, length = joined[-1] if joined else (-1, 0, 0)
        if block == before and start <= first + length + GAP_BYTES:
            joined[-1] = block, first, max(length, start + nbytes - first)
        else:
            joined.append((block, start, nbytes))
    return joined


def _spans(array: pa.Array, rows: range, whole: Bytes) -> Iterator[tuple[int, int]]:
    """Yield where the bytes of some rows are; if they vary, once their offsets are there."""
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    kind, count = array.type, len(rows)
    if not count or types.is_null(kind):
        return
    bits, *others = array.buffers()

    def start_of(buffer: pa.Buffer) -> int:
        return int(buffer.address) - int(whole.ctypes.data)

    if bits is not None:
        yield start_of(bits) + rows.start // 8, (rows.stop - 1) // 8 - rows.start // 8 + 1
    if types.is_struct(kind):
        for at in range(kind.num_fields):
            yield from _spans(array.field(at), rows, whole)
    elif types.is_fixed_size_list(kind):
        each = kind.list_size
        yield from _spans(array.values, range(rows.start * each, rows.stop * each), whole)
    elif types.is_boolean(kind):
        if others[0] is not None:
            yield start_of(others[0]) + rows.start // 8, (rows.stop - 1) // 8 - rows.start // 8 + 1
    elif types.is_primitive(kind):
        if others[0] is not None:
            width = kind.bit_width // 8
            yield start_of(others[0]) + rows.start * width, count * width
    elif others[0] is not None:
        form = "<i4" if types.is_list(kind) else "<i8"
        size = np.dtype(form).itemsize
        at = start_of(others[0]) + size * rows.start
        yield at, (count + 1) * size
        ends = whole[at : at + (count + 1) * size].view(form)
        inner = range(int(ends[0]), int(ends[-1]))
        if types.is_list(kind) or types.is_large_list(kind):
            yield from _spans(array.values, inner, whole)
        elif inner and others[1] is not None:
            yield start_of(others[1]) + inner.start, len(inner)
