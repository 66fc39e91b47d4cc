"""Decide what to fetch from a bucket when. PURE; `residency.py` decides which blocks stay.

    clients ── windows, needs ──> Residency ── blocks to fetch ──> Requests ── GETs ──> threads
                                  └── blocks to drop                └── order, a limit of bytes

`fetcher.py` performs what is decided here. What may pass (a cut answer, a refusal, silence) is
tried again by the client of the bucket: see `stores.py`.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from forebay.base.store_errors import BROKEN

MIB = 1 << 20
# Bytes in flight, and at most those of what readers wait for; and requests: each has a thread.
LIMIT_BYTES, MOST_BYTES, MOST_REQUESTS = 64 * MIB, 512 * MIB, 256
# Neighbours in a shard become one request of up to so many bytes.
JOINED_BYTES = 8 * MIB
# How often a unit is requested that arrives with other wrong bytes each time.
MOST_TRIES = 10
# Of how many answers the latencies are counted.
LATEST = 256

# What may happen to a request beside what `store_errors` names: other bytes came, or the object is
# another one by now.
WRONG, CHANGED = "wrong", "changed"

# A block, a part of one for one client, or one of several units of a block: block, number, count.
Key = int | tuple[int, int] | tuple[int, int, int]
Rank = tuple[int, int, int]  # whether nobody waits for it, epoch, when it is due: lowest first
NEEDED: Rank = (0, 0, 0)


class Unit(NamedTuple):
    """Some consecutive bytes of a shard that are needed as a whole."""

    key: Key
    shard: int
    offset: int
    length: int


class Get(NamedTuple):
    """A request for one unit, or for several that follow each other."""

    number: int
    units: tuple[Unit, ...]

    @property
    def length(self) -> int:
        """Bytes of all units."""
        return sum(unit.length for unit in self.units)


class GivenUp(NamedTuple):
    """A unit that cannot be had, and why."""

    unit: Unit
    kind: str
    message: str


@dataclass(slots=True)
class FetchCounts:
    """What happened so far.

    Attributes:
        busy_s: Seconds for which any request was under way.
        latencies: Seconds that the last answers took.
    """

    requests: int = 0
    nbytes: int = 0
    busy_s: float = 0.0
    latencies: deque[float] = field(default_factory=lambda: deque(maxlen=LATEST))


@dataclass(slots=True)
class _Wanted:
    unit: Unit
    rank: Rank
    flight: int = 0  # the number of the request for it
    sums: set[int] = field(default_factory=set)  # wrong checksums that it arrived with


class Requests:
    """The requests under way, and the units that wait for one."""

    def __init__(self) -> None:
        self.counts = FetchCounts()
        self._wanted: dict[Key, _Wanted] = {}
        self._at: dict[tuple[int, int], Key] = {}  # shard and offset of what is wanted
        self._queue: list[tuple[Rank, int, Key]] = []
        self._flights: dict[int, tuple[Get, float]] = {}  # and when each began
        self._in_flight = self._number = self._order = self._excused = 0
        self._busy_since = 0.0

    def want(self, unit: Unit, rank: Rank) -> None:
        """Fetch a unit, or fetch it earlier than it would be."""
        known = self._wanted.get(unit.key)
        if known is None:
            known = self._wanted[unit.key] = _Wanted(unit, rank)
            self._at[unit.shard, unit.offset] = unit.key
        elif rank >= known.rank:
            return
        known.rank = rank
        if not known.flight:
            self._push(known)

    def cancel(self, key: Key) -> None:
        """Do not fetch a unit that nobody wants now; a request under way goes on."""
        if (known := self._wanted.pop(key, None)) is not None:
            self._at.pop((known.unit.shard, known.unit.offset), None)

    def excuse(self) -> None:
        """Try once more what is under way now and fails: this process did not run meanwhile."""
        self._excused = self._number

    def _push(self, wanted: _Wanted) -> None:
        self._order += 1
        heapq.heappush(self._queue, (wanted.rank, self._order, wanted.unit.key))

    def due(self, now: float) -> list[Get]:
        """Return the requests to send now."""
        gets = []
        while units := self._next():
            self._number += 1
            gets.append(get := Get(self._number, tuple(units)))
            self._busy_since = self._busy_since if self._flights else now
            self._flights[get.number] = get, now
            self._in_flight += get.length
            self.counts.requests += 1
            for unit in units:
                self._wanted[unit.key].flight = get.number
        return gets

    def _next(self) -> list[Unit]:
        """Take the next unit from the queue, and those that follow it in its shard."""
        while self._queue:
            _, _, key = self._queue[0]
            known = self._wanted.get(key)
            if known is None or known.flight:
                heapq.heappop(self._queue)
                continue
            # The first batch needs more blocks than the usual limit has room for.
            limit = MOST_BYTES if known.rank == NEEDED else LIMIT_BYTES
            is_full = self._in_flight and self._in_flight + known.unit.length > limit
            if is_full or len(self._flights) >= MOST_REQUESTS:  # it stays the next
                return []
            heapq.heappop(self._queue)
            return self._joined(known)
        return []

    def _joined(self, first: _Wanted) -> list[Unit]:
        units, room = [first.unit], JOINED_BYTES - first.unit.length
        while not first.sums:
            last = units[-1]
            key = self._at.get((last.shard, last.offset + last.length))
            known = None if key is None else self._wanted.get(key)
            if (
                known is None
                or known.flight
                or known.sums
                or known.rank > first.rank  # it would delay those that are due earlier
                or (room := room - known.unit.length) < 0
            ):
                break
            units.append(known.unit)
        return units

    def arrived(
        self, number: int, wrong: Mapping[Key, int], now: float
    ) -> tuple[list[Unit], list[GivenUp]]:
        """Return the units of a complete answer that are still wanted, and those given up.

        Args:
            wrong: The checksums of units that are not as they were written. Such a unit is
                fetched again, until it arrives with the same wrong checksum twice.
        """
        get, began = self._land(number, now)
        self.counts.latencies.append(now - began)
        self.counts.nbytes += get.length
        found, lost = [], []
        for unit in get.units:
            known, checksum = self._wanted.get(unit.key), wrong.get(unit.key)
            if known is None:
                continue
            if checksum is None:
                found.append(unit)
                self.cancel(unit.key)
            elif known.flight != number:  # another request may bring it
                continue
            elif checksum in known.sums or len(known.sums) + 1 >= MOST_TRIES:
                lost.append(self._give_up(unit, WRONG, f"{checksum:08x}"))
            else:
                known.sums.add(checksum)
                known.flight = 0
                self._push(known)
        return found, lost

    def failed(self, number: int, kind: str, message: str, now: float) -> list[GivenUp]:
        """Return the units of a failed request, which are given up unless it is excused."""
        get, _ = self._land(number, now)
        wanted = [known for unit in get.units if (known := self._wanted.get(unit.key)) is not None]
        wanted = [known for known in wanted if known.flight == number]
        if kind == BROKEN and number <= self._excused:
            for known in wanted:
                known.flight = 0
                self._push(known)
            return []
        return [self._give_up(known.unit, kind, message) for known in wanted]

    def _give_up(self, unit: Unit, kind: str, message: str) -> GivenUp:
        self.cancel(unit.key)
        return GivenUp(unit, kind, message)

    def _land(self, number: int, now: float) -> tuple[Get, float]:
        get, began = self._flights.pop(number)
        self.counts.busy_s += now - self._busy_since
        self._busy_since = now
        self._in_flight -= get.length
        return get, began


def percentile(values: Iterable[float], share: float) -> float:
    """Return the value below which this share of the values is; at least one value."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
