"""Parts of a record that stay small however long a run is: spans, slowest entries, a histogram."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any, Generic, Protocol, Self, TypeVar

# The most spans of a run; when there would be more, each two neighbours become one.
MAX_SPANS = 512
KEPT_SLOWEST = 20
# Bin `k` of a histogram counts durations below 2**k microseconds that are not in bin `k - 1`.
DURATION_BINS = 64

Entry = TypeVar("Entry")


class Mergeable(Protocol):
    """What happened in one span of a run."""

    def add(self, later: Any, /) -> None:
        """Merge the span that follows into this one."""

    def following(self) -> Self:
        """Return the span that follows, in which nothing has happened yet."""
        ...


Span = TypeVar("Span", bound=Mergeable)


class Spans(Generic[Span]):
    """A whole run in at most `MAX_SPANS` spans of equal length, which grows with the run.

    Args:
        began_at: When the run began.
        seconds: Length of each span to begin with.
        before: The span before the first.

    Attributes:
        seconds: Length of each span at present.
    """

    def __init__(self, began_at: float, seconds: float, before: Span) -> None:
        self.seconds = seconds
        self._began_at, self._before = began_at, before
        self._spans: list[Span] = []

    def __len__(self) -> int:
        """Return the number of spans up to the last in which something happened."""
        return len(self._spans)

    def __iter__(self) -> Iterator[Span]:
        """Return an iterator over the spans, in order of time."""
        return iter(list(self._spans))  # another thread may add some

    def at(self, moment: float) -> Span:
        """Return the span of a moment, making spans longer where there would be too many."""
        index = max(int((moment - self._began_at) / self.seconds), 0)
        while index >= MAX_SPANS:
            merged = self._spans[::2]
            for span, later in zip(merged, self._spans[1::2], strict=False):
                span.add(later)
            self._spans, self.seconds = merged, self.seconds * 2
            index = int((moment - self._began_at) / self.seconds)
        while len(self._spans) <= index:
            last = self._spans[-1] if self._spans else self._before
            self._spans.append(last.following())
        return self._spans[index]


class Slowest(Generic[Entry]):
    """The `KEPT_SLOWEST` entries that took longest.

    Attributes:
        least: The seconds that an entry has to exceed to be kept.
    """

    def __init__(self) -> None:
        self.least = -1.0
        self._heap: list[tuple[float, int, Entry]] = []  # the fastest of them first
        self._count = 0

    def add(self, seconds: float, entry: Entry) -> None:
        """Keep an entry if it is one of the slowest; of equally slow ones, the first."""
        if seconds <= self.least:
            return
        self._count += 1
        item = seconds, -self._count, entry  # entries may not be comparable
        if len(self._heap) < KEPT_SLOWEST:
            heapq.heappush(self._heap, item)
        else:
            heapq.heapreplace(self._heap, item)
        if len(self._heap) == KEPT_SLOWEST:
            self.least = self._heap[0][0]

    def __iter__(self) -> Iterator[tuple[float, Entry]]:
        """Return an iterator over seconds and entry, slowest first."""
        return iter([(seconds, entry) for seconds, _, entry in sorted(self._heap, reverse=True)])


def duration_bin(seconds: float) -> int:
    """Return the bin of a duration in a histogram; see `DURATION_BINS`."""
    return int(seconds * 1e6).bit_length()
