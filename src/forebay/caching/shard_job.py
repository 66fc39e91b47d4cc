"""The job of a cache's worker: write a range of samples to one shard.

After a sample fails, the others of its shard are still tried, so that one run names all samples
that must be fixed. A worker that dies leaves the index of the sample it was processing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from forebay.caching.index import CachePlan, shard_name
from forebay.caching.sample_layout import MisfitError
from forebay.caching.writer import ShardWriter
from forebay.errors import FailuresError
from forebay.failures import message_of
from forebay.owned_generators import OwnedGenerators
from forebay.randomness import seed_generators, seed_of_text

# Number of failed samples of a shard whose messages are kept.
MOST_DESCRIBED = 20
# Replaces the exceptions of the others, whose frames would keep the data of their samples alive.
_COUNTED = FailuresError()


class ShardWork:
    """Makes one shard, for rows of "first" and "count".

    Args:
        dataset: The source of the samples.
        plan: How it is divided, and the structure of the samples.
        marks: A folder for the index of the sample that each worker is processing.
    """

    def __init__(self, dataset: Any, plan: CachePlan, marks: Path) -> None:
        self._dataset, self._plan, self._marks = dataset, plan, marks
        self._owned: OwnedGenerators | None = None  # found in the worker

    def __call__(self, row: dict[str, int], out: Any) -> None:
        """Write the shard.

        Raises:
            FailuresError: Samples failed; one line for each.
        """
        if self._owned is None:
            self._owned = OwnedGenerators(dataset=self._dataset)
        first, plan = row["first"], self._plan
        failed: dict[int, BaseException] = {}
        path = out.file(shard_name(first // plan.per_shard))
        with (
            _marked(self._marks / str(first)) as mark,
            ShardWriter(path, plan.structure, list(plan.specs), first) as writer,
        ):
            for index in range(first, first + row["count"]):
                mark(index)
                error = self._add(index, writer)
                if error is not None:
                    failed[index] = error if len(failed) < MOST_DESCRIBED else _COUNTED
        if failed:
            raise FailuresError(describe_failed(failed)) from next(iter(failed.values()))

    def _add(self, index: int, writer: ShardWriter) -> BaseException | None:
        """Add a sample to the shard, or return why it failed."""
        seed = seed_of_text(str(index))
        seed_generators(seed)
        if self._owned is not None:
            self._owned.seed(seed)
        try:
            sample = self._dataset[index]
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - SystemExit too
            return error
        try:
            writer.add(sample)
        except MisfitError as error:
            return error
        return None


def describe_failed(failed: dict[int, BaseException]) -> str:
    """Return a line for each of the first samples that failed, then the number of the others."""
    lines = []
    for index, error in islice(failed.items(), MOST_DESCRIBED):
        words = next(iter(message_of(error).splitlines()), "")
        kind = "" if isinstance(error, MisfitError) else f"{type(error).__name__}: "
        lines.append(f"sample {index}: {kind}{words}"[:1000])
    more = len(failed) - len(lines)
    return "\n".join([*lines, f"and {more} more of this shard"] if more else lines)


def read_description(text: str) -> tuple[list[int], list[str], int]:
    """Return what `describe_failed` wrote: indices, their lines, and the number of all samples."""
    found = re.findall(r"^(sample (\d+): .*)$", text, re.MULTILINE)
    more = re.search(r"^and (\d+) more of this shard$", text, re.MULTILINE)
    count = len(found) + (int(more[1]) if more else 0)
    return [int(index) for _, index in found], [line for line, _ in found], count


@contextmanager
def _marked(path: Path) -> Iterator[Callable[[int], None]]:
    """Yield a function that stores an index in a file, which remains if the process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        yield lambda index: _put(file, index)
    finally:
        os.close(file)
        path.unlink(missing_ok=True)


def _put(file: int, index: int) -> None:
    os.pwrite(file, b"%20d" % index, 0)
