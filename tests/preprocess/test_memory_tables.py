"""Tables in memory, of any library, are inputs as the same table in a file would be."""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import json
import uuid
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from driving import make_inputs
from works import size_of_destination

import forebay
from forebay.runs.preprocess import retry

QUIET = {"num_workers": 0, "progress": False}
ROWS = [{"path": "a.wav", "n": 1, "tags": ["x"]}, {"path": "b.wav", "n": 2, "tags": ["y", "z"]}]


class Frame:
    """A table of a library that forebay does not know, whose strings are views, as in polars."""

    def __init__(self, rows):
        strings = pa.array([row["path"] for row in rows], pa.string_view())
        tags = pa.array([row["tags"] for row in rows], pa.large_list(pa.string_view()))
        self._table = pa.table({"path": strings, "n": [row["n"] for row in rows], "tags": tags})

    @property
    def columns(self):
        return self._table.column_names

    def __arrow_c_stream__(self, requested_schema=None):
        return self._table.__arrow_c_stream__(requested_schema)


def of_polars(rows):
    return pytest.importorskip("polars").DataFrame(rows)


TABLES = {
    "list": list,
    "iterator": iter,
    "pandas": pd.DataFrame,
    "polars": of_polars,
    "pyarrow": pa.Table.from_pylist,
    "batch": pa.RecordBatch.from_pylist,
    "another": Frame,
}
each_library = pytest.mark.parametrize("make", TABLES.values(), ids=TABLES)
# preprocess alone takes rows from an iterator.
WHOLE = {name: make for name, make in TABLES.items() if name != "iterator"}
each_whole_table = pytest.mark.parametrize("make", WHOLE.values(), ids=WHOLE)


def show(row, out):
    """Return the row as the function got it."""
    return {"got": json.dumps(row)}


def made_of(rows, output, **options):
    """Return the rows that a function got, in order."""
    report = forebay.preprocess(show, rows, output, **QUIET | options)
    return [json.loads(text) for text in report.metadata["got"].to_pylist()]


# ---- preprocess


@pytest.mark.slow
@each_library
def test_a_function_gets_the_rows_as_dicts(tmp_path, make):
    """And the table has their columns; the same rows from a file are the same inputs."""
    report = forebay.preprocess(show, make(ROWS), tmp_path / "out", **QUIET)
    assert [json.loads(text) for text in report.metadata["got"].to_pylist()] == ROWS
    columns = ["path", "n", "tags", "source", "destination", "got"]
    assert report.metadata.column_names == columns
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    again = forebay.preprocess(show, tmp_path / "rows.parquet", tmp_path / "out", **QUIET)
    assert (again.done, again.resumed) == (2, 2)


@pytest.mark.slow
@each_library
def test_only_new_and_changed_rows_are_processed(tmp_path, make):
    """A row is the same input wherever it stands now."""
    forebay.preprocess(show, make(ROWS), tmp_path / "out", **QUIET)
    rows = [{**ROWS[1]}, {**ROWS[0], "n": 3}, {**ROWS[0]}]
    report = forebay.preprocess(show, make(rows), tmp_path / "out", **QUIET)
    assert (report.done, report.resumed) == (3, 2)
    assert report.metadata["n"].to_pylist() == [2, 3, 1]


def test_a_file_that_a_row_names_is_watched(tmp_path):
    """As with a manifest in a file."""
    inputs = make_inputs(tmp_path / "in", 3)
    rows = [{"path": str(path)} for path in sorted(inputs.iterdir())]
    forebay.preprocess(show, rows, tmp_path / "out", **QUIET)
    Path(rows[1]["path"]).write_text("changed")
    report = forebay.preprocess(show, pd.DataFrame(rows), tmp_path / "out", **QUIET)
    assert (report.done, report.resumed) == (3, 2)


def test_objects_in_polars_are_refused():
    """As bytes, they would be their addresses in memory."""
    frame = pytest.importorskip("polars").DataFrame({"a": [object()]})
    words = "the DataFrame: pyarrow cannot read it: a column holds Python objects"
    with pytest.raises(forebay.InputError, match=words):
        forebay.from_table(frame)


def test_row_labels_of_pandas_are_columns_if_they_have_a_name(tmp_path):
    """Without one they are left out, however rows were selected."""
    frame = pd.DataFrame({"n": [1, 2, 3, 4]})
    assert made_of(frame[frame.n != 2], tmp_path / "1") == [{"n": 1}, {"n": 3}, {"n": 4}]
    named = frame[frame.n != 1].rename_axis("key")
    assert made_of(named, tmp_path / "2")[0] == {"key": 1, "n": 2}
    assert next(iter(forebay.from_table(named))) == {"key": 1, "n": 2}
    by_path = pd.DataFrame({"path": ["a.jpg"], "y": [1]}).set_index("path")
    assert made_of(by_path, tmp_path / "3") == [{"path": "a.jpg", "y": 1}]


def test_missing_values_are_none(tmp_path):
    """Whatever marks them: None, NaN, NaT, pandas' NA; also below."""
    rows = [
        {"n": 1, "x": {"y": float("nan")}, "t": pd.NaT, "a": pd.NA, "f": np.float64("nan")},
        {
            "n": None,
            "x": [None],
            "t": None,
            "a": decimal.Decimal("nan"),
            "f": np.datetime64("NaT", "s"),
        },
    ]
    assert made_of(rows, tmp_path / "1") == [
        {"n": 1, "x": {"y": None}, "t": None, "a": None, "f": None},
        {"n": None, "x": [None], "t": None, "a": None, "f": None},
    ]
    frame = pd.DataFrame({"n": [1.5, None], "t": [pd.NaT, pd.Timestamp("2020-01-02")]})
    assert made_of(frame, tmp_path / "2") == [
        {"n": 1.5, "t": None},
        {"n": None, "t": "2020-01-02T00:00:00"},
    ]


VALUES = {
    "numpy's integer": (np.int64(3), 3),
    "numpy's bool": (np.bool_(True), True),
    "numpy's array": (np.ones((2, 1), np.float32), [[1.0], [1.0]]),
    "numpy's times": (np.array(["2020-01-02"], "datetime64[s]"), ["2020-01-02T00:00:00"]),
    "a tensor": (torch.tensor([1, 2]), [1, 2]),
    "a path": (Path("a/b"), "a/b"),
    "a date": (datetime.date(2020, 1, 2), "2020-01-02"),
    "a decimal": (decimal.Decimal("1.50"), "1.50"),
    "a tuple": ((1, ("x",)), [1, ["x"]]),
    "a set": ({3, 1, 2}, [1, 2, 3]),
    "a range": (range(2), [0, 1]),
    "keys": ({1: "a", np.int64(2): "b", None: "d"}, {"1": "a", "2": "b", "null": "d"}),
    "a fraction": (fractions.Fraction(1, 3), "1/3"),
    "an enumeration": (enum.StrEnum("E", ["A"]).A, "a"),
    "a UUID": (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
    "numpy's nanoseconds": (np.datetime64("2020-01-01T00:00:00.5", "ns"),
                            "2020-01-01T00:00:00.500000"),
    "numpy's day": (np.datetime64("2020-01-01"), "2020-01-01"),
    "numpy's hour": (np.datetime64("2020-01-01T07", "h"), "2020-01-01T07:00:00"),
    "numpy's far year": (np.datetime64("14645-06-30", "s"), "14645-06-30T00:00:00"),
    "numpy's NaT": (np.array(["NaT"], "datetime64[ns]"), [None]),
    "pandas' NaT": ([pd.NaT, pd.NA], [None, None]),
    "pandas' time": (pd.Timestamp("2020-01-01 00:00:00.123456789"),
                     "2020-01-01T00:00:00.123456789"),
    "a duration": (datetime.timedelta(days=1, seconds=1), "1 day, 0:00:01"),
    "pandas' duration": (pd.Timedelta(days=1, seconds=1), "1 day, 0:00:01"),
    "numpy's duration": (np.timedelta64(86_401, "s"), "1 day, 0:00:01"),
    "a negative duration": (np.timedelta64(-1, "ns"), "-1 day, 23:59:59.999999999"),
    "numpy's durations": (np.array([1500], "timedelta64[ms]"), ["0:00:01.500000"]),
    "a period": (pd.Period("2020-01", "M"), "2020-01"),
    "an interval": (pd.Interval(0, 1, "left"), "[0, 1)"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("value", "expected"), VALUES.values(), ids=VALUES)
def test_values_of_python_become_those_of_json(tmp_path, value, expected):
    """The same for rows that come in and for what a function returns; no text of print's."""
    report = forebay.preprocess(
        lambda row, out: {"got": json.dumps(row["value"]), "back": value},
        [{"value": value}],
        tmp_path,
        metadata="jsonl",
        **QUIET,
    )
    (row,) = map(json.loads, (tmp_path / "metadata.jsonl").read_text().splitlines())
    assert (json.loads(row["got"]), row["back"], report.failed) == (expected, expected, 0)


COLUMNS = {
    "periods": pd.period_range("2020-01", periods=2, freq="M"),
    "intervals": pd.interval_range(0, 2),
    "bins": pd.cut([1, 9], [0, 5, 10]),
    "durations": pd.to_timedelta(["1s", None]),
    "times": pd.to_datetime(["2020-01-01 00:00:00.123456789", None]),
    "zones": pd.to_datetime(["2020-01-01", "2020-06-01"]).tz_localize("Europe/Zurich"),
    "categories": pd.Categorical(["x", None]),
    "integers": pd.array([1, None], "Int64"),
    "paths": [Path("x"), None],
    "several types": [1, "a"],
    "dicts": [{"a": 1}, {"a": "x"}],
    "large": [1 << 70, 1],
}


@pytest.mark.slow
@pytest.mark.parametrize("column", COLUMNS.values(), ids=COLUMNS)
def test_a_dataframe_has_the_inputs_that_its_dicts_have(tmp_path, column):
    """Whatever the column is: nothing is done again, and `from_table` shows no other value."""
    frame = pd.DataFrame({"path": ["a", "b"], "x": column})
    seen = made_of(frame, tmp_path / "out")
    report = forebay.preprocess(show, frame.to_dict("records"), tmp_path / "out", **QUIET)
    assert (report.done, report.resumed) == (2, 2)
    assert [json.loads(text) for text in report.metadata["got"].to_pylist()] == seen
    assert all(row["x"] is not None for row in seen[:1])
    assert len(forebay.from_table(frame)) == 2


def test_periods_and_intervals_are_no_numbers_in_a_dataset():
    """Arrow has no type for them; it would leave the frequency and the closed side out."""
    frame = pd.DataFrame({"p": COLUMNS["periods"], "b": COLUMNS["bins"]})
    expected = [{"p": "2020-01", "b": "(0, 5]"}, {"p": "2020-02", "b": "(5, 10]"}]
    assert list(forebay.from_table(frame)) == expected
    assert list(forebay.from_table(frame, columns=["p", "b"])) == expected


FAR = pa.table({
    "path": ["a", "b"],
    "at": pa.array([0, 400_000_000_000_000_000], pa.timestamp("us")),
    "day": pa.array([0, 4_000_000], pa.date32()),
    "took": pa.array([1, (1 << 63) - 1], pa.duration("s")),
    "all": pa.array([[0], [400_000_000_000_000_000]], pa.list_(pa.timestamp("us"))),
})  # fmt: skip


@pytest.mark.parametrize("place", ["memory", "file"])
def test_times_beyond_the_year_9999_are_kept(tmp_path, place):
    """Databases write "infinity" so; only Python's own times end there."""
    table = FAR
    if place == "file":
        table = tmp_path / "far.parquet"
        pq.write_table(FAR, table)
    _, far = made_of(table, tmp_path / "out")
    at = "14645-06-30T15:06:40"
    took = "106751991167300 days, 15:30:07"
    assert far == {"path": "b", "at": at, "day": "12921-08-18", "took": took, "all": [at]}
    first, far = forebay.from_table(table)
    assert str(first["at"]) == "1970-01-01 00:00:00"
    assert far["at"] == far["all"][0] == np.datetime64(at, "us")
    assert far["day"] == np.datetime64("12921-08-18")


def test_a_column_of_lists_or_dicts_is_not_one_of_paths(tmp_path):
    """Whatever its name; the next column that may hold a path is looked at."""
    rows = [{"input": {"text": "hello"}}, {"file": ["a"], "input": "b.txt"}]
    report = forebay.preprocess(show, rows, tmp_path, **QUIET)
    assert report.metadata["source"].to_pylist() == [None, "b.txt"]


BAD_STRING = pa.Array.from_buffers(
    pa.string(), 1, [None, pa.py_buffer(np.array([0, 2], np.int32)), pa.py_buffer(b"\xff\xfe")]
)
BAD = {
    "bytes": ([{"a": 1}, {"a": b"x"}], "the list of dicts, row 2, column 'a': a value that JSON"),
    "generator": ([{"a": iter(())}], "a value of type tuple_iterator"),
    "object": ([{"a": object()}], "a value of type object"),
    "key": ([{"a": {(1, 2): 2}}], "a dict with the key (1, 2), which is not a string"),
    "two keys": ([{"a": {1: 2, "1": 3}}], "a dict with the keys 1 and '1', one string in JSON"),
    "column": ([{1: 2}], "the list of dicts: the key 1 is not a string"),
    "surrogate": ([{"a": "\ud800"}], "the list of dicts, row 1: a value that JSON"),
    "not dicts": ([{"a": 1}, "b.wav"], "the list of dicts, row 2: got str instead of a dict"),
    "no columns": ([{}], "the list of dicts: no columns"),
    "nameless": ([{"": 1}], "the list of dicts: column 1 has no name"),
    "no dict first": (["b.wav", {"a": 1}], "inputs[1]: got dict instead of a path"),
    "twice": ([{"a": 1}, {"a": 2}, {"a": 1}], 'row {"a":1} is listed twice: at positions 1 and 3'),
    "two names": (pd.DataFrame([[1, 2]], columns=["a", "a"]), "two columns are called 'a'"),
    "bytes of pandas": (pd.DataFrame({"a": [b"x"]}), "of type bytes\n  Rows become JSON: leave"),
    "two columns": (pa.table([[1], [2]], names=["a", "a"]), "two columns are called 'a'"),
    "no rows": (pd.DataFrame({"a": []}), "the DataFrame: no rows"),
    "byte column": (pa.table({"a": [b"x"]}), "the Table: column 'a' holds bytes (binary)"),
    "bad string": (pa.table({"a": BAD_STRING}), "cannot read it: Column 0: In chunk 0: Invalid"),
    "dict of columns": ({"a": [1]}, "inputs: got dict instead of paths"),
}  # fmt: skip


@pytest.mark.parametrize(("table", "message"), BAD.values(), ids=BAD)
def test_a_bad_table_is_an_error_that_says_where(tmp_path, table, message):
    """Before anything is processed."""
    with pytest.raises(forebay.InputError) as caught:
        forebay.preprocess(show, table, tmp_path / "out", **QUIET)
    assert message in str(caught.value)


def test_a_missing_column_is_the_functions_own_error(tmp_path):
    """forebay needs no column; the failure names the row."""
    report = forebay.preprocess(
        lambda row, out: row["label"], [{"n": 1}, {"n": 2, "label": "x"}], tmp_path, **QUIET
    )
    assert [(each.source, each.error) for each in report.failures] == [('{"n":1}', "KeyError")]


def test_a_table_is_no_work(tmp_path):
    """Although a DataFrame has a length and can be indexed."""
    with pytest.raises(forebay.OptionError, match="got DataFrame"):
        forebay.preprocess(pd.DataFrame(ROWS), output=tmp_path / "out")


# ---- where a relative destination starts


@pytest.fixture
def first(tmp_path, monkeypatch):
    """The report of a first step, made and seen from different working folders."""
    inputs = make_inputs(tmp_path / "in", 3)

    def step(source, out):
        piece = out.file(f"pieces/{source.stem}.txt")
        piece.write_text("x" * (1 + int(source.stem)))
        return {"destination": piece}

    report = forebay.preprocess(step, inputs, tmp_path / "thumbs", **QUIET)
    (tmp_path / "far").mkdir()
    monkeypatch.chdir(tmp_path / "far")
    return report


AS_TABLES = {
    "arrow": lambda table: table,
    "pandas": lambda table: table.to_pandas(),
    "list": lambda table: table.to_pylist(),
}
each_form = pytest.mark.parametrize("form", AS_TABLES.values(), ids=AS_TABLES)


def load(row):
    return torch.tensor([float(Path(row["destination"]).stat().st_size)])


@each_form
def test_every_entry_point_finds_the_files_in_the_folder_that_is_named(first, tmp_path, form):
    """The same rule for preprocess, from_table and predict; retry remembers it."""
    table = form(first.metadata)
    report = forebay.preprocess(
        size_of_destination, table, tmp_path / "next", folder=first.output, **QUIET
    )
    assert report.metadata["size"].to_pylist() == [1, 2, 3]
    dataset = forebay.from_table(table, load, folder=first.output)
    assert [int(sample) for sample in dataset] == [1, 2, 3]
    forebay.predict(
        lambda batch: batch[:, 0], table, tmp_path / "p", load=load, folder=first.output, **QUIET
    )
    written = pq.read_table(tmp_path / "p")
    assert written["prediction"].to_pylist() == [1.0, 2.0, 3.0]
    assert written["destination"].to_pylist() == first.metadata["destination"].to_pylist()


@each_form
def test_a_table_without_its_folder_is_an_error_everywhere(first, tmp_path, form):
    """Not one for each input, and not a file of the working folder."""
    table = form(first.metadata)
    message = r"its destination 'pieces/0000.txt' is not in the working folder .*far\n.*folder="
    with pytest.raises(forebay.InputError, match=message):
        forebay.preprocess(size_of_destination, table, tmp_path / "next", **QUIET)
    with pytest.raises(forebay.InputError, match=message):
        forebay.from_table(table)
    with pytest.raises(forebay.InputError, match=message):
        forebay.predict(len, table, tmp_path / "p", load=load, **QUIET)
    assert not (tmp_path / "next").exists()


def test_the_working_folder_is_that_of_the_call(first, tmp_path, monkeypatch):
    """Its rows and its folder's table are the same inputs; workers may be elsewhere."""
    monkeypatch.chdir(first.output)
    report = forebay.preprocess(
        size_of_destination, first.metadata, tmp_path / "next", num_workers=2, progress=False
    )
    assert report.metadata["size"].to_pylist() == [1, 2, 3]
    monkeypatch.chdir(tmp_path)
    again = forebay.preprocess(size_of_destination, "thumbs", tmp_path / "next", **QUIET)
    assert again.resumed == 3


def test_retry_finds_the_folder_of_a_table_in_memory(first, tmp_path):
    """It is recorded, since the rows are."""
    piece = Path(first.output, "pieces", "0001.txt")
    piece.unlink()
    table = first.metadata.to_pandas()
    options = {"folder": first.output, **QUIET}
    report = forebay.preprocess(size_of_destination, table, tmp_path / "next", **options)
    assert report.failed == 1
    piece.write_text("back")
    assert retry(size_of_destination, tmp_path / "next", **QUIET).failed == 0


def test_the_folder_of_a_table_may_be_a_url(tmp_path):
    """Paths become URLs; absolute paths and URLs stay."""
    rows = [{"destination": "a"}, {"destination": "/b"}, {"destination": "memory://c"}]
    found = [row["destination"] for row in forebay.from_table(rows, folder="s3://bucket/x/")]
    assert found == ["s3://bucket/x/a", "/b", "memory://c"]


def test_a_folder_is_for_tables_in_memory(first, tmp_path):
    """A table in a file has one; other inputs have no table."""
    name = Path(first.output)
    for inputs in (name, name / "metadata.parquet", ["a"], str(name / "pieces" / "*")):
        with pytest.raises(forebay.OptionError, match="folder='x' is for tables in memory"):
            forebay.preprocess(show, inputs, tmp_path / "next", folder="x", **QUIET)
    with pytest.raises(forebay.OptionError, match="folder='x' is for tables in memory"):
        forebay.from_table(name, folder="x")
    with pytest.raises(forebay.OptionError, match="folder="):
        forebay.predict(len, [torch.ones(1)], tmp_path / "p", folder="x", **QUIET)
    with pytest.raises(forebay.OptionError, match="folder='x' is for tables in memory"):
        forebay.preprocess(forebay.from_ids([1], str), output="o", folder="x")


def test_a_destination_may_not_leave_the_folder(tmp_path):
    """In a table in memory as in one in a file."""
    dataset = forebay.from_table([{"destination": "../x"}], folder=tmp_path)
    with pytest.raises(forebay.InputError, match="would leave that folder"):
        dataset[0]


# ---- where a row comes from


def test_the_first_source_stays_over_three_steps(first, tmp_path):
    """`origin` names the very first input, `source` what the step read."""
    origins = first.metadata["source"].to_pylist()

    def copy(row, out):
        piece = out.file(Path(row["destination"]).name)
        piece.write_bytes(Path(row["destination"]).read_bytes())

    for folder, step in (("2", first.output), ("3", tmp_path / "2")):
        report = forebay.preprocess(copy, step, tmp_path / folder, **QUIET)
        assert report.metadata.column_names == ["origin", "source", "destination"]
        assert report.metadata["origin"].to_pylist() == origins
    assert report.metadata["source"].to_pylist() == [f"000{n}.txt" for n in range(3)]


# ---- from_table and predict


@each_whole_table
def test_from_table_has_the_rows_of_each_library(make):
    """An empty list has no columns to be a table of."""
    assert list(forebay.from_table(make(ROWS))) == ROWS
    for bad in ([], 3, [1]):
        with pytest.raises(forebay.InputError, match="instead of a table"):
            forebay.from_table(bad)


def test_what_nan_is_in_a_row(tmp_path):
    """Missing where pandas may have written it, also among strings; a number where null exists."""
    nan = float("nan")
    frame = pd.DataFrame({"x": [1.5, nan], "label": ["cat", nan]})
    for table in (frame, frame.to_dict("records")):
        assert list(forebay.from_table(table)) == [
            {"x": 1.5, "label": "cat"},
            {"x": None, "label": None},
        ]
    arrow = pa.table({"x": [1.5, nan, None]})
    pq.write_table(arrow, tmp_path / "rows.parquet")
    (tmp_path / "rows.csv").write_text('x\n1.5\nnan\n""\n')
    for table in (arrow, tmp_path / "rows.parquet", tmp_path / "rows.csv"):
        assert str([row["x"] for row in forebay.from_table(table)]) == "[1.5, nan, None]"


def test_strings_that_are_not_utf8_are_found_at_once(tmp_path):
    """In a table in memory and in one in a file, whose writer checked nothing."""
    table = pa.table({"destination": BAD_STRING})
    pq.write_table(table, tmp_path / "t.parquet")
    for each in (table, tmp_path / "t.parquet"):
        with pytest.raises(forebay.InputError, match="UTF8"):
            forebay.from_table(each)


def number(row):
    return torch.tensor([float(row["n"])])


@pytest.mark.slow
@each_whole_table
def test_predict_writes_the_columns_of_each_library(tmp_path, make):
    """The same rows again cost nothing; of a changed one, its part."""

    def predicted(rows):
        options = {"load": number, "part_size": 1, **QUIET}
        report = forebay.predict(lambda batch: batch[:, 0], make(rows), tmp_path, **options)
        return report.resumed, pq.read_table(tmp_path)

    resumed, table = predicted(ROWS)
    assert table.column_names == ["index", "path", "n", "tags", "prediction"]
    assert [table.drop_columns(["index", "prediction"]).to_pylist(), resumed] == [ROWS, 0]
    assert predicted(ROWS)[0] == 2
    resumed, table = predicted([ROWS[0], {**ROWS[1], "n": 5}])
    assert (resumed, table["prediction"].to_pylist()) == (1, [1.0, 5.0])


def test_a_list_of_dicts_without_load_is_a_dataset_of_dicts(tmp_path):
    """As it is for a DataLoader; a DataFrame is a table in any case."""
    samples = [{"x": torch.tensor([float(k)])} for k in range(3)]
    forebay.predict(lambda batch: batch["x"][:, 0], samples, tmp_path / "p", **QUIET)
    assert pq.read_table(tmp_path / "p")["prediction"].to_pylist() == [0.0, 1.0, 2.0]
    with pytest.raises(forebay.OptionError, match="the DataFrame is a table, and no function"):
        forebay.predict(len, pd.DataFrame(ROWS), tmp_path / "q", **QUIET)
    with pytest.raises(forebay.OptionError, match="the DataFrame has a column 'index'"):
        table = pd.DataFrame({"index": [1]})
        forebay.predict(len, table, tmp_path / "q", load=number, **QUIET)
