"""The memory that workers share with no other process, and which objects it is copies of. PURE.

Reading a Python object writes its reference count, so a forked worker copies the pages of a long
list as it reads its items.
"""

from __future__ import annotations

from typing import NamedTuple

from forebay.base.formatting import byte_size

# What each worker has to have of its own before it is worth a sentence, and the share of it that
# the objects of the dataset have to take.
LEAST_COPIED_BYTES = 64 << 20
LEAST_SHARE = 0.25


class WorkerMemory:
    """What each worker has of its own, as measured last, and how fast that grows."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[float, int, float]] = {}  # when, bytes, bytes per second

    def add(self, worker_id: int, at: float, nbytes: int, began_at: float) -> None:
        """Record a measurement; `began_at` is when the loader began."""
        before_at, before, _ = self._last.get(worker_id, (began_at, 0, 0.0))
        if nbytes < before:  # it was replaced, or gave memory back
            before_at, before = began_at, 0
        rate = (nbytes - before) / max(at - before_at, 1e-9)
        self._last[worker_id] = at, nbytes, rate

    @property
    def nbytes(self) -> int:
        """The bytes of all workers together; 0 where little can have been copied."""
        return sum(each for _, each, _ in list(self._last.values()))

    @property
    def rate(self) -> float:
        """The bytes per second by which they grow, all together."""
        return sum(each for _, _, each in list(self._last.values()))

    @property
    def each(self) -> float:
        """The bytes of a worker, on average."""
        return self.nbytes / max(len(self._last), 1)

    @property
    def is_large(self) -> bool:
        """Whether each worker has so much that objects of the dataset may be the cause."""
        return self.each >= LEAST_COPIED_BYTES

    def note(self, objects: HeldObjects | None) -> str:
        """Return what of the dataset is copied into each worker, and what helps; "" if little."""
        if objects is None or not self.is_large:
            return ""
        if objects.nbytes < LEAST_SHARE * self.each:
            return ""
        grows = byte_size(max(self.rate, 0.0) / len(self._last))
        helps = "is shared by all workers"
        if objects.packed_bytes is not None:
            helps = f"takes {byte_size(objects.packed_bytes)}, once for all workers"
        return (
            f"Each worker has {byte_size(self.each)} of memory of its own, {grows}/s more: reading "
            f"a Python object writes its reference count, which copies it. {objects.path} is "
            f"{objects.what}, about {byte_size(objects.nbytes)}; {objects.remedy} {helps}."
        )


class HeldObjects(NamedTuple):
    """Many Python objects that a dataset holds.

    Attributes:
        path: Where, such as "dataset.items".
        what: Such as "a list of 3,000,000 dicts".
        nbytes: What they take, about.
        packed_bytes: What they take in a `PackedSequence`, about; None if they cannot be pickled.
        remedy: What makes such a sequence of them, as code.
    """

    path: str
    what: str
    nbytes: int
    packed_bytes: int | None
    remedy: str
