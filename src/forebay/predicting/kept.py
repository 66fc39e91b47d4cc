"""What the ledger knows of the parts that are done."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NamedTuple

from forebay.jobs.ledger import Result
from forebay.predicting.columns import Spec, check_specs
from forebay.predicting.records import LostSample


class Kept(NamedTuple):
    """The parts that are done, together.

    Attributes:
        rows: Samples with a prediction.
        lost: Samples without one, in order.
        columns: What the predictions are; None if there are none.
    """

    rows: int
    lost: tuple[LostSample, ...]
    columns: dict[str, Spec] | None

    @classmethod
    def of(cls, results: Iterable[Result]) -> Kept:
        """Return what the parts' records say.

        Raises:
            OutputError: Workers of their own made parts that do not fit together.
        """
        rows, lost, columns = 0, [], None
        for result in results:
            told = json.loads(result.metadata)[0]
            rows += told["rows"]
            lost += [LostSample(*one) for one in told["lost"]]
            if told["columns"] is not None:
                columns = columns or told["columns"]
                check_specs(columns, told["columns"], json.loads(result.row or "")["first"])
        return cls(rows, tuple(lost), columns)
