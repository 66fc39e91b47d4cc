"""Checkpoints of a part that is being made: what a kill of a slow model leaves for the next run.

    part, every 5 s ──> .forebay/checkpoints/KEY-0-192, KEY-192-448, …
    the same call ────> their rows and failures, and the model from sample 448 of the part on
    part committed ───> removed

A checkpoint ends where a batch ends, so the same batches follow, and the part gets the same bytes.
Its key is a hash of the work and of the samples: a part of other samples finds no checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from forebay.base.file_stores import Folder, Store, folder_at
from forebay.base.files import is_url, local_path, location_in
from forebay.base.output_names import PRIVATE
from forebay.base.value_types import schema_of
from forebay.errors import OutputError
from forebay.failures import Failure, failure_from_json, failure_to_json
from forebay.ledger.database import DAMAGES
from forebay.ledger.records import EarlierRows, Todo
from forebay.predicting.part_writer import Rows, types_from_json, types_to_json
from forebay.runs.ranges import range_of
from forebay.runs.run import Session
from forebay.runs.source_code import hash_of_array

# Seconds between two checkpoints of a part: a kill costs these, and the batch after them.
EVERY_S = 5.0
# More if writing one takes long: at least so many times its duration is for the model.
REST = 10
# Rows that wait for a checkpoint; where they come faster than they can be written, there is none.
MOST_HELD_BYTES = 32 * 2**20
# A file may not have more, whoever wrote it.
_MOST_BYTES = 1 << 32


class Checkpoint(NamedTuple):
    """What the model returned for consecutive samples of those to be predicted for a part.

    Attributes:
        first: The place of the first of these samples.
        end: The place after the last one.
        rows: What it returned, batch by batch.
    """

    first: int
    end: int
    rows: list[Rows]
    failures: list[Failure]

    def to_bytes(self) -> bytes:
        """Return a line of JSON, and for each batch an Arrow stream."""
        head, streams = [], []
        for rows in self.rows:
            sink = pa.BufferOutputStream()
            table = pa.table(rows.columns)
            with pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
            streams.append(sink.getvalue().to_pybytes())
            head.append((rows.indices, types_to_json(rows.types), len(streams[-1])))
        text = json.dumps({"rows": head, "failures": [*map(failure_to_json, self.failures)]})
        return b"".join([text.encode(), b"\n", *streams])

    @classmethod
    def from_bytes(cls, data: bytes, first: int, samples: Sequence[int]) -> Checkpoint:
        """Return what `to_bytes` wrote of samples; raise one of `DAMAGES` for anything else."""
        at = data.index(b"\n") + 1
        head, rows = json.loads(data[:at]), list[Rows]()
        for given, described, nbytes in head["rows"]:
            types, stream = types_from_json(described), pa.py_buffer(data[at : at + nbytes])
            try:
                with pa.ipc.open_stream(stream) as reader:
                    table = reader.read_all()
                table.validate(full=True)
            except pa.ArrowException as error:
                raise ValueError(str(error)) from error
            wanted = schema_of([*types], [*types.values()])
            if table.schema != wanted or len(table) != len(given):
                raise ValueError(f"{len(table)} rows of {table.schema}")
            columns = dict(zip(table.column_names, table.columns, strict=True))
            rows.append(Rows([*map(int, given)], types, columns))
            at += nbytes
        failures = [*map(failure_from_json, head["failures"])]
        found = sorted(chain(*(each.indices for each in rows), (one.index for one in failures)))
        if found != [*samples] or at != len(data):
            raise ValueError(f"samples {found[:1]} to {found[-1:]}, {len(data)} bytes")
        return cls(first, first + len(samples), rows, failures)


class Checkpoints:
    """The checkpoints in an output folder, local or a URL. Picklable.

    Args:
        keys: Of each part that is to be made, by its first sample.
        skips_failures: Whether those in which a sample failed do not count.
    """

    def __init__(
        self, output: str, keys: Mapping[int, str], *, skips_failures: bool = False
    ) -> None:
        self._folder = local_path(location_in(output, f"{PRIVATE}/checkpoints"))
        self._keys, self._skips_failures = keys, skips_failures
        self.every_s, self.rest = EVERY_S, REST  # also in a worker

    @cached_property
    def _place(self) -> Folder | Store:
        return folder_at(self._folder)

    def read(
        self, part: int, samples: Sequence[int], names: Collection[str] | None = None
    ) -> list[Checkpoint]:
        """Return the checkpoints of a part, one after the other from the first sample on.

        Args:
            part: The first sample of the whole part.
            samples: Those of the part that are to be predicted.
            names: The names of the checkpoints of all parts; None to list them.
        """
        names, found = self.names() if names is None else names, list[Checkpoint]()
        key, at = self._keys[part], 0
        while True:
            begun = f"{key}-{at}-"
            rests = (name[len(begun) :] for name in names if name.startswith(begun))
            ends = [int(rest) for rest in rests if rest.isdecimal()]
            end = max(ends, default=0)
            if not at < end <= len(samples):
                return found
            data = self._place.read(f"{begun}{end}", _MOST_BYTES)
            try:
                checkpoint = Checkpoint.from_bytes(data or b"", at, samples[at:end])
            except DAMAGES:  # the samples are predicted again
                return found
            if checkpoint.failures and self._skips_failures:
                return found
            found.append(checkpoint)
            at = end

    def write(self, part: int, checkpoint: Checkpoint) -> None:
        """Write a checkpoint of a part, which is on the disk afterwards."""
        if not is_url(self._folder):
            os.makedirs(self._folder, exist_ok=True)
        name = f"{self._keys[part]}-{checkpoint.first}-{checkpoint.end}"
        self._place.write(name, checkpoint.to_bytes())

    def remove(self, parts: Iterable[int]) -> None:
        """Remove those of the parts that begin with these samples."""
        keys = {self._keys[first] for first in parts}
        self._remove([name for name in self.names() if name.partition("-")[0] in keys])

    def _remove_others(self) -> None:
        """Remove those of parts that are not to be made, or were to be made otherwise."""
        keys = {*self._keys.values()}
        self._remove([name for name in self.names() if name.partition("-")[0] not in keys])

    def _remove(self, names: Sequence[str]) -> None:
        if names:
            self._place.remove(names)

    def names(self) -> Collection[str]:
        """Return the names of the checkpoints of all parts, and of what a kill left of one."""
        if not is_url(self._folder) and not os.path.lexists(self._folder):
            return ()
        try:
            return [name for name, _ in self._place.files()]
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise OutputError(
                f"{self._place.locate('')!r} cannot be read: {error.strerror}\n"
                "  Check its permissions and the disk; the same call continues."
            ) from error


def checkpoints_of(
    session: Session,
    todo: Sequence[Todo],
    earlier: EarlierRows,
    *,
    skips_failures: bool = False,
) -> Checkpoints:
    """Return the checkpoints of the parts that are to be made, after removing all other files.

    The key of a part is a hash of what makes it: the state of the work; which
    samples it has, by place and identity, and which of them are taken over from earlier files.
    """
    keys: dict[int, str] = {}
    if todo:
        identities = {each.ordinal: each.identity for each in session.ledger.listed()}
    for each in todo:
        first, count = range_of(each.row)
        left = earlier.left(first, count)
        left = left if type(left) is range else hash_of_array(np.array(left))
        text = f"{session.state}\n{each.row}\n{identities[each.ordinal]}\n{left}"
        keys[first] = hashlib.sha256(text.encode()).hexdigest()[:32]
    found = Checkpoints(session.output, keys, skips_failures=skips_failures)
    found._remove_others()
    return found


class PartJournal:
    """Collects what the model returned for one part, and writes it when a checkpoint is due.

    Args:
        part: The first sample of the whole part.
        samples: Those of the part that are to be predicted.
        first: The place among these of the first that no checkpoint has.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        part: int,
        samples: Sequence[int],
        first: int,
        batch_size: int,
    ) -> None:
        self._checkpoints, self._part, self._samples = checkpoints, part, samples
        self._batch_size = batch_size
        self._written, self._took_s = time.monotonic(), 0.0
        self._has_rows, self._is_over = first > 0, False
        self._begin(first)

    def _begin(self, first: int) -> None:
        self._first, self._count, self._last, self._held_bytes = first, 0, -1, 0
        self._rows: list[Rows] = []
        self._failures: list[Failure] = []

    def add_rows(self, rows: Rows) -> None:
        """Add what the model returned for some samples."""
        if self._is_over:
            return
        self._rows.append(rows)
        self._held_bytes += rows.nbytes
        self._has_rows = True
        self._add(len(rows.indices), max(rows.indices))

    def add_failure(self, failure: Failure) -> None:
        """Add a sample that failed."""
        if self._is_over:
            return
        self._failures.append(failure)
        self._add(1, failure.index)

    def _add(self, count: int, last: int) -> None:
        self._count, self._last = self._count + count, max(self._last, last)
        end = self._first + self._count
        is_gapless = self._last == self._samples[end - 1] and end % self._batch_size == 0
        if not is_gapless or end >= len(self._samples) or not self._has_rows:
            return  # without a row, all samples may fail for one cause: then none is recorded
        began, is_full = time.monotonic(), self._held_bytes > MOST_HELD_BYTES
        if began - self._written >= max(
            0.0 if is_full else self._checkpoints.every_s, self._checkpoints.rest * self._took_s
        ):
            checkpoint = Checkpoint(self._first, end, self._rows, self._failures)
            self._checkpoints.write(self._part, checkpoint)
            self._written = time.monotonic()
            self._took_s = self._written - began
            self._begin(end)
        elif is_full:
            self._is_over = True
            self._begin(end)
