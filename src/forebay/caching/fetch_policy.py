"""Decide what to fetch from a bucket when. PURE; `residency.py` decides which blocks stay.

    clients ── windows, needs ──> Residency ── blocks to fetch ──> Requests ── GETs ──> threads
                                  └── blocks to drop                └── retries, hedges, limits

`fetcher.py` performs what is decided here; times are given, so tests have a clock of their own.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from forebay.base.store_errors import BROKEN, DENIED, MISSING, REFUSED, THROTTLED

MIB = 1 << 20
# Bytes in flight at first and at most, and how many requests: each has a thread.
START_BYTES, MOST_BYTES, MOST_REQUESTS = 64 * MIB, 512 * MIB, 256
# Neighbours in a shard become one request of up to so many bytes.
JOINED_BYTES = 32 * MIB
# A request that takes longer than this, and a second for each so many bytes, has failed.
TIMEOUT_S, SLOWEST = 5.0, 2 * MIB
# How often a unit is requested before it is given up, and the longest pause between two tries.
MOST_TRIES, MOST_PAUSE_S, FIRST_PAUSE_S = 10, 20.0, 0.1
# The bytes in flight are doubled as long as that makes the rate grow by a factor, measured for so
# long, and the last doubling, which did not, is undone; once the bucket has refused requests, they
# grow by a step each time. More than so many times what would keep the bucket busy, by its rate and
# its fastest answer, only makes each request slower.
PROBE_S, GROWTH, STEP_BYTES, ENOUGH = 0.5, 1.1, 4 * MIB, 3.0
# The shortest wait: what is due may not be possible at once.
LEAST_WAIT_S = 0.005
# Hedges: a second request is sent after twice the 95th percentile, for few of all requests.
HEDGE_AFTER, HEDGE_SHARE, LEAST_KNOWN, KNOWN = 2.0, 0.02, 20, 128
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
        lost_s: Seconds for which requests that failed were under way, and pauses after them.
        latencies: Seconds that the last answers took.
    """

    requests: int = 0
    nbytes: int = 0
    hedges: int = 0
    busy_s: float = 0.0
    lost_s: float = 0.0
    failed: Counter[str] = field(default_factory=Counter)
    latencies: deque[float] = field(default_factory=lambda: deque(maxlen=LATEST))


@dataclass(slots=True)
class _Wanted:
    unit: Unit
    rank: Rank
    tries: int = 0
    denied: bool = False
    sums: set[int] = field(default_factory=set)  # wrong checksums that it arrived with
    flights: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Flight:
    get: Get
    began: float
    epoch: int
    is_hedged: bool = False


class Requests:
    """The requests under way, and the units that wait for one.

    Attributes:
        limit: Bytes that may be in flight at present.
        must_renew: Whether the credentials were refused; the caller sets it back.
    """

    def __init__(self, random: Random) -> None:
        self.limit = START_BYTES
        self.must_renew = False
        self.counts = FetchCounts()
        self._random = random
        self._wanted: dict[Key, _Wanted] = {}
        self._at: dict[tuple[int, int], Key] = {}  # shard and offset of what is wanted
        self._queue: list[tuple[Rank, int, Key]] = []
        self._later: list[tuple[float, int, Key]] = []
        self._flights: dict[int, _Flight] = {}
        self._in_flight = self._number = self._order = 0
        self._latencies: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=KNOWN))
        self._fastest: dict[int, float] = {}  # seconds of the fastest answer, by size
        self._resumes = self._halved = -math.inf
        self._probe_began, self._probe_bytes, self._best = 0.0, 0, 0.0
        self._settled = START_BYTES  # the limit at which the best rate was measured
        self._was_full = self._was_throttled = False
        self._busy_since = 0.0

    # ---- what is wanted ------------------------------------------------------------------------

    def want(self, unit: Unit, rank: Rank) -> None:
        """Fetch a unit, or fetch it earlier than it would be."""
        known = self._wanted.get(unit.key)
        if known is None:
            known = self._wanted[unit.key] = _Wanted(unit, rank)
            self._at[unit.shard, unit.offset] = unit.key
        elif rank >= known.rank:
            return
        known.rank = rank
        if not known.flights:
            self._push(known)

    def cancel(self, key: Key) -> None:
        """Do not fetch a unit that nobody wants now; a request under way goes on."""
        if (known := self._wanted.pop(key, None)) is not None:
            self._at.pop((known.unit.shard, known.unit.offset), None)

    def _push(self, wanted: _Wanted) -> None:
        self._order += 1
        heapq.heappush(self._queue, (wanted.rank, self._order, wanted.unit.key))

    # ---- requests ------------------------------------------------------------------------------

    def due(self, now: float) -> list[Get]:
        """Return the requests to send now."""
        for flight in [each for each in self._flights.values() if now >= _ends(each)]:
            self.failed(flight.get.number, BROKEN, "it took too long", now)
        while self._later and self._later[0][0] <= now:
            known = self._wanted.get(heapq.heappop(self._later)[2])
            if known is not None and not known.flights:
                self._push(known)
        self._tune(now)
        gets = self._hedges(now)
        while now >= self._resumes and (units := self._next()):
            gets.append(self._send(units, now))
        return gets

    def wakes_at(self, now: float) -> float:
        """Return when `due` may have something to return, if nothing happens before."""
        times = [_ends(each) for each in self._flights.values()]
        times += [flight.began + after for flight, after in self._hedgeable()]
        times += [when for when, _, _ in self._later[:1]]
        times += [self._resumes] if self._queue and self._resumes > now else []
        return max(min(times, default=math.inf), now + LEAST_WAIT_S)

    def _tune(self, now: float) -> None:
        """Change the limit if a probe has ended."""
        if now - self._probe_began < PROBE_S:
            return
        rate = self._probe_bytes / (now - self._probe_began)
        if self._was_full and self._was_throttled:
            self.limit = min(self.limit + STEP_BYTES, MOST_BYTES)
        elif self._was_full and rate > GROWTH * self._best:
            self._settled, self._best = self.limit, rate
            if self.limit < ENOUGH * rate * self._fastest[max(self._fastest)]:
                self.limit = min(2 * self.limit, MOST_BYTES)
        elif self._was_full:  # more in flight would only be slower, each of them
            self.limit = min(self.limit, self._settled)
        self._probe_began, self._probe_bytes, self._was_full = now, 0, False

    def _next(self) -> list[Unit]:
        """Take the next unit from the queue, and those that follow it in its shard."""
        while self._queue:
            _, _, key = self._queue[0]
            known = self._wanted.get(key)
            if known is None or known.flights:
                heapq.heappop(self._queue)
                continue
            # What a reader waits for does not wait in turn, unless the bucket has refused requests:
            # the first batch needs more blocks than the first limit has room for.
            is_urgent = known.rank == NEEDED and not self._was_throttled
            limit = MOST_BYTES if is_urgent else min(self.limit, self._room_for(known))
            is_full = self._in_flight and self._in_flight + known.unit.length > limit
            if is_full or len(self._flights) >= MOST_REQUESTS:  # it stays the next
                self._was_full = True
                return []
            heapq.heappop(self._queue)
            return self._joined(known)
        return []

    def _room_for(self, wanted: _Wanted) -> float:
        """Return how much may be in flight with a unit, so that it delays no earlier epoch.

        Requests share the link. So the blocks of the next epoch wait until what is left of this one
        keeps it busy no more.
        """
        epoch, fastest = wanted.rank[1], self._fastest.get(wanted.unit.length.bit_length())
        if (
            fastest is None
            or not self._best
            or all(each.epoch >= epoch for each in self._flights.values())
        ):
            return math.inf
        return self._best * fastest

    def _joined(self, first: _Wanted) -> list[Unit]:
        units, room = [first.unit], min(JOINED_BYTES, self.limit // 8) - first.unit.length
        while not first.tries:
            last = units[-1]
            key = self._at.get((last.shard, last.offset + last.length))
            known = None if key is None else self._wanted.get(key)
            if (
                known is None
                or known.flights
                or known.tries
                or known.rank > first.rank  # it would delay those that are due earlier
                or (room := room - known.unit.length) < 0
            ):
                break
            units.append(known.unit)
        return units

    def _send(self, units: Sequence[Unit], now: float) -> Get:
        self._number += 1
        get = Get(self._number, tuple(units))
        self._busy_since = self._busy_since if self._flights else now
        self._flights[get.number] = _Flight(get, now, self._wanted[units[0].key].rank[1])
        self._in_flight += get.length
        self.counts.requests += 1
        for unit in units:
            self._wanted[unit.key].flights.add(self._number)
        return get

    def _hedgeable(self) -> list[tuple[_Flight, float]]:
        """Return the requests that may be hedged, and after how many seconds."""
        if self.counts.hedges + 1 > HEDGE_SHARE * self.counts.requests:
            return []
        found, after = [], {}
        for flight in self._flights.values():
            size = flight.get.length.bit_length()
            known = self._latencies[size]
            if not flight.is_hedged and len(known) >= LEAST_KNOWN:
                if size not in after:
                    after[size] = HEDGE_AFTER * percentile(known, 0.95)
                found.append((flight, after[size]))
        return found

    def _hedges(self, now: float) -> list[Get]:
        gets = []
        for flight, after in self._hedgeable():
            left = [unit for unit in flight.get.units if unit.key in self._wanted]
            is_due = now >= flight.began + after and len(self._flights) < MOST_REQUESTS
            if is_due and left and self.counts.hedges + 1 <= HEDGE_SHARE * self.counts.requests:
                self.counts.hedges += 1
                gets.append(self._send(left, now))
                flight.is_hedged = self._flights[gets[-1].number].is_hedged = True
        return gets

    # ---- answers -------------------------------------------------------------------------------

    def arrived(
        self, number: int, wrong: Mapping[Key, int], now: float
    ) -> tuple[list[Unit], list[GivenUp]]:
        """Return the units of a complete answer that are still wanted, and those given up.

        Args:
            wrong: The checksums of units that are not as they were written. Such a unit is
                fetched again, until it arrives with the same wrong checksum twice.
        """
        flight = self._land(number, now)
        if flight is None:
            return [], []
        size, took = flight.get.length.bit_length(), now - flight.began
        self._latencies[size].append(took)
        self.counts.latencies.append(took)
        self._fastest[size] = min(took, self._fastest.get(size, took))
        self.counts.nbytes += flight.get.length
        self._probe_bytes += flight.get.length
        found, lost = [], []
        for unit in flight.get.units:
            known = self._wanted.get(unit.key)
            if known is None:
                continue
            checksum = wrong.get(unit.key)
            if checksum is None:
                found.append(unit)
                self.cancel(unit.key)
                continue
            self.counts.failed[WRONG] += 1
            known.tries += 1
            if checksum in known.sums or known.tries >= MOST_TRIES:
                lost.append(self._give_up(unit, WRONG, f"{checksum:08x}"))
            elif not known.flights:
                self._push(known)
            known.sums.add(checksum)
        return found, lost

    def failed(self, number: int, kind: str, message: str, now: float) -> list[GivenUp]:
        """Return the units of a failed request that are given up; the others are tried again."""
        flight = self._land(number, now)
        if flight is None:
            return []
        self.counts.failed[kind] += 1
        self.counts.lost_s += now - flight.began
        if kind == THROTTLED and now >= self._halved:  # once for all that were sent together
            self.limit = max(self.limit // 2, STEP_BYTES)
            self._halved = now + max(now - flight.began, FIRST_PAUSE_S)
            self._was_throttled = True
        self.must_renew |= kind == DENIED
        lost = []
        for unit in flight.get.units:
            known = self._wanted.get(unit.key)
            if known is None or known.flights:  # nobody wants it, or another request may bring it
                continue
            known.tries += 1
            is_final = kind in (MISSING, REFUSED, CHANGED) or (kind == DENIED and known.denied)
            if is_final or known.tries >= MOST_TRIES:
                lost.append(self._give_up(unit, kind, message))
                continue
            known.denied |= kind == DENIED
            pause = 0.0 if kind == DENIED else self._pause(known.tries)
            self.counts.lost_s += pause
            if kind == THROTTLED:
                self._resumes = max(self._resumes, now + pause)
            heapq.heappush(self._later, (now + pause, number, unit.key))
        return lost

    def _give_up(self, unit: Unit, kind: str, message: str) -> GivenUp:
        self.cancel(unit.key)
        return GivenUp(unit, kind, message)

    def _pause(self, tries: int) -> float:
        """Return a random pause.

        Its longest doubles with each try ("full jitter": Brooker, "Exponential Backoff And Jitter",
        2015).
        """
        return self._random.uniform(0, min(MOST_PAUSE_S, FIRST_PAUSE_S * 2**tries))

    def _land(self, number: int, now: float) -> _Flight | None:
        flight = self._flights.pop(number, None)
        if flight is not None:
            self.counts.busy_s += now - self._busy_since
            self._busy_since = now
            self._in_flight -= flight.get.length
            for unit in flight.get.units:
                if (known := self._wanted.get(unit.key)) is not None:
                    known.flights.discard(number)
        return flight


def _ends(flight: _Flight) -> float:
    return flight.began + TIMEOUT_S + flight.get.length / SLOWEST


def percentile(values: Iterable[float], share: float) -> float:
    """Return the value below which this share of the values is; at least one value."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
