"""The index of shards: where the blocks of each are. One Arrow file, which is mapped.

Its only row has a list for each of `_LISTS`: of shards, blocks, stretches or samples. Whoever reads
may share its pages with others, so a hundred million samples cost little memory. It may be
anybody's: before any number is used, or memory taken for it, it is compared with the sizes of the
shards; and nothing in it is run.
"""

from __future__ import annotations

import itertools
import json
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from forebay.base.origins import Origin
from forebay.caching.arrow_messages import record_batches
from forebay.caching.layout import DAMAGES, MOST_SHARD_BYTES
from forebay.errors import InputError, shortened, shown_location
from forebay.shards.format import FoundBlocks, most_rows
from forebay.shards.location import CODECS, Listed

_FORMAT = 3
_KEY = b"forebay"  # in the schema: what is said below in `of`
UNKNOWN = -1  # the checksum of a block of which no byte was read
CODEC_NAMES = ("", *sorted({*CODECS.values()}))
# What is stored, and as what. Each `*_ends` says where the parts of another list end.
_INT, _SMALL, _BYTES = pa.int64(), pa.int32(), pa.large_binary()
_LISTS = {
    "sizes": _INT,  # of shards
    "formats": _SMALL,
    "codecs": _SMALL,
    "infos": _SMALL,  # the number of what their formats need
    "names": _BYTES,
    "tags": _BYTES,
    "info": _BYTES,
    "block_ends": _INT,
    "first": _INT,  # of blocks: their first samples
    "nbytes": _INT,  # about what they take in memory
    "crc32": _INT,
    "starts_at": _INT,  # where in `starts` their samples are, or -1
    "extent_ends": _INT,
    "offset": _INT,  # of stretches
    "length": _INT,
    "starts": _INT,  # of samples, in their block; of 32 bits where they fit
}


class IndexedShard(NamedTuple):
    """What is known of a shard.

    Attributes:
        codec: How it is compressed as a whole; "" if it is not.
        crc32: Of each block's bytes, as they are in the shard; None if they were not read.
    """

    listed: Listed
    form: str
    codec: str
    found: FoundBlocks
    crc32: npt.NDArray[np.int64] | None


@dataclass(eq=False)
class ShardIndex:
    """An index, over the bytes of its file.

    Attributes:
        identity: A hash of all of it.
        forms: The names of the formats of its shards.
        samples: How many there are.
    """

    data: memoryview
    identity: str
    forms: tuple[str, ...]
    samples: int
    _row: pa.RecordBatch

    @classmethod
    def of(cls, shards: Iterable[IndexedShard]) -> ShardIndex:
        """Return the index of some shards, in this order."""
        known: dict[str, Any] = {name: [] for name in _LISTS}
        forms, infos = dict[str, int](), dict[bytes, int]()
        first, blocks, extents, starts = 0, 0, 0, 0
        for each in shards:
            found = each.found
            rows, ends = found.rows, np.cumsum(found.rows)
            counts = np.bincount(found.extents[:, 0], minlength=len(rows))
            fetched = np.bincount(found.extents[:, 0], found.extents[:, 2], len(rows))
            known["sizes"].append([each.listed.size])
            known["formats"].append([forms.setdefault(each.form, len(forms))])
            known["codecs"].append([CODEC_NAMES.index(each.codec)])
            known["infos"].append([infos.setdefault(found.info, len(infos))])
            known["names"].append(each.listed.name.encode("utf-8", "surrogateescape"))
            known["tags"].append(each.listed.tag.encode("utf-8", "surrogateescape"))
            known["first"].append(first + ends - rows)
            known["nbytes"].append(fetched if found.nbytes is None else found.nbytes)
            unknown = np.full(len(rows), UNKNOWN) if each.crc32 is None else each.crc32
            known["crc32"].append(unknown)
            known["extent_ends"].append(extents + np.cumsum(counts))
            known["offset"].append(found.extents[:, 1])
            known["length"].append(found.extents[:, 2])
            at = np.full(len(rows), -1) if found.starts is None else starts + ends - rows
            known["starts_at"].append(at)
            if found.starts is not None:
                known["starts"].append(found.starts)
                starts += len(found.starts)
            first += int(rows.sum())
            blocks, extents = blocks + len(rows), extents + len(found.extents)
            known["block_ends"].append([blocks])
        known["info"] = list(infos)
        return cls.read(_file_of(known, [*forms], first), "the index")

    @classmethod
    def read(cls, data: bytes | memoryview, where: str) -> ShardIndex:
        """Return the index in the bytes of a file; raise InputError if they are not one."""
        view = memoryview(data).cast("B")
        try:
            reader = pa.ipc.open_file(pa.py_buffer(view))
            head = json.loads((reader.schema.metadata or {}).get(_KEY, b"{}"))
            if head.get("format") != _FORMAT:
                raise ValueError("it is not an index of shards, or one of another version")
            if len(record_batches(view, is_compressed=False)) != 1:
                raise ValueError("it has more than one row")
            row = reader.get_batch(0)
            row.validate(full=True)
            if row.num_rows != 1 or row.schema.names != [*_LISTS]:
                raise ValueError(f"{row.num_rows:,} rows of {shortened(row.schema.names)}")
            forms = tuple(str(form) for form in head["formats"])
            found = cls(view, str(head["identity"]), forms, int(head["samples"]), row)
            if what := next(found._wrong(), None):
                raise ValueError(what)
        except (*DAMAGES, pa.ArrowException, OSError, struct.error) as error:
            raise InputError(
                f"{where} is damaged: {shortened(error)}\n"
                "  Remove it and call forebay.index_shards again."
            ) from error
        return found

    def _wrong(self) -> Iterator[str]:
        """Yield what does not fit together; numbers of samples are checked when they are used.

        Each is only looked at if those before it are right: it may take memory by them.
        """
        for name, kind in _LISTS.items():
            types = (kind, pa.uint32()) if name == "starts" else (kind,)
            column = self._row.column(name)
            if column.type not in map(pa.large_list, types) or column.values.null_count:
                yield f"its {name} are of the type {column.type}, or lack some"
        shards, blocks, extents = len(self.sizes), len(self.first), len(self.offset)
        for names, count, of in (
            (("formats", "codecs", "infos", "block_ends", "names", "tags"), shards, "shards"),
            (("nbytes", "crc32", "starts_at", "extent_ends"), blocks, "blocks"),
            (("length",), extents, "stretches"),
        ):
            for name in names:
                if len(self._values(name)) != count:
                    yield f"it has {len(self._values(name)):,} {name} of {count:,} {of}"
        if not shards or not 0 <= self.samples <= MOST_SHARD_BYTES:
            yield f"it has {self.samples:,} samples in {shards:,} shards"
        for name, ends, count in (
            ("blocks", self.block_ends, blocks),
            ("stretches", self.extent_ends, extents),
        ):
            if not _are_ends(ends, count):
                yield f"its shards or blocks do not have its {count:,} {name}, one after the other"
        for name, numbers, below in (
            ("formats", self.formats, len(self.forms)),
            ("compressions", self.codecs, len(CODEC_NAMES)),
            ("descriptions", self.infos, len(self._values("info"))),
            ("sizes of shards", self.sizes, MOST_SHARD_BYTES + 1),
            ("sizes of blocks", self.nbytes, MOST_SHARD_BYTES + 1),
            ("first samples", self.first, max(self.samples, 1)),
            ("offsets", self.offset, MOST_SHARD_BYTES + 1),
            ("lengths", self.length, MOST_SHARD_BYTES + 1),
        ):
            if not ((numbers >= 0) & (numbers < below)).all():
                yield f"its {name} are not all from 0 to {below - 1:,}"
        rows = np.diff(self.first, append=self.samples)
        if (rows < 1).any() or (self.first[0] if blocks else self.samples):
            yield "its blocks are not in the order of their samples, at least one each"
        per_block = np.diff(self.extent_ends, prepend=0)
        if (per_block < 1).any():
            yield "one of its blocks has no bytes"
        if not blocks:
            return
        size = np.repeat(np.repeat(self.sizes, np.diff(self.block_ends, prepend=0)), per_block)
        if (self.offset > size - self.length).any():
            yield "one of its blocks lies outside of its shard"
        sizes = np.add.reduceat(self.length, self.extent_ends - per_block)
        if (rows > most_rows(np.maximum(sizes, self.nbytes))).any():
            yield "one of its blocks has more samples than bytes can hold"
        has_starts = self.starts_at >= 0
        if (self.starts_at > len(self.starts) - rows)[has_starts].any():
            yield "the samples of one of its blocks are nowhere"

    def _values(self, name: str) -> pa.Array:
        return self._row.column(name).values

    def _array(self, name: str) -> npt.NDArray[Any]:
        # Not by `to_numpy`, which loads pandas where that is installed.
        values = self._values(name)
        dtype, buffer = np.dtype(str(values.type)), values.buffers()[1]
        if not len(values) or buffer is None:
            return np.empty(0, dtype)
        return np.frombuffer(buffer, dtype, len(values), values.offset * dtype.itemsize)

    sizes = cached_property(lambda self: self._array("sizes"))
    formats = cached_property(lambda self: self._array("formats"))
    codecs = cached_property(lambda self: self._array("codecs"))
    infos = cached_property(lambda self: self._array("infos"))
    block_ends = cached_property(lambda self: self._array("block_ends"))
    first = cached_property(lambda self: self._array("first"))
    nbytes = cached_property(lambda self: self._array("nbytes"))
    crc32 = cached_property(lambda self: self._array("crc32"))
    starts_at = cached_property(lambda self: self._array("starts_at"))
    extent_ends = cached_property(lambda self: self._array("extent_ends"))
    offset = cached_property(lambda self: self._array("offset"))
    length = cached_property(lambda self: self._array("length"))
    starts = cached_property(lambda self: self._array("starts"))

    def __len__(self) -> int:
        return len(self.first)

    def listed(self, number: int) -> Listed:
        """Return a shard as it was listed when it was indexed."""
        name, tag = (_text(self._values(each)[number]) for each in ("names", "tags"))
        return Listed(name, int(self.sizes[number]), tag)

    @property
    def names(self) -> list[str]:
        """The names of all shards."""
        return [*map(_text, self._values("names"))]

    def info(self, number: int) -> bytes:
        """Return what the format of a shard needs to read its blocks."""
        found: bytes = self._values("info")[int(self.infos[number])].as_py()
        return found

    def rows(self, block: int) -> int:
        """Return how many samples a block has."""
        end = self.first[block + 1] if block + 1 < len(self.first) else self.samples
        return int(end - self.first[block])

    def shard_of(self, block: int) -> int:
        """Return the shard that has a block."""
        return int(np.searchsorted(self.block_ends, block, "right"))

    def first_block(self, shard: int) -> int:
        """Return the first block of a shard."""
        return int(self.block_ends[shard - 1]) if shard else 0

    def extents(self, block: int) -> slice:
        """Return which stretches a block has."""
        return slice(int(self.extent_ends[block - 1]) if block else 0, int(self.extent_ends[block]))

    @cached_property
    def origins(self) -> tuple[Origin, ...]:
        """The shards as the origins of their samples."""
        ends = np.append(self.first, self.samples)[self.block_ends]
        last = np.append(0, self.extent_ends)[self.block_ends]  # of the stretches of each shard
        stretches = itertools.pairwise([0, *last.tolist()])
        lengths = [
            zlib.crc32(np.ascontiguousarray(self.length[slice(*at)]).data) for at in stretches
        ]
        return tuple(
            Origin(shown_location(name), f"{size}-{crc32:08x}:{tag}", count)
            for name, size, crc32, tag, count in zip(
                self.names,
                self.sizes.tolist(),
                lengths,
                map(_text, self._values("tags")),
                np.diff(ends, prepend=0).tolist(),
                strict=True,
            )
        )

    def sample_starts(self, block: int) -> npt.NDArray[np.int64] | None:
        """Return where the samples of a block begin in it; None if they are no stretches."""
        if (at := int(self.starts_at[block])) < 0:
            return None
        found: npt.NDArray[np.int64] = self.starts[at : at + self.rows(block)].astype(np.int64)
        return found

    def indexed(self, shard: int) -> IndexedShard:
        """Return what is known of a shard, as `of` takes it."""
        begin, end = self.first_block(shard), int(self.block_ends[shard])
        last = self.first[end] if end < len(self) else self.samples
        rows = np.diff(self.first[begin:end], append=last) if end > begin else np.empty(0, np.int64)
        before = int(self.extent_ends[begin - 1]) if begin else 0
        counts = np.diff(self.extent_ends[begin:end], prepend=before)
        own = slice(before, before + int(counts.sum()))
        number = np.repeat(np.arange(end - begin), counts)
        extents = np.stack([number, self.offset[own], self.length[own]], axis=1)
        starts = None
        if end > begin and (at := int(self.starts_at[begin])) >= 0:
            starts = self.starts[at : at + int(rows.sum())].astype(np.int64)
        found = FoundBlocks(rows, extents, self.info(shard), starts, self.nbytes[begin:end])
        crc32 = self.crc32[begin:end]
        form, codec = self.forms[self.formats[shard]], CODEC_NAMES[self.codecs[shard]]
        return IndexedShard(self.listed(shard), form, codec, found, crc32)


def _file_of(known: dict[str, Any], forms: list[str], samples: int) -> bytes:
    """Return the bytes of a file."""
    columns, identity = [], blake2b(digest_size=8)
    for name, kind in _LISTS.items():
        if kind == _BYTES:
            values = pa.array(known[name], kind)
        else:
            parts = [np.empty(0, np.int64), *(np.asarray(part, np.int64) for part in known[name])]
            array = np.concatenate(parts)
            if name == "starts" and array.max(initial=0) < 1 << 32:
                array, kind = array.astype(np.uint32), pa.uint32()
            values = pa.array(array, kind)
        for buffer in values.buffers():
            identity.update(b"" if buffer is None else buffer)
        ends = pa.array([0, len(values)], pa.int64())
        columns.append(pa.LargeListArray.from_arrays(ends, values))
    head = {"format": _FORMAT, "identity": identity.hexdigest(), "formats": forms}
    row = pa.record_batch(columns, [*_LISTS])
    row = row.replace_schema_metadata({_KEY: json.dumps({**head, "samples": samples})})
    out = pa.BufferOutputStream()
    with pa.ipc.new_file(out, row.schema) as writer:
        writer.write_batch(row)
    return bytes(out.getvalue())


def _text(value: pa.Scalar) -> str:
    return bytes(value.as_py()).decode("utf-8", "surrogateescape")


def _are_ends(ends: npt.NDArray[Any], total: int) -> bool:
    """Return whether numbers can be where parts of so many items end."""
    if not len(ends):
        return total == 0
    return bool(ends[0] >= 0 and ends[-1] == total and (np.diff(ends) >= 0).all())
