"""The parts that are done, as recorded in the ledger."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from forebay.failures import MAX_KEPT, MAX_TRACED, Failure, FailureLog
from forebay.jobs.ledger.database import reading
from forebay.jobs.ledger.ledger import DoneInput
from forebay.jobs.ledger.records import Todo
from forebay.predicting.prediction_columns import Spec, check_specs
from forebay.sample_ranges import sample_failure


class CompletedParts(NamedTuple):
    """A summary of the parts that are done.

    Attributes:
        rows: Samples with a prediction.
        failures: Samples without one, in order: the first 1,000, and the total number.
        columns: Names, types and shapes of the predictions; None if there are none.
        failing: The parts with failed samples.
    """

    rows: int
    failures: FailureLog
    columns: dict[str, Spec] | None
    failing: list[Todo]

    @property
    def samples(self) -> int:
        """Number of samples in these parts."""
        return self.rows + self.failures.total

    @classmethod
    def of(cls, results: Iterable[DoneInput]) -> CompletedParts:
        """Add up the records of the parts.

        Raises:
            OutputError: Models in different workers returned different columns.
            LedgerError: A part's record is damaged.
        """
        rows, failures, columns = 0, FailureLog(), None
        failing: list[Todo] = []
        with reading("a part"):
            for result in results:
                record = json.loads(result.metadata)[0]
                rows += int(record["rows"])
                failures.extend(sample_failure(*one) for one in record["failures"])
                if record["failures"]:
                    failing.append(Todo(result.ordinal, result.source, result.row))
                if record["columns"] is not None:
                    columns = columns or dict(record["columns"])
                    first = int(json.loads(result.row or "")["first"])
                    check_specs(columns, record["columns"], first)
        return cls(rows, failures, columns, failing)

    @staticmethod
    def without_rows(results: Iterable[DoneInput]) -> list[int]:
        """Return the ordinals of the parts in which every sample failed."""
        return [each.ordinal for each in results if not json.loads(each.metadata)[0]["rows"]]


def record_of(rows: int, columns: dict[str, Spec] | None, failures: list[Failure]) -> Any:
    """Return the JSON-serializable record of one part, which `CompletedParts.of` reads."""
    kept = [
        [
            each.index,
            each.error,
            each.message if at < MAX_KEPT else "",
            each.traceback if at < MAX_TRACED else "",
        ]
        for at, each in enumerate(sorted(failures, key=lambda failure: failure.index))
    ]
    return {"rows": rows, "columns": columns if rows else None, "failures": kept}
