"""The index of a finished cache: a small JSON file, written last, that lists the shards.

Without it, the cache is not finished. A second call reads only this file.
"""

from __future__ import annotations

import errno
import json
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from forebay.base.file_stores import Folder, Store
from forebay.base.value_classes import Identity
from forebay.base.value_types import Spec, identities_of, type_from_json, type_to_json
from forebay.caching import structure
from forebay.caching.layout import (
    BLOCK,
    BLOCKS,
    DAMAGES,
    INDEX,
    INDEX_BYTES,
    LEAST_BLOCK_BYTES,
    MOST_SHARD_BYTES,
    MOST_TIMES,
    Blocks,
    is_shard,
    shard_name,
)
from forebay.caching.structure import Node, classes_of, is_generalized, names_of
from forebay.errors import InputError, shortened, shown_location

INDEX_FORMAT = 4


@dataclass(frozen=True, slots=True)
class Layout:
    """The columns of a shard: the structure of its samples, and the type of each of its leaves."""

    structure: Node
    specs: list[Spec]

    @property
    def names(self) -> list[str]:
        """The names of the columns."""
        return names_of(self.structure)

    def classes(self) -> Iterator[tuple[Identity, bool]]:
        """Yield the classes of samples, each with whether it is that of a NamedTuple."""
        yield from classes_of(self.structure)
        for spec in self.specs:
            yield from identities_of(spec)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "structure": structure.structure_to_json(self.structure),
            "columns": [*map(type_to_json, self.specs)],
        }

    @classmethod
    def from_json(cls, found: Any) -> Layout:
        """Return the layout that `to_json` described."""
        node, specs = (
            structure.structure_from_json(found["structure"]),
            [*map(type_from_json, found["columns"])],
        )
        if len(leaves := names_of(node)) != len(specs):
            raise ValueError(f"{len(specs)} columns for {len(leaves)} leaves")
        return cls(node, specs)


@dataclass(frozen=True, slots=True)
class CachePlan:
    """How a dataset is divided into shards; a shard whose samples do not fit has another layout.

    Attributes:
        compression: How blocks are compressed: "zstd", "lz4" or None.
    """

    samples: int
    per_shard: int
    layout: Layout
    compression: str | None = None

    @property
    def shards(self) -> int:
        """Number of shards."""
        return -(-self.samples // self.per_shard)

    def names(self) -> list[str]:
        """Return the names of the shards, in order."""
        return [shard_name(at) for at in range(self.shards)]

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "samples": self.samples,
            "per_shard": self.per_shard,
            "compression": self.compression,
            **self.layout.to_json(),
        }

    @classmethod
    def from_json(cls, found: Any) -> CachePlan:
        """Return the plan that `to_json` described."""
        samples, per_shard = int(found["samples"]), int(found["per_shard"])
        if not 1 <= samples <= sys.maxsize or per_shard < 1:
            raise ValueError(f"{samples} samples, {per_shard} in a shard")
        if (compression := found["compression"]) not in (None, *MOST_TIMES):
            raise ValueError(f"compression {compression!r}")
        return cls(samples, per_shard, Layout.from_json(found), compression)


_AGAIN = "  Remove it and call forebay.cache again: it makes what is missing."


@dataclass(frozen=True, slots=True)
class Index:
    """A finished cache.

    Attributes:
        sizes: The size of each shard in bytes.
        layouts: Those of the shards.
        blocks: How many blocks there are, and the CRC-32 of the file that lists them.
        samples: A hash of where the samples come from.
    """

    plan: CachePlan
    sizes: tuple[int, ...]
    layouts: tuple[Layout, ...]
    blocks: tuple[int, int]
    fingerprint: str
    version: str | None
    samples: str

    @classmethod
    def of(cls, plan: CachePlan, shards: Sequence[Any], data: bytes, *others: Any) -> Index:
        """Return the index of a cache, given the record and size of each shard, and its blocks."""
        sizes = tuple(size for _, size in shards)
        Blocks(data, plan.samples, plan.per_shard, sizes, compression=plan.compression)
        layouts = tuple(Layout.from_json(record) for record, _ in shards)
        blocks = len(data) // BLOCK.itemsize, zlib.crc32(data)
        return cls(plan, sizes, layouts, blocks, *others)

    def classes(self) -> Iterator[tuple[Identity, bool]]:
        """Yield the classes of samples, each with whether it is that of a NamedTuple."""
        for layout in {id(each): each for each in (self.plan.layout, *self.layouts)}.values():
            yield from layout.classes()

    def to_json(self) -> bytes:
        """Return the content of its file."""
        kinds = [json.dumps(layout.to_json()) for layout in self.layouts]
        known = [*dict.fromkeys(kinds)]
        record = {
            "format": INDEX_FORMAT,
            "plan": self.plan.to_json(),
            "sizes": self.sizes,
            "layouts": [*map(json.loads, known)],
            "layout_of": [*map({kind: at for at, kind in enumerate(known)}.get, kinds)],
            "blocks": dict(zip(("count", "crc32"), self.blocks, strict=True)),
            "fingerprint": self.fingerprint,
            "version": self.version,
            "samples": self.samples,
        }
        return json.dumps(record).encode()

    @classmethod
    def from_json(cls, data: bytes | memoryview, path: str) -> Index:
        """Return the index that `to_json` wrote to a path or URL."""
        try:
            found = json.loads(bytes(data))
            if found["format"] != INDEX_FORMAT:
                raise InputError(
                    f"{path!r} has format {found['format']}; this forebay reads format "
                    f"{INDEX_FORMAT}\n"
                    "  Use the forebay that wrote it, or call forebay.cache(..., redo='*')."
                )
            plan = CachePlan.from_json(found["plan"])
            sizes = tuple(map(int, found["sizes"]))
            known = [*map(Layout.from_json, found["layouts"])]
            layouts = tuple(known[at] for at in found["layout_of"])
            blocks = int(found["blocks"]["count"]), int(found["blocks"]["crc32"])
            texts = str(found["fingerprint"]), found["version"], str(found["samples"])
            if {len(sizes), len(layouts)} != {plan.shards}:
                raise ValueError(f"{len(sizes)} sizes")
            if not all(is_generalized(each.structure, plan.layout.structure) for each in known):
                raise ValueError("the columns of a shard")
            if not all(0 <= size < MOST_SHARD_BYTES for size in sizes):
                raise ValueError("the size of a shard")
            if not plan.shards <= blocks[0] <= sum(sizes) // LEAST_BLOCK_BYTES:
                raise ValueError(f"{blocks[0]} blocks")
            return cls(plan, sizes, layouts, blocks, *texts)
        except InputError:
            raise
        except DAMAGES as error:
            raise InputError(f"{path!r} is damaged: {shortened(error)}\n{_AGAIN}") from error

    @classmethod
    def read(cls, place: Store | Folder) -> Index | None:
        """Return the index of a cache; None if the cache is not finished."""
        path = shown_location(place.locate(INDEX))
        try:
            data = place.read(INDEX, INDEX_BYTES)
        except OSError as error:
            raise InputError(
                f"{path!r} cannot be read: {error.strerror}\n"
                "  Check its permissions, or remove it and call forebay.cache again: it makes "
                "what is missing."
            ) from error
        return None if data is None else cls.from_json(data, path)

    def read_blocks(self, place: Store | Folder) -> Blocks:
        """Return where the blocks are; of a local cache, this reads the whole file."""
        path = shown_location(place.locate(BLOCKS))
        try:
            return self.blocks_in(place.read(BLOCKS, self.block_bytes) or b"", path)
        except OSError as error:
            what = "is damaged" if error.errno == errno.EFBIG else "cannot be read"
            raise InputError(f"{path!r} {what}: {error.strerror}\n{_AGAIN}") from error

    def blocks_in(self, data: bytes | memoryview, path: str) -> Blocks:
        """Return where the blocks are, given the content of the file that lists them."""
        try:
            plan = self.plan
            dividing = plan.samples, plan.per_shard, self.sizes
            return Blocks(data, *dividing, self.blocks, plan.compression)
        except DAMAGES as error:
            raise InputError(f"{path!r} is damaged: {shortened(error)}\n{_AGAIN}") from error

    @property
    def block_bytes(self) -> int:
        """Bytes of the file that lists the blocks."""
        return self.blocks[0] * BLOCK.itemsize

    def missing(self, place: Store | Folder) -> list[str]:
        """Return the files that a cache lacks."""
        names = self.plan.names()
        found = {name: size for name, size in place.files() if is_shard(name)}
        lost = []
        for name, size in zip(names, self.sizes, strict=True):
            there = found.pop(name, None)
            if there is None:
                lost.append(name)
            else:
                check_size(place.locate(name), there, size)
        if found:
            raise InputError(
                f"{shown_location(place.locate(min(found)))!r} does not belong to this cache, "
                f"which has {len(names)} shards\n"
                "  Nothing can be added to a cache. Remove the file, or make a cache of both "
                "datasets in another directory."
            )
        return lost if place.size(BLOCKS) == self.block_bytes else [*lost, BLOCKS]


def check_size(path: str, there: int, written: int) -> None:
    """Raise InputError if a shard does not have the size that was written."""
    if there != written:
        raise InputError(
            f"{shown_location(path)!r} has {there:,} bytes instead of the {written:,} that were "
            "written\n"
            "  It is truncated, or something else wrote to it. Remove it and call forebay.cache "
            "again, with the same dataset and location: it writes that shard again."
        )
