"""Make one part: pass its batches through the user's model and write one Parquet file.

The record of a part in the ledger has its number of rows, their types, and the samples that failed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import torch

from forebay.devices.device import Device
from forebay.errors import FailuresError, OptionError
from forebay.failures import MAX_KEPT, MAX_TRACED, Failure, FailureLog, failure_to_json
from forebay.ledger.database import InputRow, reading
from forebay.ledger.records import EarlierRows, Todo
from forebay.observe.progress import log_samples_failed
from forebay.observe.record import Trace
from forebay.pools.events import Refusal
from forebay.predicting.checkpoints import Checkpoint, Checkpoints, PartJournal
from forebay.predicting.data import Loaded, RangeReader
from forebay.predicting.model import Bisection, Model, Predicted, in_host_memory
from forebay.predicting.outputs import rows_of_outputs
from forebay.predicting.part_writer import (
    PartWriter,
    Rows,
    Types,
    checked_types,
    earlier_predictions,
    part_name,
    types_from_json,
    types_to_json,
)
from forebay.runs.processing import FailureBudget
from forebay.runs.ranges import failed_samples, range_of

if TYPE_CHECKING:
    from forebay.predicting.model import ModelFactory


class CompletedParts(NamedTuple):
    """A summary of the parts that are done.

    Attributes:
        columns: The types of the predictions that hold those of all parts; None if there are none.
        weights: Hashes of the weights of factories' models, if they have any.
    """

    rows: int
    failures: FailureLog
    columns: Types | None
    failing: list[Todo]
    weights: frozenset[str]

    @property
    def samples(self) -> int:
        """Number of samples in these parts."""
        return self.rows + self.failures.total

    @classmethod
    def of(cls, results: Iterable[InputRow]) -> CompletedParts:
        """Add up the records of the parts."""
        rows, failures, columns = 0, FailureLog(), None
        failing: list[Todo] = []
        weights = set[str]()
        with reading("a part"):
            for result in results:
                record = json.loads(result.metadata)[0]
                rows += int(record["rows"])
                weights.add(str(record["weights"]))
                failures.extend(failed_samples(record)[0])
                if record["failures"]:
                    failing.append(Todo(result.ordinal, result.source, result.row))
                if record["columns"] is not None:
                    own = types_from_json(record["columns"])
                    first = range_of(result.row)[0]
                    columns = checked_types(columns or {}, own, first)
        return cls(rows, failures, columns, failing, frozenset(weights - {""}))

    @staticmethod
    def narrower(results: Iterable[InputRow], columns: Types) -> dict[Todo, dict[str, Any]]:
        """Return the parts whose columns are not these, with their records."""
        described = types_to_json(columns)
        found = {}
        with reading("a part"):
            for result in results:
                record = json.loads(result.metadata)[0]
                own = record["columns"]
                if own is not None and (own, [*own]) != (described, [*described]):
                    found[Todo(result.ordinal, result.source, result.row)] = record
        return found

    @staticmethod
    def without_rows(results: Iterable[InputRow]) -> list[int]:
        """Return the ordinals of the parts in which every sample failed."""
        return [each.ordinal for each in results if not json.loads(each.metadata)[0]["rows"]]


def record_of(rows: int, columns: Types, failures: list[Failure], weights: str) -> Any:
    """Return the JSON-serializable record of one part, which `CompletedParts.of` reads."""
    kept = sorted(failures, key=lambda failure: failure.index)
    kept[MAX_TRACED:] = [each._replace(traceback="") for each in kept[MAX_TRACED:]]
    kept[MAX_KEPT:] = [each._replace(message="") for each in kept[MAX_KEPT:]]
    return {
        "rows": rows,
        "columns": types_to_json(columns) if rows else None,
        "failures": [*map(failure_to_json, kept)],
        "weights": weights,
    }


# Programs read the files of a folder in the order of their names: with a sixth digit, part 100000
# would come before part 99999.
MOST_PARTS = 100_000


def check_number_of_parts(samples: int, size: int) -> None:
    """Raise OptionError if samples in parts of this size are too many files to be in order."""
    parts = -(-samples // size)
    if parts > MOST_PARTS:
        raise OptionError(
            f"{samples:,} samples in parts of {size:,} would be {parts:,} files; the names of at "
            f"most {MOST_PARTS:,} are in order\n"
            f"  Nothing was started. Use part_size={-(-samples // MOST_PARTS)} or more. If this "
            "output folder has parts already, also use another one, or redo='*'."
        )


class MadeHere(NamedTuple):
    """What a run needs whose parts are made in this process, by a model that is here."""

    advance: Callable[[int, int], None]
    trace: Trace


class PartWork:
    """Makes the part for a row of "first" and "count"; returns its record for the ledger.

    Args:
        parts: All parts that are to be made, in order.
        table: The metadata columns, a row per sample; None if there are none.
        names: The names of the samples, for failures; None if they have none.
        model: The model; None with a factory.
        here: How parts are made in this process; None with a factory.
        factory: What makes a model in each worker.
        earlier: Which predictions are taken over from files of an earlier run.
    """

    def __init__(
        self,
        reader: RangeReader,
        model: Any,
        parts: Sequence[range],
        checkpoints: Checkpoints,
        *,
        device: str | torch.device | Device | None,
        table: pa.Table | None,
        names: pa.Array | None,
        known: Types | None,
        here: MadeHere | None,
        factory: ModelFactory | None,
        earlier: EarlierRows,
    ) -> None:
        self._names, self._earlier = names, earlier
        self._checkpoints, self._left = checkpoints, list[Sequence[int]]()
        self._resumed: dict[int, list[Checkpoint]] = {}
        if here is None:  # a worker with its own model loads its batches itself
            reader = replace(reader, num_workers=0, backend="process", timeout=0, settings={})
        else:  # the samples of several parts are loaded in one pass
            known_names = checkpoints.names()
            for part in parts:
                samples = earlier.left(part.start, len(part))
                if found := checkpoints.read(part.start, samples, known_names):
                    self._resumed[part.start] = found
                self._left.append(samples[found[-1].end if found else 0 :])
        self._reader, self._model_here, self._here = reader, model, here
        self._factory = factory
        self._device, self._table, self._known = device, table, known or {}
        self._model: Model | None = None
        self._bisect: Bisection | None = None
        self._reading: Iterator[Loaded] | None = None
        self._budget = FailureBudget(None, 0, watch=known is None, unit="sample", counts_rows=False)

    def __call__(self, row: dict[str, int], out: Any) -> Any:
        """Write the part; in the user's process an exception ends the run as it is."""
        try:
            return self._written(row, out)
        except BaseException as error:
            if self._here is None:
                raise
            raise Refusal("stop") from error

    def _written(self, row: dict[str, int], out: Any) -> Any:
        part = range(row["first"], row["first"] + row["count"])
        name = part_name(part.start // self._reader.part_size)
        failures: list[Failure] = []
        samples = self._earlier.left(part.start, len(part))
        at = 0
        with PartWriter(lambda: out.file(name), self._table, self._known) as writer:
            rows = self._take_over(part, writer)
            for checkpoint in self._checkpoints_of(part.start, samples):
                for found in checkpoint.rows:
                    writer.add(found)
                    rows += len(found.indices)
                failures += checkpoint.failures
                at = checkpoint.end
            journal = PartJournal(
                self._checkpoints, part.start, samples, at, self._reader.batch_size
            )
            for outcome in self._converted(self._outcomes(samples[at:]), writer):
                if isinstance(outcome, Rows):
                    writer.add(outcome)
                    rows += len(outcome.indices)
                    self._budget.succeeded()
                    journal.add_rows(outcome)
                else:
                    outcome = outcome.named(self._name_of(outcome.index))
                    traced = len(failures) < MAX_TRACED
                    failures.append(outcome if traced else outcome._replace(traceback=""))
                    self._stop_if_all_fail(outcome)
                    journal.add_failure(failures[-1])
                if self._here is not None:  # this is the user's process
                    if isinstance(outcome, Failure):
                        log_samples_failed([outcome])
                    done = len(outcome.indices) if isinstance(outcome, Rows) else 0
                    self._here.advance(done, 0 if done else 1)
        if rows:
            self._known = writer.types
        weights = "" if self._factory is None else self._factory.weights
        return record_of(rows, writer.types, failures, weights)

    @staticmethod
    def _converted(
        outcomes: Iterator[Predicted | Failure], writer: PartWriter
    ) -> Iterator[Rows | Failure]:
        """Yield the rows of outcomes, and the samples that failed, with those that do not fit."""
        for outcome in in_host_memory(outcomes):
            if isinstance(outcome, Failure):
                yield outcome
                continue
            rows, failures = rows_of_outputs(outcome.outputs, outcome.indices, writer.types)
            yield from failures
            if rows.indices:
                yield rows

    @property
    def resumed(self) -> int:
        """How many samples of the parts checkpoints had; 0 where a factory's workers read them."""
        return sum(each.end - each.first for found in self._resumed.values() for each in found)

    def _checkpoints_of(self, first: int, samples: Sequence[int]) -> list[Checkpoint]:
        if self._here is None:
            return self._checkpoints.read(first, samples)
        return self._resumed.get(first, [])

    def _name_of(self, index: int) -> str | None:
        """Return the name of a sample; None if it has none."""
        return None if self._names is None else str(self._names[index]) or None

    def _take_over(self, part: range, writer: PartWriter) -> int:
        """Add the predictions that earlier files have; return their number."""
        taken = self._earlier.taken(part.start, len(part))
        if taken:
            writer.take_over(earlier_predictions(taken))
        return sum(len(each.indices) for each in taken)

    @property
    def failing_share(self) -> float:
        """The part of the model's time that batches with failing samples took, from 0 to 1."""
        return self._bisect.failing_s / max(self._bisect.model_s, 1e-9) if self._bisect else 0.0

    def close(self) -> None:
        """End the workers that load samples."""
        if self._reading is not None:
            self._reading.close()  # type: ignore[attr-defined]

    def _outcomes(self, samples: Sequence[int]) -> Iterator[Predicted | Failure]:
        """Yield the outputs or failures for these samples of a part."""
        here, count = self._here, len(samples)
        if not count and self._factory is None:
            return
        if self._model is None:  # a factory's even for no sample, to compare its weights
            model = self._model_here if self._factory is None else self._factory.model()
            self._model = Model(model, self._device)
            self._bisect = Bisection(self._model, self._reader.load)
        assert self._bisect is not None
        if here is None:  # a worker with its own model makes its batches itself, one by one
            self._reading = self._reader.read([samples])
        elif self._reading is None:
            reader = replace(self._reader, device=self._model.copies_to)
            self._reading = reader.read(self._left, here.trace)
        while count:
            loaded = next(self._reading)
            count -= len(loaded.indices) + len(loaded.failures)
            yield from self._bisect(loaded)

    def _stop_if_all_fail(self, failure: Failure) -> None:
        """Raise FailuresError if all samples so far failed alike; counts over all parts."""
        if reason := self._budget.attempt_failed(failure.index, failure.error):
            raise FailuresError(
                f"stopped early: {reason}\n  The last of them, {failure}\n"
                "  The same call tries every part without a prediction again. Fix the cause "
                f"first.\n{failure.traceback}"
            )
