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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from forebay.caching import columns
from forebay.caching.columns import Column, Spec, nbytes_of, spec_of, widened
from forebay.caching.sample_layout import MisfitError, Node, leaves_of, names_of, to_json
from forebay.caching.shard_reader import FORMAT, KEY, Shard

# Size of a record batch in bytes; a larger sample is a record batch by itself.
BATCH_BYTES = 8 * 2**20


def specs_of(names: list[str], leaves: list[Any]) -> list[Spec]:
    """Return the specs of a sample's leaves.

    Raises:
        MisfitError: A cache cannot restore one of them.
    """
    return [_named(spec_of, *pair) for pair in zip(names, leaves, strict=True)]


def wider(names: list[str], specs: list[Spec], others: list[Spec]) -> list[Spec]:
    """Return specs that fit both.

    Raises:
        MisfitError: There is no such spec for a leaf.
    """
    return [_named(widened, *each) for each in zip(names, specs, others, strict=True)]


def _named(rule: Callable[..., Spec], name: str, *given: Any) -> Spec:
    try:
        return rule(*given)
    except MisfitError as error:
        raise MisfitError(f"{name!r} {error}") from None


class ShardWriter:
    """Writes one shard; a context manager, which finishes the file unless an exception is raised.

    Args:
        path: The file to write.
        structure: The structure of every sample.
        specs: The types of its leaves, as far as known.
        first: The index of the first sample.
    """

    def __init__(self, path: Path, structure: Node, specs: list[Spec], first: int) -> None:
        self._path, self._structure, self._first = path, structure, first
        self._names = names_of(structure)
        self._begin(specs)

    def _begin(self, specs: list[Spec]) -> None:
        self.specs = specs
        self._columns = [Column(spec) for spec in specs]
        self._nbytes = 0
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
        """Append a sample.

        Raises:
            MisfitError: It cannot be cached, or has another structure; nothing was appended.
        """
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
        self._nbytes += 8 + sum(map(nbytes_of, leaves))  # an empty sample is a row, too
        if self._nbytes >= BATCH_BYTES:
            self._flush()

    def _flush(self) -> None:
        arrays = [column.taken() for column in self._columns]
        self._writer.write_batch(pa.record_batch(arrays, schema=self._schema))
        self._nbytes = 0

    def _finish(self) -> None:
        if self._nbytes:
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
