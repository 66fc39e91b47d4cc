"""Read samples of a cache in a bucket: blocks are record batches of Arrow."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any, cast

import numpy as np
import pyarrow as pa
from pyarrow import types

from forebay.base.value_classes import Classes
from forebay.base.value_readers import Bytes, getter_of, own
from forebay.base.value_types import Spec, schema_of
from forebay.caching.arrow_messages import check_compression
from forebay.caching.bucket_reader import TORN, BucketReader, Shared, Span
from forebay.caching.fetcher_process import FetcherProcess, Place
from forebay.caching.index import Index, Layout
from forebay.caching.layout import Blocks
from forebay.caching.link import Link
from forebay.caching.structure import rebuilder
from forebay.errors import InputError, shown_location

# Beginnings of blocks that a process remembers.
HEADS = 4096
# Bytes at the beginning of a block that have Arrow's metadata, usually.
HEAD_BYTES = 4096


class SharedCache(Shared):
    """What the fetcher of a cache shares: the index, too."""

    def __init__(self, link: Link, place: Place) -> None:
        """Map it, and close the descriptors."""
        super().__init__(link)
        where = shown_location(place.url)
        index, blocks = self.others
        self.index = Index.from_json(index.data, where)
        self.blocks = self.index.blocks_in(blocks.data, where)
        known = {id(layout): layout for layout in self.index.layouts}  # shards share few
        schemas = {at: schema_of(each.names, each.specs) for at, each in known.items()}
        self.schemas = [schemas[id(layout)] for layout in self.index.layouts]


class CacheReader(BucketReader):
    """The samples of a cache in a bucket."""

    def __init__(self, place: Place, process: FetcherProcess | None = None) -> None:
        self.classes: Classes = {}
        super().__init__(place, process)

    def _begin(self) -> None:
        super()._begin()
        self._heads: OrderedDict[int, bytes] = OrderedDict()
        self._rebuilders: dict[int, Callable[[Iterator[Any]], Any]] = {}

    def _share(self, link: Link) -> Shared:
        self._rebuilders.clear()
        return SharedCache(link, self.place)

    @property
    def _cache(self) -> SharedCache:
        return cast("SharedCache", self.shared)

    @property
    def index(self) -> Index:
        """The index of the cache."""
        return self._cache.index

    @property
    def blocks(self) -> Blocks:
        """Where the blocks are."""
        return self._cache.blocks

    def samples(self, positions: Sequence[int], *, are_copies: bool = True) -> list[Any]:
        """Return samples, which are always copies."""
        found = super().samples(positions)
        index = self._cache.index  # once: it looks which process this is
        per_shard, layouts = index.plan.per_shard, index.layouts
        pairs = zip(positions, found, strict=True)
        return [self._rebuilder(layouts[at // per_shard])(iter(leaves)) for at, leaves in pairs]

    def _rebuilder(self, layout: Layout) -> Callable[[Iterator[Any]], Any]:
        """Return the function that makes samples of shards with a layout of their leaves."""
        if (known := self._rebuilders.get(id(layout))) is None:
            known = self._rebuilders[id(layout)] = rebuilder(layout.structure, self.classes)
        return known

    def _decode(self, block: int, whole: Bytes) -> Callable[[Sequence[int]], list[Any]]:
        columns = self._columns(block, whole)
        getters = [getter_of(*each, whole, self.classes) for each in columns]
        return lambda rows: [[own(get(row)) for get in getters] for row in rows]

    def _columns(self, block: int, whole: Bytes) -> list[tuple[Spec, pa.Array]]:
        """Return the columns of a block of which the head is there, and their types."""
        shard = self._shard_of(block)
        check_compression(whole.data, is_compressed=False)  # the fetcher has decompressed it
        batch = pa.ipc.read_record_batch(pa.py_buffer(whole), self._cache.schemas[shard])
        if batch.num_rows != self.blocks.rows(block):
            raise ValueError(f"{batch.num_rows} rows")
        specs = self._cache.index.layouts[shard].specs
        return [*zip(specs, batch.columns, strict=True)]

    def _shard_of(self, block: int) -> int:
        return int(self.blocks.first[block]) // self._cache.index.plan.per_shard

    def _has_parts(self, block: int) -> bool:
        return self.index.plan.compression is None

    def _place_of(self, block: int) -> tuple[int, int]:
        return self._shard_of(block), int(self.blocks.offset[block])

    def _damaged(self, block: int) -> InputError:
        return InputError(
            f"{shown_location(self.place.url)}: block {block:,} cannot be read as a block of this "
            "cache\n"
            "  Its checksum is that of the index, so it was written like this. Call forebay.cache "
            "with redo='*'."
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
        except TORN as error:
            raise self._damaged(block) from error


def _head_bytes(buffer: Bytes) -> int:
    """Return how many bytes Arrow's metadata has, with its length before it."""
    return 8 + int(buffer[4:8].view("<i4")[0])


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
