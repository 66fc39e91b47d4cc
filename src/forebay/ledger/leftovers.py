"""Outputs that `forebay prune` removes: those that no row of the table has, and those it names."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence

from forebay.base.output_names import path_elsewhere
from forebay.ledger.database import (
    DONE,
    IS_FAILED,
    InputRow,
    Query,
    files_of,
    input_name,
    listed_rows,
    outputs_of,
    reading,
)
from forebay.ledger.identity import NOT_SEEN
from forebay.ledger.records import Leftover

# The inputs that are no longer listed, those that failed, and those of these that could be seen.
GONE, LISTED_AND_FAILED = "ordinal < 0", f"ordinal > 0 AND {IS_FAILED}"
SEEN_AND_FAILED = f"{LISTED_AND_FAILED} AND substr(identity, -1) != '{NOT_SEEN}'"


def leftovers(query: Query, also: Iterable[InputRow] = ()) -> Iterator[Leftover]:
    """Yield the outputs in the folder that no row of the table has.

    They are those of inputs that are no longer listed, and those of changed inputs that failed
    when they were done again; but not of those that could not be seen when they were tried.

    Args:
        also: Inputs whose outputs are meant, too.
    """
    reasons = {GONE: "is no longer listed", SEEN_AND_FAILED: "changed, and fails now"}
    with reading("outputs"):
        found = [(outputs_of(query, where), why) for where, why in reasons.items()]
        named = ((each.ordinal, each.outputs) for each in also)
        for some, why in (*found, (named, "is in a folder that was named")):
            for ordinal, outputs in some:
                source = input_name(query, ordinal) if why == reasons[GONE] else ""
                comes_back = why == reasons[GONE] and _may_come_back(source)
                for name, size in files_of(outputs):
                    if path_elsewhere(name) is None:
                        yield Leftover(name, size, f"its input {why}", comes_back)


def _may_come_back(source: str) -> bool:
    """Return whether another call may list an input: one that is a file that is gone, none can."""
    folder = os.path.dirname(source)
    return not os.path.isdir(folder) or os.path.lexists(source)


def made_of(query: Query, folders: Sequence[str]) -> list[InputRow]:
    """Return the done inputs whose paths, as they were listed, lie in some folders."""
    starts = tuple(os.path.join(each, "") for each in folders)
    starts += tuple(os.path.join(os.path.abspath(each), "") for each in folders)
    rows = listed_rows(query) if starts else ()
    return [each for each in rows if each.state == DONE and each.source.startswith(starts)]
