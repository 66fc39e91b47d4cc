"""Write samples to one shard, an Arrow file, one record batch at a time.

    sample ── leaves ──> columns ── full ──> record batch ──> file
                            └── a leaf that does not fit its column: rewrite the file, wider

The types of a sample's leaves are known only once it is loaded, but an Arrow file has one schema.
So a shard begins with the specs of the samples that were probed first. If a later one does not fit
(another shape, a string that is not UTF-8), the rows written so far are read and written again.
"""

from __future__ import annotations

import json
import os
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from forebay.base.datasets import OwnedGenerators
from forebay.base.randomness import seed_generators, seed_of_text
from forebay.caching import columns
from forebay.caching.blocks import BLOCK, MOST_BLOCK_BYTES, checksums, shard_name
from forebay.caching.columns import CachePlan, Column, Spec, spec_of, widened
from forebay.caching.layout import MisfitError, Node, leaves_of, names_of, to_json
from forebay.caching.reader import FORMAT, KEY, Shard, record_batches
from forebay.errors import FailuresError
from forebay.failures import Failure, failure_to_json, message_of

# Size of a block in bytes: a larger sample ends its block.
BATCH_BYTES = 4 * 2**20


def specs_of(names: list[str], leaves: list[Any]) -> list[Spec]:
    """Return the specs of a sample's leaves."""
    return [_named(spec_of, *pair) for pair in zip(names, leaves, strict=True)]


def wider(names: list[str], specs: list[Spec], others: list[Spec]) -> list[Spec]:
    """Return specs that fit both."""
    return [_named(widened, *each) for each in zip(names, specs, others, strict=True)]


def _named(rule: Callable[..., Spec], name: str, *given: Any) -> Spec:
    try:
        return rule(*given)
    except MisfitError as error:
        raise MisfitError(f"{name!r} {error}") from None


class ShardWriter:
    """Writes one shard; as a context manager, finishes the file unless an exception is raised."""

    def __init__(self, path: Path, structure: Node, specs: list[Spec], first: int) -> None:
        self._path, self._structure, self._first = path, structure, first
        self._names = names_of(structure)
        self._begin(specs)

    def _begin(self, specs: list[Spec]) -> None:
        self.specs = specs
        self._columns = [Column(spec) for spec in specs]
        self._next, self._rows = self._first, 0  # the next block's first sample, and its samples
        self.firsts: list[int] = []  # of each block, its first sample
        header = {
            "format": FORMAT,
            "structure": to_json(self._structure),
            "columns": [columns.to_json(spec) for spec in specs],
            "first": self._first,
        }
        schema = columns.schema_of(self._names, specs)
        self._schema = schema.with_metadata({KEY: json.dumps(header)})
        self._file = self._path.open("wb")
        self._writer = pa.ipc.new_file(self._file, self._schema)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._file.close()

    def add(self, sample: Any) -> None:
        """Append a sample."""
        leaves = leaves_of(self._structure, sample)
        specs = specs_of(self._names, leaves)
        if specs != self.specs:
            specs = wider(self._names, self.specs, specs)
            if specs != self.specs:
                self._restart_wider(specs)
        self._append(leaves)

    def _append(self, leaves: list[Any]) -> None:
        for column, leaf in zip(self._columns, leaves, strict=True):
            column.add(leaf)
        self._rows += 1
        # An empty sample is a row, too.
        if 8 * self._rows + sum(column.nbytes for column in self._columns) >= BATCH_BYTES:
            self._flush()

    def _flush(self) -> None:
        self.firsts.append(self._next)
        self._next, self._rows = self._next + self._rows, 0
        batch = pa.record_batch([each.taken() for each in self._columns], schema=self._schema)
        if batch.nbytes > MOST_BLOCK_BYTES:
            raise MisfitError(
                f"the sample has about {batch.nbytes:,} bytes; a cache can store at most "
                f"{MOST_BLOCK_BYTES:,}"
            )
        self._writer.write_batch(batch)

    def _finish(self) -> None:
        if self._rows:
            self._flush()
        self._writer.close()

    def _restart_wider(self, specs: list[Spec]) -> None:
        self._finish()
        self._file.close()
        narrow = self._path.with_name(f"{self._path.name}.narrow")
        os.rename(self._path, narrow)
        self._begin(specs)
        shard = Shard(narrow)
        for row in range(len(shard)):
            self._append(shard.leaves(row))
        narrow.unlink()


# ---- shard job -----------------------------------------------------------------------------------
# The job of a cache's worker: write a range of samples to one shard.
#
# After a sample fails, the others of its shard are still tried, so that one run names all samples
# that must be fixed. A worker that dies leaves the index of the sample it was processing.

# Number of failed samples of a shard whose messages are kept, and the characters of each.
MOST_DESCRIBED = 20
MOST_TEXT = 1000


class ShardWork:
    """Makes one shard, for rows of "first" and "count"."""

    def __init__(self, dataset: Any, plan: CachePlan, marks: Path) -> None:
        self._dataset, self._plan, self._marks = dataset, plan, marks
        self._owned: OwnedGenerators | None = None  # found in the worker

    def __call__(self, row: dict[str, int], out: Any) -> dict[str, Any]:
        """Write the shard; return the record of it that the index needs."""
        if self._owned is None:
            self._owned = OwnedGenerators(dataset=self._dataset)
        first, plan = row["first"], self._plan
        failures: list[Failure] = []
        failed, cause = 0, None
        path = out.file(shard_name(first // plan.per_shard))
        with (
            _marked(self._marks / str(first)) as mark,
            ShardWriter(path, plan.structure, list(plan.specs), first) as writer,
        ):
            for index in range(first, first + row["count"]):
                mark(index)
                error = self._add(index, writer)
                if error is not None:
                    failed, cause = failed + 1, cause or error
                    if failed <= MOST_DESCRIBED:
                        failures.append(sample_failure(index, error))
        if failed:
            more = failed - len(failures)
            lines = [*map(line_of, failures), *[f"and {more} more of this shard"] * (more > 0)]
            failure = FailuresError("\n".join(lines))
            failure.record = {"failures": [*map(failure_to_json, failures)], "failed": failed}
            raise failure from cause
        return record_of(path, writer)

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


def record_of(path: Path, writer: ShardWriter) -> dict[str, Any]:
    """Return what the index of a cache says of a shard, JSON-serializable."""
    with (
        path.open("rb") as file,
        mmap(file.fileno(), 0, access=ACCESS_READ) as whole,
        memoryview(whole) as data,
    ):
        places = record_batches(data)
        found, outside = checksums(data, places)
    blocks = np.zeros(len(places), BLOCK)
    blocks["first"], blocks["crc32"] = writer.firsts, found
    blocks["offset"], blocks["length"] = zip(*places, strict=True)
    specs = [columns.to_json(spec) for spec in writer.specs]
    return {"blocks": b64encode(blocks.tobytes()).decode(), "outside": outside, "columns": specs}


def sample_failure(index: int, error: BaseException) -> Failure:
    """Return the failure of a sample, with the first line of its message."""
    words = next(iter(message_of(error).splitlines()), "")[:MOST_TEXT]
    return Failure("exception", type(error).__name__, words, source=index)


def line_of(failure: Failure) -> str:
    """Return the failure of a sample in one line; what cannot be cached needs no type of error."""
    return str(failure).replace(f"{MisfitError.__name__}: ", "", 1)[:MOST_TEXT]


@contextmanager
def _marked(path: Path) -> Iterator[Callable[[int], object]]:
    """Yield a function that stores an index in a file, which remains if the process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        yield lambda index: os.pwrite(file, b"%20d" % index, 0)
    finally:
        os.close(file)
        path.unlink(missing_ok=True)
