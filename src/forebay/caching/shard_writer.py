"""Write the shards of a cache, one record batch at a time: the job of its workers.

    sample ── leaves ──> columns ── full ──> record batch ──> file
                            └── a sample that does not fit: begin another file, with a wider
                                layout; at the end, all rows are written with the widest

The types of a sample's leaves are known only once it is loaded, but an Arrow file has one schema.
So a shard begins with the layout of the samples that were probed first. A later sample may not fit:
another shape, a string that is not UTF-8, a key more. However often that happens, a row is written
twice at most.

After a sample fails, the others of its shard are still tried, so that one run names all samples
that must be fixed. A worker that dies leaves the index of the sample it was processing.
"""

from __future__ import annotations

import json
import os
import zlib
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from forebay.base.files import local_file
from forebay.base.generators import OwnedGenerators
from forebay.base.process import is_worker
from forebay.base.randomness import seed_generators, seed_of_text
from forebay.base.value_classes import MisfitError
from forebay.base.value_inference import named_misfit, spec_of, widened
from forebay.base.value_types import Spec, schema_of
from forebay.caching.arrow_messages import record_batches
from forebay.caching.arrow_shards import (
    FORMAT,
    KEY,
    BlockBuilder,
    Shard,
)
from forebay.caching.index import CachePlan, Layout
from forebay.caching.layout import BLOCK, MOST_BLOCK_BYTES, shard_name
from forebay.caching.structure import (
    MISSING,
    carried,
    generalized,
    leaves_of,
    names_of,
    structure_of,
)
from forebay.errors import FailuresError, message_of
from forebay.failures import Failure, failure_to_json
from forebay.ledger.records import EarlierRows, Taken


def specs_of(names: list[str], leaves: list[Any]) -> list[Spec]:
    """Return the specs of a sample's leaves."""
    return [_named(spec_of, *pair) for pair in zip(names, leaves, strict=True)]


def _named(rule: Callable[..., Spec], name: str, *given: Any) -> Spec:
    try:
        return rule(*given)
    except MisfitError as error:
        raise named_misfit(name, error) from None


def layout_of(samples: Sequence[Any]) -> Layout:
    """Return the layout that holds some samples."""
    node = structure_of(samples[0])
    for sample in samples[1:]:
        if leaves_of(node, sample) is None:
            node = generalized(node, sample)
    names = names_of(node)
    specs = [Spec("none")] * len(names)
    for sample in samples:
        own = specs_of(names, leaves_of(node, sample) or [])
        specs = [_named(widened, *each) for each in zip(names, specs, own, strict=True)]
    return Layout(node, specs)


class ShardWriter:
    """Writes one shard; as a context manager, finishes the file unless an exception is raised.

    Attributes:
        layout: What the shard has, at the end.
        compression: How its blocks are compressed.
        firsts: Of each block, its first sample.
        sizes: Of each block, its bytes without compression.
    """

    def __init__(
        self, path: Path, layout: Layout, first: int, compression: str | None = None
    ) -> None:
        self._path, self._first, self.compression = path, first, compression
        self._earlier: list[Path] = []  # files of this shard with narrower layouts
        self._begin(layout)

    def _begin(self, layout: Layout) -> None:
        self.layout, self._names = layout, layout.names
        self._block = BlockBuilder(layout)
        self._next, self.firsts, self.sizes = self._first, list[int](), list[int]()
        header = {"format": FORMAT, **layout.to_json(), "first": self._first}
        schema = schema_of(self._names, layout.specs).with_metadata({KEY: json.dumps(header)})
        self._file = self._path.open("wb")
        # A sample may have 2**31 numbers.
        options = pa.ipc.IpcWriteOptions(allow_64bit=True, compression=self.compression)
        self._writer = pa.ipc.new_file(self._file, schema, options=options)

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
        node, specs = self.layout.structure, self.layout.specs
        leaves = leaves_of(node, sample)
        if leaves is None:
            node = generalized(node, sample)
            leaves = leaves_of(node, sample)
            assert leaves is not None, "it holds this sample"
            specs = carried(node, self.layout.structure, iter(specs))
        names = names_of(node)
        own_specs = specs_of(names, leaves)
        if own_specs != specs:
            specs = [_named(widened, *each) for each in zip(names, specs, own_specs, strict=True)]
        if (layout := Layout(node, specs)) != self.layout:
            self._set_aside(layout)
        if self._block.add(leaves):
            self._flush()

    def _flush(self) -> None:
        self.firsts.append(self._next)
        self._next += self._block.rows
        batch = self._block.taken()
        if batch.nbytes > MOST_BLOCK_BYTES:
            raise MisfitError(
                f"the sample has about {batch.nbytes:,} bytes; a cache can store at most "
                f"{MOST_BLOCK_BYTES:,}"
            )
        self._writer.write_batch(batch)
        self.sizes.append(pa.ipc.get_record_batch_size(batch))

    def _close(self) -> None:
        if self._block.rows:
            self._flush()
        self._writer.close()
        self._file.close()

    def _set_aside(self, layout: Layout) -> None:
        """Continue in another file, with another layout."""
        if not self.firsts and not self._block.rows:
            self._file.close()
            self._begin(layout)
            return
        self._close()
        narrow = self._path.with_name(f"{self._path.name}.narrow{len(self._earlier)}")
        os.rename(self._path, narrow)
        self._earlier.append(narrow)
        self._begin(layout)

    def _finish(self) -> None:
        if not self._earlier:
            self._close()
            return
        self._set_aside(self.layout)
        self._file.close()
        self._begin(self.layout)
        for path in self._earlier:
            part = Shard(path, compression=self.compression)
            for row in range(len(part)):
                leaves = leaves_of(self.layout.structure, part.sample(row))
                if self._block.add(leaves or ()):
                    self._flush()
        self._close()
        for path in self._earlier:
            path.unlink()


# Number of failed samples of a shard whose messages are kept, and the characters of each.
MOST_DESCRIBED = 20
MOST_TEXT = 1000


class ShardWork:
    """Makes one shard, for rows of "first" and "count".

    Samples that `earlier` has are taken over from shards of an earlier run.
    """

    def __init__(
        self,
        dataset: Any,
        plan: CachePlan,
        marks: Path,
        earlier: EarlierRows,
        name_of: Callable[[int], str | None],
    ) -> None:
        self._dataset, self._plan, self._marks = dataset, plan, marks
        self._earlier, self._name_of = earlier, name_of
        self._owned: OwnedGenerators | None = None  # found in the worker
        self._has_read = False

    def __call__(self, row: dict[str, int], out: Any) -> dict[str, Any]:
        """Write the shard; return the record of it that the index needs."""
        if self._owned is None:
            self._owned = OwnedGenerators(dataset=self._dataset)
        first, plan, codec = row["first"], self._plan, self._plan.compression
        failures: list[Failure] = []
        failed, cause = 0, None
        path = out.file(shard_name(first // plan.per_shard))
        earlier = self._earlier.taken(first, row["count"])
        with (
            _marked(self._marks / str(first)) as mark,
            earlier_samples(earlier, partial(Shard, compression=codec)) as sample_at,
            ShardWriter(path, plan.layout, first, codec) as writer,
        ):
            for index in range(first, first + row["count"]):
                sample = sample_at(index)
                if sample is not MISSING:
                    writer.add(sample)
                    continue
                mark(index)
                error = self._add(index, writer)
                if error is not None:
                    failed, cause = failed + 1, cause or error
                    if failed <= MOST_DESCRIBED:
                        failures.append(sample_failure(index, error).named(self._name_of(index)))
        if failed:
            more = failed - len(failures)
            lines = [*map(line_of, failures), *[f"and {more} more of this shard"] * (more > 0)]
            failure = FailuresError("\n".join(lines))
            failure.record = {"failures": [*map(failure_to_json, failures)], "failed": failed}
            raise failure from cause
        return shard_record(path, writer)

    def _add(self, index: int, writer: ShardWriter) -> BaseException | None:
        """Add a sample to the shard, or return why it failed."""
        seed = seed_of_text(str(index))
        owned = self._owned
        assert owned is not None
        try:
            with nullcontext() if is_worker() else owned.kept():
                seed_generators(seed)
                owned.seed(seed)
                sample = self._dataset[index]
            if not self._has_read:
                self._has_read = True
                if (more := owned.grown()) is not None:  # made when they were needed
                    self._owned = more
                    return self._add(index, writer)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - SystemExit too
            return error
        try:
            writer.add(sample)
        except MisfitError as error:
            return error
        return None


@contextmanager
def earlier_samples(
    taken: Sequence[Taken], open_shard: Callable[[Path], Any]
) -> Iterator[Callable[[int], Any]]:
    """Yield what returns a sample that a shard of an earlier run has; `MISSING` for another one.

    Args:
        open_shard: Opens a shard.
    """
    places: dict[int, tuple[Any, int]] = {}
    with ExitStack() as stack:
        for each in taken:
            shard = open_shard(stack.enter_context(local_file(each.location)))
            rows = zip(each.indices, each.rows, strict=True)
            places.update((index, (shard, row)) for index, row in rows if row < len(shard))

        def sample(index: int) -> Any:
            shard, row = places.get(index, (None, 0))
            return MISSING if shard is None else shard.sample(row)

        yield sample


def shard_record(path: Path, writer: ShardWriter) -> dict[str, Any]:
    """Return what the index of a cache says of a shard, JSON-serializable."""
    data = np.memmap(path, np.uint8, "r").data
    is_compressed = writer.compression is not None
    places = record_batches(data, is_compressed=is_compressed)
    blocks = np.zeros(len(places), BLOCK)
    blocks["first"] = writer.firsts
    blocks["crc32"] = [zlib.crc32(data[start : start + length]) for start, length in places]
    blocks["offset"], blocks["length"] = zip(*places, strict=True)
    blocks["nbytes"] = writer.sizes if is_compressed else blocks["length"]
    known = writer.layout.to_json()
    return {"blocks": b64encode(blocks.tobytes()).decode(), **known}


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
