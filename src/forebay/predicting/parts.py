"""What is done for one part: its batches through the model, and into one Parquet file.

source ──> bisection ── model ──> columns ──> part-00007.parquet
└───> lost samples ──> ledger
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet

from forebay.errors import FailuresError, OutputError
from forebay.predicting.bisect import Bisection, Predicted
from forebay.predicting.columns import (
    INDEX,
    Columns,
    Spec,
    arrow_of,
    check_specs,
    columns_of,
    specs_of,
)
from forebay.predicting.model import Model
from forebay.predicting.records import Found, LostSample
from forebay.predicting.source import Source

# If this many samples were tried and none came through, it is not the samples.
ALIKE = 20
# Lost samples of one part whose frames are kept.
MOST_TRACED = 100
# Rows are held until they take up so much, and become a group of the file.
GROUP_BYTES = 16 * 2**20


def part_name(part: int) -> str:
    """Return a part's file name."""
    return f"part-{part:05d}.parquet"


class PartWork:
    """Makes the part of a row of "first" and "count"; returns what the ledger is to know of it.

    Args:
        source: Where the samples come from.
        model: The model, or what makes it.
        makes: Whether it has to be made, which is done once, in the worker.
        device: Where the model runs.
        table: The metadata columns, a row a sample; None if there are none.
        known: What columns the run has, if a part of it is done already.
        parts: Those that will be asked for, in this order, if it is all here; otherwise None.
        advance: Called with how many samples came through and how many did not.
    """

    def __init__(
        self,
        source: Source,
        model: Any,
        *,
        makes: bool,
        device: str | torch.device | None,
        table: pa.Table | None,
        known: dict[str, Spec] | None,
        parts: list[int] | None,
        advance: Callable[[int, int], None] | None,
    ) -> None:
        """See the class."""
        # A worker that has a model of its own loads its batches itself.
        inline = replace(source, num_workers=0, backend="process", timeout=0, settings={})
        self._source, self._made_by, self._makes = inline if makes else source, model, makes
        self._device, self._table, self._known = device, table, known
        self._parts, self._advance = parts, advance
        self._model: Model | None = None
        self._bisect: Bisection | None = None
        self._reading: Iterator[Found] | None = None
        self._lost_at_first: int | None = 0 if known is None else None

    def __call__(self, row: dict[str, int], out: Any) -> dict[str, Any]:
        """Write the part.

        Raises:
            OutputError: The outputs of the model are no rows of this table.
            FailuresError: Of the first samples, none came through.
        """
        part = row["first"] // self._source.part_size
        lost: list[LostSample] = []
        rows = 0
        writer = PartWriter(lambda: out.file(part_name(part)), self._table)
        with writer:
            for found in self._found(part):
                lost += found.lost
                before = rows, len(lost) - len(found.lost)
                for each in found.loaded:
                    assert self._bisect is not None
                    for outcome in self._bisect(each):
                        if isinstance(outcome, Predicted):
                            self._take(outcome, writer)
                            rows += len(outcome.indices)
                        else:
                            lost.append(outcome)
                    self._stop_if_all_fail(rows, lost)
                self._stop_if_all_fail(rows, lost)
                if self._advance is not None:
                    self._advance(rows - before[0], len(lost) - before[1])
        lost.sort(key=lambda one: one.index)
        told = [
            [one.index, one.error, one.message, one.traceback if at < MOST_TRACED else ""]
            for at, one in enumerate(lost)
        ]
        return {"rows": rows, "columns": self._known if rows else None, "lost": told}

    def close(self) -> None:
        """End the workers that load."""
        if self._reading is not None:
            self._reading.close()  # type: ignore[attr-defined]

    def _found(self, part: int) -> Iterator[Found]:
        """Yield what comes of each batch of a part."""
        if self._model is None:
            if self._makes:
                # A forked process must not use the threads that its parent had; and there are as
                # many workers as cores.
                torch.set_num_threads(1)
            self._model = Model(self._made_by() if self._makes else self._made_by, self._device)
            self._bisect = Bisection(self._model, self._source.load)
        if self._parts is None:
            yield from self._model.ahead(self._source.read([part]))
            return
        if self._reading is None:
            self._reading = self._model.ahead(self._source.read(self._parts))
        number = part * self._source.batches_in_part
        end = number + self._source.batches_in_part
        while number < end and self._source.indices(number):
            yield next(self._reading)
            number += 1

    def _take(self, predicted: Predicted, writer: PartWriter) -> None:
        columns = columns_of(predicted.outputs, predicted.indices)
        specs = specs_of(columns)
        if self._known is None:
            self._known = specs
        check_specs(self._known, specs, predicted.indices[0])
        writer.add(predicted.indices, columns)

    def _stop_if_all_fail(self, rows: int, lost: list[LostSample]) -> None:
        if self._lost_at_first is None:
            return
        if rows:
            self._lost_at_first = None
        elif len(lost) >= ALIKE and len({one.error for one in lost}) == 1:
            last = lost[-1]
            raise FailuresError(
                f"stopped early: the first {len(lost)} samples all failed alike, with "
                f"{last.error}\n  The last of them, {last}\n"
                f"  Nothing was kept. Mend the cause, and make the same call again.\n"
                f"{last.traceback}"
            )


class PartWriter:
    """Writes one file of rows, which appears only if there are any.

    Args:
        path: Returns where to write.
        table: The metadata columns, a row a sample; None if there are none.
    """

    def __init__(self, path: Callable[[], Any], table: pa.Table | None) -> None:
        """See the class."""
        self._path, self._metadata = path, table
        self._own = [INDEX] if table is None else [INDEX, *table.column_names]
        self._file: parquet.ParquetWriter | None = None
        self._indices: list[int] = []
        self._held: list[Columns] = []
        self._held_bytes = 0

    def add(self, indices: list[int], predictions: Columns) -> None:
        """Add rows, of the same columns each time; the arrays are kept for a while.

        Raises:
            OutputError: A prediction has the name of another column.
        """
        if not self._held:
            for name in predictions.keys() & self._own:
                raise OutputError(
                    f"two columns would be called {name!r}: one that the model returned, and one "
                    "that is there already\n  Return it under another name, in a dict."
                )
        self._indices += indices
        self._held.append(predictions)
        self._held_bytes += sum(array.nbytes for array in predictions.values())
        if self._held_bytes >= GROUP_BYTES:
            self._write()

    def _write(self) -> None:
        index = pa.array(self._indices, pa.int64())
        columns: dict[str, Any] = {INDEX: index}
        if self._metadata is not None:
            chosen = self._metadata.take(index)
            columns.update(zip(chosen.column_names, chosen.columns, strict=True))
        for name in self._held[0]:
            columns[name] = arrow_of(np.concatenate([each[name] for each in self._held]))
        rows = pa.table(columns)
        if self._file is None:
            # Numbers that are all different gain nothing by a dictionary.
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
