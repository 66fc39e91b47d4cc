"""Read samples of blocks in a bucket: those that the fetcher has, or has to fetch.

    position ──> block ── in the table ──> map of memory or disk ──> samples, copied
                   └── not there ──> ask the fetcher: for the block, or for the parts of some rows

A reader looks into the table and copies; then it looks again. If the block was dropped meanwhile,
what it copied does not count. So reading a block that is there takes no message and no lock.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa

from forebay.base.value_readers import Bytes
from forebay.caching.fetcher_process import FetcherProcess, Place
from forebay.caching.link import Link, LinkBrokenError, offset_of
from forebay.errors import InputError, shown_location
from forebay.memory.layout import Slot
from forebay.memory.slab import Slab

# A block is fetched whole if so large a share of it is read at once, if it is read in order, if it
# is compressed, or if it is so small that its parts would be no less.
WHOLE_SHARE, SMALL_BYTES = 0.25, 64 << 10
# Blocks that are kept for the next call, at most, and their bytes if it is more than one; and
# decoded ones that a process remembers.
HELD, HELD_BYTES, DECODED = 8, 32 << 20, 4096
# Parts of a block that are so near to each other are one part.
GAP_BYTES = 16 << 10
# How often a fetcher may end before a reader gives up.
MOST_ENDS = 5
# Exceptions of NumPy and Arrow for bytes that are not those of a block.
TORN = (
    *(RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError),
    *(pa.ArrowException, UnicodeError, OSError, EOFError, struct.error),
)

Span = tuple[int, int, int]  # block, first byte in it, number of bytes


class Shared:
    """What the fetcher shares with this process: the table, and the memory of blocks.

    Attributes:
        table: For each block where it is, and then for each how many bytes it has there.
    """

    def __init__(self, link: Link) -> None:
        """Map it, and close the descriptors."""
        *others, table, memory = link.descriptors
        self.id = link.facts["id"]
        self.others = [*map(_mapped, others)]
        self.table = _mapped(table).view(np.uint64)
        self._slab = Slab.attach(memory, link.facts["extent"])
        for descriptor in (*others, table):
            os.close(descriptor)

    def bytes_of(self, block: int, entry: int) -> Bytes:
        """Return the memory of a block, which may be another's by now."""
        nbytes = int(self.table[len(self.table) // 2 + block])
        return np.frombuffer(self._slab.view(Slot(offset_of(entry), nbytes)), np.uint8)


class BucketReader(ABC):
    """Reads samples from blocks of a bucket. Pickled as their place, and the fetcher."""

    def __init__(self, place: Place, process: FetcherProcess | None = None) -> None:
        self.place = place
        self.process = process or FetcherProcess.of(place)
        self._begin()

    @property
    def location(self) -> str:
        """The URL of the folder."""
        return self.place.url

    def _begin(self) -> None:
        """Start without connections: in a new process, too."""
        self._process = os.getpid()
        self._shared: Shared | None = None
        self._local = threading.local()
        # Of decoded blocks, what the table had then.
        self._decoded: OrderedDict[int, tuple[int, Any]] = OrderedDict()

    def __reduce__(self) -> Any:
        return type(self), (self.place, self.process)

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
                self._shared = self._share(found)
                self._decoded.clear()
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
    @abstractmethod
    def blocks(self) -> Any:
        """Where the blocks are: a `BlockTable`."""

    @abstractmethod
    def _share(self, link: Link) -> Shared:
        """Map what the fetcher shares."""

    @abstractmethod
    def _decode(self, block: int, whole: Bytes) -> Callable[[Sequence[int]], list[Any]]:
        """Return what reads rows of a block, given its memory, which may be overwritten."""

    @abstractmethod
    def _read_parts(
        self, link: Link, wanted: dict[int, list[tuple[int, int]]], found: list[Any]
    ) -> None:
        """Read a few rows of blocks that are not there."""

    @abstractmethod
    def _has_parts(self, block: int) -> bool:
        """Return whether some rows of a block can be read without the rest of it."""

    def _may_change(self, block: int) -> bool:
        """Return whether a block may be overwritten while it is read: by code that checks bounds.

        Any other block is held by this connection meanwhile, since a library that trusts offsets
        could end the process.
        """
        return True

    @abstractmethod
    def _place_of(self, block: int) -> tuple[int, int]:
        """Return in which object a block is, and where it begins there."""

    @abstractmethod
    def _damaged(self, block: int) -> InputError:
        """Return the error for a block that cannot be read."""

    # ---- samples -------------------------------------------------------------------------------

    def sample(self, position: int, *, is_copy: bool = True) -> Any:
        """Return a sample, which is always a copy."""
        return self.samples((position,))[0]

    def samples(self, positions: Sequence[int], *, are_copies: bool = True) -> list[Any]:
        """Return samples, which are always copies."""
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
        if all(block in self._local.held or self._may_change(block) for block in left):
            self._read_here(left, found)
        while left:  # again for what was dropped while it was read
            whole = [block for block, rows in left.items() if self._is_whole(block, rows)]
            held: list[int] = self._local.held
            comes = link.ask("need", blocks=[*left], whole=whole)[0]["blocks"]
            held += comes
            parted = {block: left[block] for block in left.keys() - comes}
            self._read_here(left, found)
            if released := held[: self._count_to_release(held)]:
                del held[: len(released)]
                link.post("release", blocks=released)
            if parted := {block: rows for block, rows in parted.items() if block in left}:
                self._read_parts(link, parted, found)
                for block in parted:
                    del left[block]

    def _count_to_release(self, held: list[int]) -> int:
        """Return how many of the blocks that are held, the oldest first, are to be released."""
        sizes = [int(self.blocks.length[block]) for block in held]
        count = max(len(held) - HELD, 0)
        while count < len(held) - 1 and sum(sizes[count:]) > HELD_BYTES:
            count += 1
        return count

    def _is_whole(self, block: int, rows: list[tuple[int, int]]) -> bool:
        first, last = min(rows)[0], max(rows)[0]
        start = int(self.blocks.first[block])
        is_next, self._local.next = start + first == self._local.next, start + last + 1
        is_small = int(self.blocks.length[block]) <= SMALL_BYTES
        if is_next or is_small or not self._has_parts(block):
            return True
        return len(rows) >= WHOLE_SHARE * int(self.blocks.rows(block))

    def _read_here(self, left: dict[int, list[tuple[int, int]]], found: list[Any]) -> None:
        """Read the rows of blocks that are there."""
        shared = self.shared
        for block in [*left]:
            entry = int(shared.table[block])
            if not entry:
                continue
            known = self._decoded.get(block)
            with suppress(*TORN):  # what was there may have been overwritten
                if known is None or known[0] != entry:
                    known = entry, self._decode(block, shared.bytes_of(block, entry))
                    self._decoded[block] = known
                    while len(self._decoded) > DECODED:
                        self._decoded.popitem(last=False)
                samples = known[1]([row for row, _ in left[block]])
                for (_, at), each in zip(left[block], samples, strict=True):
                    found[at] = each
            if int(shared.table[block]) == entry:
                if any(found[at] is None for _, at in left[block]):
                    raise self._damaged(block)
                del left[block]
            else:
                for _, at in left[block]:
                    found[at] = None

    def _fill(self, link: Link, buffers: dict[int, Bytes], spans: set[Span]) -> None:
        """Fetch parts of blocks into buffers."""
        joined, parts = _joined(spans), list[Span]()
        for block, start, nbytes in joined:
            if not 0 <= start <= len(buffers[block]) - nbytes:
                raise self._damaged(block)
            number, offset = self._place_of(block)
            parts.append((number, offset + start, nbytes))
        if not joined:
            return
        _, data = link.ask("parts", parts=parts)
        at = 0
        for block, start, nbytes in joined:
            buffers[block][start : start + nbytes] = np.frombuffer(data, np.uint8, nbytes, at)
            at += nbytes


def _mapped(descriptor: int) -> Bytes:
    return np.frombuffer(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ), np.uint8)


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
