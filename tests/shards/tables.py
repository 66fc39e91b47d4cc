"""Arrow tables of all types, which the tests of several formats write and read."""

from __future__ import annotations

import datetime
import decimal
import io
from typing import Any

import pyarrow as pa
from pyarrow import parquet

ROWS = 60
_ZONE = datetime.timezone(datetime.timedelta(hours=2))


def with_nulls(values: Any, kind: Any = None) -> pa.Array:
    """Return an array whose every fifth value is missing."""
    return pa.array([None if at % 5 == 3 else each for at, each in enumerate(values)], kind)


def many_types(rows: int = ROWS) -> pa.Table:
    """Return a table with a column of nearly every type that Parquet has, nested ones too."""
    numbers, day = [*range(rows)], datetime.datetime(2024, 2, 29, 12, 30, 1, 250_000, tzinfo=_ZONE)
    times = [day + datetime.timedelta(hours=at) for at in numbers]
    columns = {
        **{kind: with_nulls(numbers, kind) for kind in ("int8", "uint16", "int64", "float32")},
        "bool": with_nulls(at % 2 == 0 for at in numbers),
        "text": with_nulls("ünï" * (at % 7) for at in numbers),
        "large": with_nulls((str(at) for at in numbers), pa.large_string()),
        "bytes": with_nulls(bytes(range(at)) for at in numbers),
        "fixed": with_nulls((b"%04d" % at for at in numbers), pa.binary(4)),
        "decimal": with_nulls(decimal.Decimal(at) / 8 for at in numbers),
        "date": with_nulls(each.date() for each in times),
        "time": with_nulls(each.time() for each in times),
        "moment": with_nulls(each.replace(tzinfo=None) for each in times),
        "zoned": with_nulls(times, pa.timestamp("us", "Europe/Paris")),
        "far": pa.array([1 << 60] * rows, pa.timestamp("ms")),
        "span": with_nulls(datetime.timedelta(seconds=at) for at in numbers),
        "list": with_nulls([at] * (at % 4) for at in numbers),
        "lists": with_nulls([["a", None], None, []][: at % 4] for at in numbers),
        "same": pa.array([[at, 1.5, -0.0] for at in numbers], pa.list_(pa.float64(), 3)),
        "struct": with_nulls({"x": at, "y": {"z": [str(at)]}} for at in numbers),
        "map": with_nulls(([("a", at)] for at in numbers), pa.map_(pa.string(), pa.int32())),
        "category": with_nulls("abc"[at % 3] for at in numbers).dictionary_encode(),
        "nothing": pa.nulls(rows),
        "a.b": pa.array(numbers),
        "a": pa.array([{"b": -at} for at in numbers]),
    }  # fmt: skip
    return pa.table(columns)


def parquet_bytes(table: pa.Table, **options: Any) -> bytes:
    """Return a table as the bytes of a Parquet file."""
    out = io.BytesIO()
    parquet.write_table(table, out, **options)
    return out.getvalue()


def arrow_bytes(table: pa.Table, rows: int, *, is_stream: bool, compression: Any = None) -> bytes:
    """Return a table as the bytes of an Arrow file or stream, with so many rows in each batch."""
    out = io.BytesIO()
    opened = pa.ipc.new_stream if is_stream else pa.ipc.new_file
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with opened(out, table.schema, options=options) as writer:
        writer.write_table(table, rows)
    return out.getvalue()
