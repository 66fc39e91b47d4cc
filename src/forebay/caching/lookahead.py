"""Tell the fetcher which blocks of a bucket a loader needs, before it needs them."""

from __future__ import annotations

import heapq
import os
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forebay.caching.bucket_reader import BucketReader
from forebay.caching.link import Link, LinkBrokenError
from forebay.errors import ForebayError, shown_location
from forebay.observe.measurements import Fetched
from forebay.observe.progress import log
from forebay.windows import InOrder, Window, Windows

# What is fetched ahead of a loader that reads in order, and in how many epochs at a time.
AHEAD_BYTES, MOST_EPOCHS = 256 << 20, 64


class _Held(NamedTuple):
    """A window whose blocks the fetcher holds; the first that ends is the least."""

    epoch: int
    until: int
    number: int
    due: int
    blocks: npt.NDArray[np.int64]


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
        self._fetched, self._sizes = fetched, reader.blocks.nbytes
        fetched.total = reader.blocks.total_bytes
        self._reader, self._order, self._lanes = reader, order, lanes
        share = len(lanes) / order.lanes
        self._room = int(2 * share * window) if window and share else AHEAD_BYTES
        self._was_warned = False
        self._link: Link | None = None
        self._begin(0, 0, 0)

    def _begin(self, seed: int, epoch: int, batch: int) -> None:
        self._leave()
        self._seed, self._first = seed, epoch
        self._epochs = range(epoch, epoch + 1)  # those of which windows are held
        self._coming = self._order.windows(seed, epoch, self._lanes, batch)
        self._next: Window | None = None  # it had no room yet
        self._held: list[_Held] = []
        self._number = 0

    def reached(self, seed: int, epoch: int, sample: int) -> None:
        """Note that a loader has made all batches before a sample of an epoch."""
        batch = sample // self._order.batch
        if seed != self._seed or epoch not in self._epochs:
            self._begin(seed, epoch, batch)
        self._epochs = range(epoch, self._epochs.stop)
        ended: list[int] = []
        while self._held and self._held[0][:2] < (epoch, batch):
            ended += heapq.heappop(self._held).blocks.tolist()
        try:
            if self._link is None:
                self._connect()
                self._admit(batch)
            elif ended:
                self._admit(batch)
                self._link.post("release", blocks=ended)
            assert self._link is not None
            heard = self._link.heard()
            self._warn_of_disk(heard.get("off_disk"))
            for name, value in heard.items():
                if name in Fetched.__slots__:
                    setattr(self._fetched, name, value)
        except (LinkBrokenError, ForebayError):  # a reader says what is wrong
            self._leave()
        except BaseException:  # such as Ctrl-C, which may leave the rest of a message there
            self._leave()
            raise

    def _connect(self) -> None:
        self._link = Link(self._reader.process)
        for descriptor in self._link.descriptors:
            os.close(descriptor)
        self._link.post("facts")
        for held in sorted(self._held, key=lambda held: held.number):
            self._hold(held)

    def _warn_of_disk(self, why: str | None) -> None:
        """Log, once, why blocks are not kept on disk."""
        if why is None or self._was_warned:
            return
        self._was_warned = True
        log.warning(
            "%s: blocks are not kept in directory=%r, but fetched in each epoch: %s",
            *(shown_location(self._reader.place.url), self._reader.place.directory, why),
        )

    def _admit(self, batch: int) -> None:
        """Have the next windows held as far as there is room.

        Args:
            batch: The first global batch that was not made yet.
        """
        nbytes = sum(self._nbytes(each.blocks) for each in self._held)
        while len(self._epochs) < MOST_EPOCHS:
            window = self._next or next(self._coming, None)
            self._next, epoch = None, self._epochs[-1]
            if window is None:
                self._epochs = range(self._epochs.start, epoch + 2)
                self._coming = self._order.windows(self._seed, epoch + 1, self._lanes)
                continue
            if (epoch, window.until) < (self._epochs.start, batch):  # it never had room
                continue
            nbytes += self._nbytes(window.blocks)
            if self._held and nbytes > self._room:
                self._next = window
                break
            self._number += 1
            held = _Held(epoch, window.until, self._number, window.due, window.blocks)
            heapq.heappush(self._held, held)
            self._hold(held)  # it is fetched while the next one is found

    def _nbytes(self, blocks: npt.NDArray[np.int64]) -> int:
        return int(self._sizes[blocks].sum())

    def _hold(self, held: _Held) -> None:
        assert self._link is not None
        epoch, blocks = held.epoch - self._first, held.blocks.tolist()
        self._link.post("hold", epoch=epoch, due=held.due, blocks=blocks)

    def _leave(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def close(self) -> None:
        """Let the fetcher forget all windows; also as the interpreter ends, or once more."""
        self._leave()
        self._epochs, self._held = range(0), []  # the next call begins anew
