"""What a worker does for a cache: a range of samples becomes one shard.

A sample that fails does not end its shard at once: the others are tried too, so that one run names
all that have to be fixed. A worker that dies leaves the index of the sample that it was at.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forebay.caching.index import Plan, shard_name
from forebay.caching.layout import MisfitError
from forebay.caching.writer import ShardWriter
from forebay.errors import FailuresError
from forebay.failures import message_of
from forebay.randomness import seed_generators, seed_of_text

# Failed samples of one shard that are named.
MOST_NAMED = 20


class ShardWork:
    """Makes one shard, for rows of "first" and "count".

    Args:
        dataset: What the samples come from.
        plan: How they are cut, and what is in them.
        marks: A folder for the index that each worker is at.
    """

    def __init__(self, dataset: Any, plan: Plan, marks: Path) -> None:
        self._dataset, self._plan, self._marks = dataset, plan, marks

    def __call__(self, row: dict[str, int], out: Any) -> None:
        """Write the shard.

        Raises:
            FailuresError: Samples failed; one line for each.
        """
        first, plan = row["first"], self._plan
        failed = FailedSamples()
        path = out.file(shard_name(first // plan.per_shard))
        with (
            _marked(self._marks / str(first)) as mark,
            ShardWriter(path, plan.structure, list(plan.specs), first) as writer,
        ):
            for index in range(first, first + row["count"]):
                mark(index)
                seed_generators(seed_of_text(str(index)))
                try:
                    sample = self._dataset[index]
                except Exception as error:  # noqa: BLE001 - whatever the user's code raises
                    failed.add(index, error)
                    continue
                try:
                    writer.add(sample)
                except MisfitError as error:
                    failed.add(index, error)
        if failed.count:
            raise FailuresError(str(failed)) from failed.first


class FailedSamples:
    """The failed samples of one shard: the first ones by name, and how many there are.

    An exception holds the frames, and so the data, of its sample: only the first one is kept.

    Attributes:
        count: How many were added.
        first: The exception of the first one.
    """

    def __init__(self) -> None:
        self.count = 0
        self.first: Exception | None = None
        self._lines: list[str] = []

    def add(self, index: int, error: Exception) -> None:
        """Add a sample."""
        self.count += 1
        if self.first is None:
            self.first = error
        if self.count <= MOST_NAMED:
            words = message_of(error).partition("\n")[0]
            kind = "" if isinstance(error, MisfitError) else f"{type(error).__name__}: "
            self._lines.append(f"sample {index}: {kind}{words}"[:1000])

    def __str__(self) -> str:
        """Return a line for each sample that is named; `sample_ranges.py` reads them."""
        more = self.count - len(self._lines)
        return "\n".join(self._lines + [f"and {more} more samples"] * (more > 0))


@contextmanager
def _marked(path: Path) -> Iterator[Callable[[int], None]]:
    """Keep an index in a file for as long as this process lives and is at it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        yield lambda index: _put(file, index)
    finally:
        os.close(file)
        path.unlink(missing_ok=True)


def _put(file: int, index: int) -> None:
    os.pwrite(file, b"%20d" % index, 0)
