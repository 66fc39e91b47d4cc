"""The columns `error` and `outputs` of the ledger's inputs, which are JSON, and what they hold."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from json.encoder import encode_basestring_ascii
from typing import Any

from forebay.failures import Failure
from forebay.jobs.ledger.database import reading
from forebay.jobs.ledger.done_blocks import Query, pages
from forebay.jobs.ledger.records import OutputFile
from forebay.jobs.outputs.output_names import recorded_name

# No output, or one with a name that needs no escapes and is none of forebay's own.
_PART = r'[^"\\./\x00-\x1f][^"\\/\x00-\x1f]*'
_USUAL = re.compile(rf'\[\]|\[\["{_PART}(/{_PART})*", \d{{1,18}}\]\]').fullmatch
# The attributes of a failure that are stored as one JSON object.
_KEPT = ("kind", "error", "message", "traceback")
# Failures in memory at once: a run may have millions, and each has kilobytes of text.
_FAILURES = 1000


def failure_column(failure: Failure, source: str | None) -> str:
    """Return the column of a failure.

    Args:
        failure: Why the input failed.
        source: Its path or row; None if another column has it.
    """
    kept = {name: getattr(failure, name) for name in _KEPT}
    return json.dumps(kept if source is None else kept | {"source": source})


def failures_in(query: Query) -> Iterator[Failure]:
    """Yield the failures in input order; `source` is the input's path, or its row.

    Raises:
        LedgerError: One is damaged.
    """
    sql = (
        "SELECT ordinal, source, row, attempts, seconds, error FROM inputs "
        "WHERE ordinal > ? AND state = 2 ORDER BY ordinal LIMIT ?"
    )
    for page in pages(query, sql, size=_FAILURES):
        for _, source, row, attempts, seconds, error in page:
            yield failure_from(source or row or "", attempts, seconds, error)


def failure_from(source: str, attempts: int, seconds: float, error: str) -> Failure:
    """Return the failure of an input from the columns that keep it.

    Raises:
        LedgerError: They are damaged.
    """
    with reading("a failure"):
        found = json.loads(error)
        kept: Any = {name: str(value) for name, value in found.items() if name in _KEPT}
        source = found.get("source", source)
        return Failure(**kept, source=str(source), attempts=int(attempts), seconds=float(seconds))


def outputs_column(files: Sequence[OutputFile]) -> str:
    """Return the outputs of an input as the column that keeps them: name, size, place of each."""
    if not files:
        return "[]"
    if len(files) == 1 and files[0].place is None:  # usual, and `dumps` takes ten times as long
        return f"[[{encode_basestring_ascii(files[0].name)}, {files[0].size}]]"
    return json.dumps([[file.name, file.size, *(file.place or ())] for file in files])


def check_outputs(outputs: str) -> None:
    """Check the column that keeps the outputs of an input; call it in `reading`.

    Raises:
        LedgerError: A name leads out of the output folder.
    """
    if not _USUAL(outputs):  # which takes a tenth of the time
        files_of(outputs)


def files_of(outputs: str) -> list[tuple[str, int]]:
    """Return name and size of each output, from the column that keeps them; call it in `reading`.

    Raises:
        LedgerError: A name leads out of the output folder.
    """
    if outputs == "[]":  # the usual case of inputs that have rows only
        return []
    return [(recorded_name(name), int(size)) for name, size, *_ in json.loads(outputs)]
