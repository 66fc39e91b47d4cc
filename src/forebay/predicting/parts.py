"""Make one part: pass its batches through the model and write one Parquet file.

reader ──> bisection ── model ──> columns ──> part-00007.parquet
               └── failures ──> ledger
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet

from forebay.arrow_arrays import array_of, array_of_numpy
from forebay.devices.device_api import Device
from forebay.errors import FailuresError, OptionError, OutputError
from forebay.failures import MAX_TRACED, Failure
from forebay.observe.event_log import log_samples_failed
from forebay.observe.trace import Trace
from forebay.predicting.bisection import Bisection, Predicted
from forebay.predicting.completed import record_of
from forebay.predicting.model import Model
from forebay.predicting.prediction_columns import (
    INDEX,
    Columns,
    Spec,
    check_specs,
    columns_of,
    specs_of,
)
from forebay.predicting.range_reader import Loaded, RangeReader
from forebay.predicting.results import in_host_memory

# Stop if this many samples at the start all fail with the same error.
ALIKE = 20
# Size of the rows in one row group of the file.
GROUP_BYTES = 16 * 2**20
# Programs read the files of a folder in the order of their names: with a sixth digit, part 100000
# would come before part 99999.
MOST_PARTS = 100_000


def part_name(part: int) -> str:
    """Return a part's file name."""
    return f"part-{part:05d}.parquet"


def check_number_of_parts(samples: int, size: int) -> None:
    """Raise OptionError if samples in parts of this size are too many files to be in order."""
    parts = -(-samples // size)
    if parts > MOST_PARTS:
        raise OptionError(
            f"{samples:,} samples in parts of {size:,} would be {parts:,} files; the names of at "
            f"most {MOST_PARTS:,} are in order\n"
            f"  Nothing was started. Use part_size={-(-samples // MOST_PARTS)} or more. If this "
            "output folder has parts already, also use another one, or resume=False."
        )


class MadeHere(NamedTuple):
    """What a run needs whose parts are made in this process, by a model that is here.

    Attributes:
        parts: The parts, in the order of the calls.
        advance: Called with the numbers of samples that succeeded and that failed.
        trace: Records how samples are loaded.
    """

    parts: list[int]
    advance: Callable[[int, int], None]
    trace: Trace


class PartWork:
    """Makes the part for a row of "first" and "count"; returns its record for the ledger.

    Args:
        reader: Reads the samples.
        model: The model, or its factory.
        device: Where the model runs.
        table: The metadata columns, a row per sample; None if there are none.
        known: The columns of the run, if a part is already done.
        here: How parts are made in this process; None if the model is a factory, which is called
            once, in the worker.
    """

    def __init__(
        self,
        reader: RangeReader,
        model: Any,
        *,
        device: str | torch.device | Device | None,
        table: pa.Table | None,
        known: dict[str, Spec] | None,
        here: MadeHere | None,
    ) -> None:
        if here is None:  # a worker with its own model loads its batches itself
            reader = replace(reader, num_workers=0, backend="process", timeout=0, settings={})
        self._reader, self._model_or_factory, self._here = reader, model, here
        self._device, self._table, self._known = device, table, known
        self._model: Model | None = None
        self._bisect: Bisection | None = None
        self._reading: Iterator[Loaded] | None = None
        self._watches = known is None  # until a sample succeeds, or fails with another error
        self._failed = 0
        self._error = ""

    def __call__(self, row: dict[str, int], out: Any) -> Any:
        """Write the part.

        Raises:
            OutputError: The model's outputs are not rows of this table.
            FailuresError: The first samples all failed with the same error.
        """
        part = row["first"] // self._reader.part_size
        failures: list[Failure] = []
        rows = 0
        with PartWriter(lambda: out.file(part_name(part)), self._table) as writer:
            for outcome in in_host_memory(self._outcomes(part, row["count"])):
                if isinstance(outcome, Predicted):
                    self._take(outcome, writer)
                    rows += len(outcome.indices)
                    self._watches = False
                else:
                    traced = len(failures) < MAX_TRACED
                    failures.append(outcome if traced else outcome._replace(traceback=""))
                    self._stop_if_all_fail(outcome)
                if self._here is not None:  # this is the user's process
                    if isinstance(outcome, Failure):
                        log_samples_failed([outcome])
                    done = len(outcome.indices) if isinstance(outcome, Predicted) else 0
                    self._here.advance(done, 0 if done else 1)
        return record_of(rows, self._known, failures)

    def close(self) -> None:
        """End the workers that load samples."""
        if self._reading is not None:
            self._reading.close()  # type: ignore[attr-defined]

    def _outcomes(self, part: int, count: int) -> Iterator[Predicted | Failure]:
        """Yield the outputs or failures for the samples of a part."""
        here = self._here
        if self._model is None:
            model = self._model_or_factory() if here is None else self._model_or_factory
            self._model = Model(model, self._device)
            self._bisect = Bisection(self._model, self._reader.load)
        assert self._bisect is not None
        if here is None:  # a worker with its own model makes its batches itself, one by one
            self._reading = self._reader.read([part])
        elif self._reading is None:
            reader = replace(self._reader, device=self._model.copies_to)
            self._reading = reader.read(here.parts, here.trace)
        while count:
            loaded = next(self._reading)
            count -= len(loaded.indices) + len(loaded.failures)
            yield from self._bisect(loaded)

    def _take(self, predicted: Predicted, writer: PartWriter) -> None:
        columns = columns_of(predicted.outputs, predicted.indices)
        specs = specs_of(columns)
        if self._known is None:
            self._known = specs
        check_specs(self._known, specs, predicted.indices[0])
        writer.add(predicted.indices, {name: columns[name] for name in self._known})

    def _stop_if_all_fail(self, failure: Failure) -> None:
        """Raise FailuresError if all samples so far failed alike; counts over all parts."""
        self._watches = self._watches and self._error in ("", failure.error)
        self._failed, self._error = self._failed + 1, failure.error
        if self._watches and self._failed >= ALIKE:
            raise FailuresError(
                f"stopped early: the first {ALIKE} samples all failed alike, with "
                f"{failure.error}\n  The last of them, {failure}\n"
                "  The same call tries every part without a prediction again. Fix the cause "
                f"first.\n{failure.traceback}"
            )


class PartWriter:
    """Writes one file of rows; without rows there is no file.

    Args:
        path: Returns the path to write to.
        table: The metadata columns, a row per sample; None if there are none.
    """

    def __init__(self, path: Callable[[], Any], table: pa.Table | None) -> None:
        self._path, self._metadata = path, table
        self._own = [INDEX] if table is None else [INDEX, *table.column_names]
        self._file: parquet.ParquetWriter | None = None
        self._indices: list[int] = []
        self._held: list[Columns] = []
        self._held_bytes = 0

    def add(self, indices: list[int], predictions: Columns) -> None:
        """Add rows, which have the same columns each time; the arrays must not change later.

        Raises:
            OutputError: A prediction has the name of another column.
        """
        if not self._held:
            for name in predictions.keys() & self._own:
                raise OutputError(
                    f"two columns would be called {name!r}: one that the model returned, and one "
                    "of the table or forebay\n  Return it under another name, in a dict."
                )
        self._indices += indices
        self._held.append(predictions)
        self._held_bytes += sum(array.nbytes for array in predictions.values())
        if self._held_bytes >= GROUP_BYTES:
            self._write()

    def _write(self) -> None:
        index = array_of(self._indices, pa.int64())
        columns: dict[str, Any] = {INDEX: index}
        if self._metadata is not None:
            chosen = self._metadata.take(index)
            columns.update(zip(chosen.column_names, chosen.columns, strict=True))
        for name in self._held[0]:
            columns[name] = array_of_numpy(np.concatenate([each[name] for each in self._held]))
        rows = pa.table(columns)
        if self._file is None:
            # Dictionary encoding does not help predictions: their values rarely repeat.
            self._file = parquet.ParquetWriter(
                self._path(), rows.schema, use_dictionary=self._own[1:] or False
            )
        self._file.write_table(rows, row_group_size=len(rows))
        self._indices, self._held, self._held_bytes = [], [], 0

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._held and kind is None:
            self._write()
        if self._file is not None:
            self._file.close()
