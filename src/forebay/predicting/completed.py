"""The parts that are done, as the ledger has them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from forebay.failures import MAX_TRACED, Failure, FailureLog
from forebay.jobs.database import reading
from forebay.jobs.ledger import Result
from forebay.predicting.prediction_columns import Spec, check_specs


class CompletedParts(NamedTuple):
    """The parts that are done, together.

    Attributes:
        rows: Samples with a prediction.
        failures: Samples without one, in order: the first 1,000, and how many there are.
        columns: Names, types and shapes of the predictions; None if there are none.
    """

    rows: int
    failures: FailureLog
    columns: dict[str, Spec] | None

    @property
    def samples(self) -> int:
        """Samples of these parts."""
        return self.rows + self.failures.total

    @classmethod
    def of(cls, results: Iterable[Result]) -> CompletedParts:
        """Return what the parts' records say.

        Raises:
            OutputError: Workers of their own made parts that do not fit together.
            LedgerError: A part's record is damaged.
        """
        rows, failures, columns = 0, FailureLog(), None
        with reading("a part"):
            for result in results:
                record = json.loads(result.metadata)[0]
                rows += int(record["rows"])
                failures.extend(_failure(*one) for one in record["failures"])
                if record["columns"] is not None:
                    columns = columns or dict(record["columns"])
                    first = int(json.loads(result.row or "")["first"])
                    check_specs(columns, record["columns"], first)
        return cls(rows, failures, columns)


def record_of(rows: int, columns: dict[str, Spec] | None, failures: list[Failure]) -> Any:
    """Return the record of one part, as data for JSON; the reverse of `CompletedParts.of`."""
    kept = [
        [each.index, each.error, each.message, each.traceback if at < MAX_TRACED else ""]
        for at, each in enumerate(sorted(failures, key=lambda failure: failure.index))
    ]
    return {"rows": rows, "columns": columns if rows else None, "failures": kept}


def _failure(index: int, error: str, message: str, traceback: str) -> Failure:
    return Failure("exception", str(error), str(message), str(traceback), source=int(index))
