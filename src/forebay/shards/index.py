"""The index of shards: where the blocks of each are. One file, which is mapped.

    head: JSON, with the place of each array      arrays: of shards, blocks, stretches, samples

Whoever reads may share its pages with others, so a hundred million samples cost little memory. It
may be anybody's: each number is checked before it is used, and nothing in it is run.
"""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from forebay.base.origins import Origin
from forebay.caching.layout import DAMAGES, MOST_SHARD_BYTES
from forebay.errors import InputError, shortened, shown_location
from forebay.shards.format import FoundBlocks
from forebay.shards.location import CODECS, Listed

_HEAD = b"forebay shards 2\n"
_MOST_HEAD = 64 << 20
_ALIGN = 64
UNKNOWN = -1  # the checksum of a block of which no byte was read
CODEC_NAMES = ("", *sorted({*CODECS.values()}))
# What is stored, and as what. Each `*_ends` says where the parts of another array end.
_ARRAYS = {
    "sizes": "<i8",  # of shards
    "formats": "<i4",
    "codecs": "<i4",
    "infos": "<i4",  # the number of what their formats need
    "names": "<u1",
    "name_ends": "<i8",
    "tags": "<u1",
    "tag_ends": "<i8",
    "info": "<u1",
    "info_ends": "<i8",
    "block_ends": "<i8",
    "first": "<i8",  # of blocks: their first samples
    "nbytes": "<i8",  # about what they take in memory
    "crc32": "<i8",
    "starts_at": "<i8",  # where in `starts` their samples are, or -1
    "extent_ends": "<i8",
    "offset": "<i8",  # of stretches
    "length": "<i8",
    "starts": "<u4",  # of samples, in their block
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
        identity: A checksum of all of it.
        forms: The names of the formats of its shards.
        samples: How many there are.
    """

    data: memoryview
    identity: str
    forms: tuple[str, ...]
    samples: int
    _at: dict[str, tuple[int, int]]

    @classmethod
    def of(cls, shards: Iterable[IndexedShard]) -> ShardIndex:
        """Return the index of some shards, in this order."""
        known: dict[str, Any] = {name: [] for name in _ARRAYS}
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
        for name, ends_of in (("names", "name_ends"), ("tags", "tag_ends"), ("info", "info_ends")):
            known[ends_of] = [np.cumsum([len(part) for part in known[name]])]
            known[name] = [np.frombuffer(b"".join(known[name]), np.uint8)]
        arrays = {
            name: np.concatenate([_empty[name], *(np.asarray(part, kind) for part in known[name])])
            for name, kind in _ARRAYS.items()
        }
        return cls.read(_packed(arrays, [*forms], first), "the index")

    @classmethod
    def read(cls, data: bytes | memoryview, where: str) -> ShardIndex:
        """Return the index in the bytes of a file; raise InputError if they are not one."""
        view = memoryview(data).cast("B")
        try:
            if bytes(view[: len(_HEAD)]) != _HEAD:
                raise ValueError("it is not an index of shards, or one of another version")
            size = int.from_bytes(view[len(_HEAD) : len(_HEAD) + 8], "little")
            begin = len(_HEAD) + 8
            if size > _MOST_HEAD:
                raise ValueError(f"its head has {size:,} bytes")
            head = json.loads(bytes(view[begin : begin + size]))
            places = {name: (int(at), int(count)) for name, (at, count) in head["arrays"].items()}
            for name, kind in _ARRAYS.items():
                at, count = places[name]
                if at % _ALIGN or at < 0 or not 0 <= count <= len(view):
                    raise ValueError(f"the place of {name}")
                if at + count * np.dtype(kind).itemsize > len(view):
                    raise ValueError("it is truncated")
            forms = tuple(str(form) for form in head["formats"])
            found = cls(view, str(head["identity"]), forms, int(head["samples"]), places)
            found._check()
        except DAMAGES as error:
            raise InputError(
                f"{where} is damaged: {shortened(error)}\n"
                "  Remove it and call forebay.index_shards again."
            ) from error
        return found

    def _check(self) -> None:
        """Raise ValueError unless all numbers fit together; those of samples are checked later."""
        shards, blocks, extents = len(self.sizes), len(self.first), len(self.offset)
        rows = np.diff(self.first, append=self.samples)
        per_block = np.diff(self.extent_ends, prepend=0)
        size = np.repeat(self.sizes, np.diff(self.block_ends, prepend=0))
        size = np.repeat(size, per_block)
        has_starts = self.starts_at >= 0
        for is_wrong, what in (
            (not shards, "no shards"),
            (len({*map(len, (self.sizes, self.formats, self.codecs, self.infos))}) > 1, "shards"),
            (len(self.block_ends) != shards or not _ends(self.block_ends, blocks), "blocks"),
            (not all(len(each) == blocks for each in (self.nbytes, self.crc32)), "blocks"),
            (len(self.starts_at) != blocks or not _ends(self.extent_ends, extents), "blocks"),
            (len(self.length) != extents or len(self.extent_ends) != blocks, "stretches"),
            (blocks and (self.first[0] != 0 or (rows < 1).any()), "the samples of a block"),
            (not blocks and self.samples, "samples"),
            (((self.sizes < 0) | (self.sizes > MOST_SHARD_BYTES)).any(), "the size of a shard"),
            ((per_block < 1).any(), "a block without bytes"),
            (((self.nbytes < 0) | (self.nbytes > MOST_SHARD_BYTES)).any(), "the size of a block"),
            (((self.offset < 0) | (self.length < 0)).any(), "a stretch"),
            ((self.offset > size - self.length).any(), "a stretch outside its shard"),
            ((self.starts_at + rows > len(self.starts))[has_starts].any(), "samples of a block"),
            (not _within(self.formats, len(self.forms)), "a format"),
            (not _within(self.codecs, len(CODEC_NAMES)), "a compression"),
            (not _within(self.infos, len(self._array("info_ends"))), "what a format needs"),
        ):
            if is_wrong:
                raise ValueError(what)
        for name, ends_of, count in (
            ("names", "name_ends", shards),
            ("tags", "tag_ends", shards),
            ("info", "info_ends", None),
        ):
            ends = self._array(ends_of)
            if count not in (None, len(ends)) or not _ends(ends, len(self._array(name))):
                raise ValueError(name)

    def _array(self, name: str) -> npt.NDArray[Any]:
        at, count = self._at[name]
        return np.frombuffer(self.data, _ARRAYS[name], count, at) if count else _empty[name]

    def _part(self, name: str, ends_of: str, number: int) -> bytes:
        ends = self._array(ends_of)
        begin = int(ends[number - 1]) if number else 0
        return self._array(name)[begin : int(ends[number])].tobytes()

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
        name, tag = (
            self._part(*pair, number).decode("utf-8", "surrogateescape")
            for pair in (("names", "name_ends"), ("tags", "tag_ends"))
        )
        return Listed(name, int(self.sizes[number]), tag)

    @property
    def names(self) -> list[str]:
        """The names of all shards."""
        return self._strings("names", "name_ends")

    def _strings(self, name: str, ends_of: str) -> list[str]:
        data, ends = self._array(name).tobytes(), self._array(ends_of).tolist()
        parts = [data[begin:end] for begin, end in itertools.pairwise([0, *ends])]
        return [part.decode("utf-8", "surrogateescape") for part in parts]

    def info(self, number: int) -> bytes:
        """Return what the format of a shard needs to read its blocks."""
        return self._part("info", "info_ends", int(self.infos[number]))

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
        lengths = [zlib.crc32(np.ascontiguousarray(self.length[slice(*at)])) for at in stretches]
        return tuple(
            Origin(shown_location(name), f"{size}-{crc32:08x}:{tag}", count)
            for name, size, crc32, tag, count in zip(
                self._strings("names", "name_ends"),
                self.sizes.tolist(),
                lengths,
                self._strings("tags", "tag_ends"),
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
        rows = np.diff(self.first[begin:end], append=last) if end > begin else _empty["first"]
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


_empty = {name: np.empty(0, kind) for name, kind in _ARRAYS.items()}


def _packed(arrays: dict[str, npt.NDArray[Any]], forms: Sequence[str], samples: int) -> bytes:
    """Return the bytes of a file."""
    identity = 0
    for array in arrays.values():
        identity = zlib.crc32(array.data, identity)
    head: dict[str, Any] = {"formats": forms, "samples": samples, "identity": f"{identity:08x}"}
    # The length of the head depends on the places of arrays, which depend on it: leave room.
    at = begin = -(-(len(_HEAD) + 8 + 64 * (len(arrays) + 8 + len(forms))) // 4096) * 4096
    places = {}
    for name, array in arrays.items():
        places[name] = at, len(array)
        at += -(-array.nbytes // _ALIGN) * _ALIGN
    text = json.dumps({**head, "arrays": places}).encode()
    parts: list[Any] = [(_HEAD + len(text).to_bytes(8, "little") + text).ljust(begin, b" ")]
    for array in arrays.values():
        parts += [array.view(np.uint8), bytes(-array.nbytes % _ALIGN)]
    return b"".join(parts)


def _ends(ends: npt.NDArray[Any], total: int) -> bool:
    """Return whether numbers can be where parts of so many items end."""
    if not len(ends):
        return total == 0
    return bool(ends[0] >= 0 and ends[-1] == total and (np.diff(ends) >= 0).all())


def _within(numbers: npt.NDArray[Any], count: int) -> bool:
    return bool(((numbers >= 0) & (numbers < count)).all())
