"""Functions that get several inputs at once: the table is that of one at a time."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
from driving import make_inputs, table

import forebay
from forebay.errors import OptionError
from forebay.runs.batched_job import results_in

# On Python 3.12 and newer, a fork beside threads is warned of.
pytestmark = [
    pytest.mark.usefixtures("forked_workers"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]
ROWS = [{"id": f"doc-{n}", "text": "x" * (n % 9)} for n in range(300)]
BAD = ("doc-7", "doc-200")


def run(work, inputs, output, **options):
    return forebay.preprocess(work, inputs, output, progress=False, **{"num_workers": 0, **options})


def one(row):
    return {"n": len(row["text"])}


def many(rows):
    return [one(row) for row in rows]


def as_columns(rows):
    return {"n": [len(row["text"]) for row in rows]}


def refuses(end, rows):
    if any(row["id"] in BAD for row in rows):
        end()
    return many(rows)


def raises():
    raise ValueError("no good")


def dies():
    os._exit(3)


WAYS = {
    "workers": {"num_workers": 2, "batch_size": 64},
    "here": {"batch_size": 64},
    "of one": {"batch_size": 1},
    "larger than all": {"batch_size": 1000},
    "threads": {"num_workers": 2, "backend": "thread", "batch_size": 16},
    "concurrency": {"num_workers": 1, "concurrency": 2, "batch_size": 16},
}


@pytest.mark.slow
@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("work", [many, as_columns])
def test_the_table_is_the_same_for_any_batch_size(tmp_path, work, options):
    """Byte by byte that of a function of one row; also of a run that continues with another one."""
    run(one, ROWS, tmp_path / "one")
    report = run(work, ROWS, tmp_path / "out", **options)
    assert (report.done, report.failures) == (len(ROWS), ())
    assert table(tmp_path / "out") == table(tmp_path / "one")
    run(work, ROWS, tmp_path / "parts", limit=100, batch_size=7)
    assert run(work, ROWS, tmp_path / "parts", **options).resumed == 100
    assert table(tmp_path / "parts") == table(tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize("retries", [0, 1])
@pytest.mark.parametrize(("end", "error"), [(raises, "ValueError"), (dies, "WorkerDiedError")])
def test_a_batch_that_fails_costs_the_rows_that_fail_alone(tmp_path, end, error, retries):
    """Each with its own error, and none of the rows beside it."""
    work = partial(refuses, end)
    report = run(work, ROWS, tmp_path / "out", num_workers=2, batch_size=64, retries=retries)
    assert [each.error for each in report.failures] == [error] * len(BAD)
    assert all(name in each.source for name, each in zip(BAD, report.failures, strict=True))
    assert report.done == len(ROWS) - len(BAD)


def test_an_input_may_have_several_rows_or_none(tmp_path):
    """A list of dicts for one, None or an empty list for the other."""

    def work(rows):
        return [[{"k": 0}, {"k": 1}] if row["id"] in BAD else None for row in rows]

    report = run(work, ROWS, tmp_path / "out", batch_size=50)
    assert report.metadata.select(["id", "k"]).to_pylist() == [
        {"id": name, "k": k} for name in BAD for k in (0, 1)
    ]


def test_paths_come_in_batches_too(tmp_path):
    """As the strings or paths that were listed."""
    inputs = make_inputs(tmp_path / "in", 5)

    def work(paths):
        assert all(isinstance(each, Path) for each in paths)
        return [{"n": len(each.read_text())} for each in paths]

    assert run(work, inputs, tmp_path / "out", batch_size=2).done == 5


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ([1], "the function returned 1 results for 3 inputs"),
        ({"n": [1, 2]}, "the function returned 2 values in 'n' for 3 inputs"),
        ("abc", "must return a list, and returned a str"),
    ],
)
def test_a_number_of_results_that_does_not_fit_is_an_error(returned, words):
    """With the numbers, and what to return."""
    with pytest.raises(TypeError, match=words):
        results_in(returned, 3)


def test_a_function_with_out_is_refused(tmp_path):
    """`out` is the folder of a single input."""

    def work(rows, out): ...

    with pytest.raises(OptionError, match="batch_size=4 is for a function of a list of inputs"):
        run(work, ROWS, tmp_path / "out", batch_size=4)
