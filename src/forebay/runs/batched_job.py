"""The job of a worker whose function gets several inputs at once, and returns a result for each.

    rows ──> function([row, row, …]) ──> [result, result, …] ──> an answer for each row

Nothing else of a run knows of batches: the ledger has rows, and so the table is the same with any
number of them in a call. `pools/worker.py` halves a batch that fails.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from forebay.base.files import NoInputError, is_url
from forebay.ledger.records import key_of
from forebay.pools.events import Answer, Assignment, Refusal
from forebay.runs.job import PreprocessJob
from forebay.runs.returned import checked, encode, rows_returned


class BatchedJob(PreprocessJob):
    """Calls the user's function with a list of inputs."""

    def __init__(self, *arguments: Any, batch_size: int, **options: Any) -> None:
        """Call with at most `batch_size` inputs at once."""
        super().__init__(*arguments, **options)
        self.batch_size = batch_size

    def run(self, assignment: Assignment) -> Answer:
        """Run one task; see `PreprocessJob.run`."""
        return self.run_all([assignment])[0]

    def run_all(self, assignments: Sequence[Assignment]) -> list[Answer]:
        """Call the function for several inputs, and return the answer for each."""
        began = time.perf_counter()
        source, row, *_ = assignments[0].payload
        found = self._seeded(
            key_of(source, row), lambda: self._results_of(assignments), lambda: None
        )
        took_s = (time.perf_counter() - began) / len(assignments)
        answers = []
        for each, metadata in zip(assignments, found, strict=True):
            source, row, *_ = each.payload
            fields = ((), metadata, self._content(source, row, took_s)), len(metadata)
            answers.append(tuple.__new__(Answer, fields))  # calls no Python code
        return answers

    def _results_of(self, assignments: Sequence[Assignment]) -> list[str]:
        """Return the metadata of several inputs, as JSON."""
        with ExitStack() as downloads:
            given = [self._opened(*each.payload, downloads=downloads) for each in assignments]
            returned = self._worked(self._work, given, name_of=None, looked_at=_itself)
            return [
                checked(encode(rows_returned(each), (), _no_name))
                for each in results_in(returned, len(given))
            ]

    def _opened(
        self, source: str, row: str | None, opens: str = "", *, downloads: ExitStack
    ) -> Any:
        """Return what the function is called with for one input, which may be downloaded."""
        opens = opens or key_of(source, row)
        if row is not None or self._fetch is None or not is_url(source):
            return self._given(source, row, opens)
        try:
            path = downloads.enter_context(self._fetch(opens))
        except NoInputError as error:
            raise Refusal("input") from error.__cause__
        return str(path) if self._calling.as_text else path


def _itself(value: Any) -> Any:
    return value


def _no_name(_: str) -> None:
    """Return None: nothing is staged."""


def results_in(returned: Any, count: int) -> list[Any]:
    """Return what a function returned for each of so many inputs.

    A mapping of columns, as tokenizers return it, has the results in its values.
    """
    if isinstance(returned, Mapping) and returned:
        columns = {name: _listed(each) for name, each in returned.items()}
        for name, each in columns.items():
            if len(each) != count:
                raise _other_number(f"{len(each):,} values in {name!r}", count)
        rows = zip(*columns.values(), strict=True)
        return [dict(zip(columns, values, strict=True)) for values in rows]
    results = _listed(returned)
    if len(results) != count:
        raise _other_number(f"{len(results):,} results", count)
    return results


def _listed(values: Any) -> list[Any]:
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        kind = type(values).__name__
        raise TypeError(
            f"with batch_size=, the function must return a list, and returned a {kind}\n"
            "  Return a result for each input that it gets, in their order, or a dict of columns."
        )
    return [*(values.tolist() if hasattr(values, "tolist") else values)]


def _other_number(what: str, count: int) -> TypeError:
    return TypeError(
        f"the function returned {what} for {count:,} inputs\n"
        "  With batch_size=, return a result for each input, in their order: [] for one without "
        "a row, a list of dicts for one with several."
    )
