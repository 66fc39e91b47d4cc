"""Any record is a row, and its values have their types in the table."""

# Times without a zone are meant.
# ruff: noqa: DTZ001

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import enum
import fractions
import json
import pathlib
import sqlite3
import typing
import uuid
import zoneinfo
from decimal import Decimal

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import forebay

QUIET = {"num_workers": 0, "progress": False, "max_failures": 9}
BERLIN, OFFSET = zoneinfo.ZoneInfo("Europe/Berlin"), dt.timezone(dt.timedelta(hours=-5))
TIME = dt.datetime(2024, 7, 2, 3, 4, 5, 678)
Point = collections.namedtuple("Point", "x y")


class Typed(typing.NamedTuple):
    """A record of the standard library."""

    x: int
    when: dt.date


@dataclasses.dataclass
class Data:
    """Another."""

    x: int
    inner: Point


@dataclasses.dataclass(slots=True, frozen=True)
class Slots:
    """One without a `__dict__`."""

    x: int


class Model:
    """What models of pydantic look like."""

    def __init__(self, **fields):
        self.fields = fields

    def model_dump(self):
        return self.fields


class Color(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Text(str):
    """Strings, numbers and dicts of libraries are subclasses."""


class Number(int):
    pass


class Real(float):
    def __str__(self):
        return "a real"


class Dictionary(dict):
    pass


class Several(collections.UserList):
    pass


def database_row():
    connection = sqlite3.connect(":memory:")
    connection.row_factory = sqlite3.Row
    row = connection.execute("SELECT 1 AS x, 'a' AS s").fetchone()
    connection.close()
    return row


FRAME = pd.DataFrame({"x": [1, 2], "s": ["a", "b"], "t": pd.to_datetime([TIME, None])})
TWO = [{"x": 1, "s": "a"}, {"x": 2, "s": "b"}]

# What a function returns, and the rows that pyarrow reads.
RECORDS = {
    "dict": ({"x": 1}, [{"x": 1}]),
    "dataclass": (Data(1, Point(2, 3)), [{"x": 1, "inner": {"x": 2, "y": 3}}]),
    "dataclass with slots": (Slots(1), [{"x": 1}]),
    "named tuple": (Point(1, "a"), [{"x": 1, "y": "a"}]),
    "typed named tuple": (Typed(1, dt.date(2024, 1, 2)), [{"x": 1, "when": dt.date(2024, 1, 2)}]),
    "model": (Model(x=1, y=Model(z=2)), [{"x": 1, "y": {"z": 2}}]),
    "row of a database": (database_row(), [{"x": 1, "s": "a"}]),
    "ordered dict": (collections.OrderedDict(x=1), [{"x": 1}]),
    "Series": (pd.Series({"x": 1, "s": "a"}), [{"x": 1, "s": "a"}]),
    "Series of a frame": (FRAME[["x", "s"]].iloc[1], [{"x": 2, "s": "b"}]),
    "list of dataclasses": ([Slots(1), Slots(2)], [{"x": 1}, {"x": 2}]),
    "list of named tuples": ([Point(1, 2), Point(3, 4)], [{"x": 1, "y": 2}, {"x": 3, "y": 4}]),
    "list of Series": ([pd.Series({"x": 1}), {"x": 2}], [{"x": 1}, {"x": 2}]),
    "DataFrame": (FRAME, [{"x": 1, "s": "a", "t": TIME}, {"x": 2, "s": "b", "t": None}]),
    "polars": (pl.DataFrame({"x": [1, 2], "s": ["a", "b"]}), TWO),
    "Arrow table": (pa.table({"x": [1, 2], "s": ["a", "b"]}), TWO),
    "record batch": (pa.record_batch({"x": [1, 2], "s": ["a", "b"]}), TWO),
    "list of tables": ([FRAME[["x", "s"]].head(1), pa.table({"x": [2], "s": ["b"]})], TWO),
    "generator of records": (lambda: (Slots(k) for k in (1, 2)), [{"x": 1}, {"x": 2}]),
    "generator of frames": (lambda: iter([FRAME[["x", "s"]]]), TWO),
    "tuple of dicts": (({"x": 1}, {"x": 2}), [{"x": 1}, {"x": 2}]),
}

# Values of a column "v": as they are returned, as pyarrow reads them, and the type of the column.
US, NS = pa.timestamp("us"), pa.timestamp("ns")
VALUES = {
    "date": (dt.date(1960, 1, 2), dt.date(1960, 1, 2), pa.date32()),
    "time": (dt.time(1, 2, 3, 4), dt.time(1, 2, 3, 4), pa.time64("us")),
    "datetime": (TIME, TIME, US),
    "datetime of a zone": (TIME.replace(tzinfo=BERLIN),) * 2 + (pa.timestamp("us", BERLIN.key),),
    "datetime in UTC": (TIME.replace(tzinfo=dt.UTC),) * 2 + (pa.timestamp("us", "+00:00"),),
    "datetime of an offset": (TIME.replace(tzinfo=OFFSET),) * 2 + (pa.timestamp("us", "-05:00"),),
    "far datetime": (dt.datetime(9999, 12, 31),) * 2 + (US,),
    "Timestamp": (pd.Timestamp("2024-01-02 03:04:05"), dt.datetime(2024, 1, 2, 3, 4, 5), US),
    "Timestamp with ns": (pd.Timestamp(1, unit="ns"), pd.Timestamp(1, unit="ns"), NS),
    "datetime64": (np.datetime64("2024-01-02T03:04"), dt.datetime(2024, 1, 2, 3, 4), US),
    "datetime64 day": (np.datetime64("2024-01-02"), dt.date(2024, 1, 2), pa.date32()),
    "timedelta": (dt.timedelta(-1, 5, 7), dt.timedelta(-1, 5, 7), pa.duration("us")),
    "Timedelta": (pd.Timedelta("3s"), dt.timedelta(seconds=3), pa.duration("us")),
    "timedelta64": (np.timedelta64(90, "m"), dt.timedelta(minutes=90), pa.duration("us")),
    "Decimal": (Decimal("-12.50"), Decimal("-12.50"), pa.decimal128(4, 2)),
    "Decimal with exponent": (Decimal("1E+3"), Decimal("1000"), pa.decimal128(4, 0)),
    "bytes": (b"\xff\0", b"\xff\0", pa.binary()),
    "bytearray": (bytearray(b"ab"), b"ab", pa.binary()),
    "Enum": (Color.RED, "red", pa.string()),
    "IntEnum": (Level.HIGH, 3, pa.int64()),
    "float32": (np.float32(0.5), 0.5, pa.float64()),
    "int8": (np.int8(-3), -3, pa.int64()),
    "bool_": (np.bool_(True), True, pa.bool_()),
    "str_": (np.str_("a"), "a", pa.string()),
    "scalar tensor": (torch.tensor(7), 7, pa.int64()),
    "str of a library": (Text("a"), "a", pa.string()),
    "int of a library": (Number(4), 4, pa.int64()),
    "float of a library": (Real(0.5), 0.5, pa.float64()),
    "dict of a library": (Dictionary(a=Number(1)), {"a": 1}, pa.struct({"a": pa.int64()})),
    "list of a library": (Several([Text("a")]), ["a"], pa.list_(pa.string())),
    "path": (pathlib.Path("a/b"), "a/b", pa.string()),
    "uuid": (uuid.UUID(int=1), str(uuid.UUID(int=1)), pa.string()),
    "fraction": (fractions.Fraction(1, 3), "1/3", pa.string()),
    "vector": (np.array([1, 2], "f4"), [1.0, 2.0], pa.list_(pa.float32(), 2)),
    "vector of a model": (torch.ones(3), [1.0] * 3, pa.list_(pa.float32(), 3)),
    "vector of integers": (np.arange(2, dtype="u1"), [0, 1], pa.list_(pa.uint8(), 2)),
    "matrix": (np.ones((1, 2)), [[1.0, 1.0]], pa.list_(pa.list_(pa.float64()))),
    "list of dates": ([dt.date(2024, 1, 2)],) * 2 + (pa.list_(pa.date32()),),
    "dict of bytes": ({"b": b"a"}, {"b": b"a"}, pa.struct({"b": pa.binary()})),
    "NaT": (pd.NaT, None, pa.string()),
}


def table_of(returned):
    """Return the table of a run in which each function returns one of these."""
    values = [*returned]
    given = [{"at": at} for at in range(len(values))]

    def function(row):
        value = values[row["at"]]
        return value() if callable(value) else value

    report = forebay.preprocess(function, given, "out", redo="*", **QUIET)
    assert not report.failures, report.failures[0].message
    return pq.read_table("out/metadata.parquet").drop_columns(["at", "source", "destination"])


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", RECORDS)
def test_any_record_is_a_row(name):
    """With a column for each field, and what a table returned has a row for each of its own."""
    returned, rows = RECORDS[name]
    found = table_of([returned]).to_pylist()
    assert [{key: each[key] for key in rows[0]} for each in found] == rows
    assert pd.read_parquet("out/metadata.parquet").shape[0] == len(rows)


@pytest.mark.parametrize("name", VALUES)
def test_values_have_their_types_in_parquet(name):
    """Beside missing ones; and pandas reads the table."""
    value, wanted, kind = VALUES[name]
    table = table_of([{"v": value}, {"v": None}, {"v": value}])
    assert str(table.schema.field("v").type).replace("element", "item") == str(kind)
    assert table.column("v").to_pylist() == [wanted, None, wanted]
    assert len(pd.read_parquet("out/metadata.parquet")) == 3


@pytest.mark.parametrize(
    ("values", "kind", "wanted"),
    [
        ([TIME, pd.Timestamp(5, unit="ns")], "timestamp[ns]", None),
        (
            [TIME.replace(tzinfo=BERLIN), TIME.replace(tzinfo=dt.UTC)],
            "timestamp[us, tz=UTC]",
            [TIME.replace(tzinfo=BERLIN), TIME.replace(tzinfo=dt.UTC)],
        ),
        ([Decimal("1.5"), Decimal("100")], "decimal128(4, 1)", [Decimal("1.5"), Decimal("100.0")]),
        ([np.ones(2), np.ones(3)], "list<element: double>", [[1.0] * 2, [1.0] * 3]),
        ([np.ones(2, "f4"), [1, 2.5]], "list<element: double>", [[1.0] * 2, [1.0, 2.5]]),
        ([1, 0.5], "double", [1.0, 0.5]),
        ([TIME, "soon"], "string", [f'"{TIME.isoformat()}"', '"soon"']),
        ([TIME, TIME.replace(tzinfo=dt.UTC)], "string", None),
        ([b"a", "a"], "string", ['"YQ=="', '"a"']),
        ([Decimal(10) ** 30, Decimal("1e-30")], "string", None),
        ([dt.date(2024, 1, 2), 5], "string", ['"2024-01-02"', "5"]),
    ],
)
def test_a_column_that_changes_its_type_follows_one_rule(values, kind, wanted):
    """The least type that holds all; without one, each value as JSON, whatever the order."""
    table = table_of([{"v": each} for each in values])
    assert str(table.schema.field("v").type) == kind
    if wanted is not None:
        assert table.column("v").to_pylist() == wanted
    table = table_of([{"v": each} for each in reversed(values)])
    assert str(table.schema.field("v").type) == kind


@pytest.mark.parametrize(
    "value",
    [object(), 1j, lambda: 1, {"\0date": [1]}, pd.DataFrame({"x": [1]}), torch.ones(2).to_sparse()],
    ids=["object", "complex", "function", "mark", "frame in a dict", "sparse"],
)
def test_what_no_table_can_hold_fails_its_input_in_words(value):
    """That input alone; nothing becomes a string of its representation."""
    values = [{"v": 1}, {"v": value}, {"v": 2}]
    rows = [{"at": at} for at in range(3)]
    report = forebay.preprocess(lambda row: values[row["at"]], rows, "out", **QUIET)
    assert (report.done, report.failed) == (2, 1)
    assert "metadata 'v' is not JSON-serializable" in report.failures[0].message


def test_other_formats_have_the_same_values_as_strings():
    """In ISO format, and bytes in base64."""
    row = {"t": TIME, "b": b"a", "d": dt.timedelta(1), "v": np.ones(2), "n": {"t": TIME}}
    for form in ("csv", "jsonl"):
        forebay.preprocess(lambda _: row, [{"x": 1}], "out", metadata=form, **QUIET)
    iso = TIME.isoformat()
    found = json.loads(pathlib.Path("out/metadata.jsonl").read_text())
    assert (found["t"], found["b"], found["d"]) == (iso, "YQ==", "1 day, 0:00:00")
    assert (found["v"], found["n"]) == ([1.0, 1.0], {"t": iso})
    (found,) = pd.read_csv("out/metadata.csv").to_dict("records")
    assert (found["t"], found["b"], found["v"]) == (iso, "YQ==", "[1.0, 1.0]")
    assert found["n"] == f'{{"t":"{iso}"}}' or found["n"] == f'{{"t": "{iso}"}}'
