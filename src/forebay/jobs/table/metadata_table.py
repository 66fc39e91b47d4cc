r"""The metadata table: the rows of each input, in input order; identical bytes in every run.

    pass 1   read every row, find the columns and their kinds
    pass 2   read every row again, as `kept_rows.py` kept it, and write it

The columns are the manifest's, `source`, `destination`, then the user's keys as they first appear.
If the manifest is the table of an earlier step, this step's `source` is that step's `destination`;
that step's `source` is kept in the column `origin`, which later steps leave as it is.
Nothing in the file depends on when, how often or by how many workers the inputs were done. The
rows are read in groups of 65,536, so memory does not grow with the table.

JSONL keeps each value as the function returned it; CSV and Parquet have one kind per column, as
determined by `column_kinds.py`. NaN and the infinities are kept as floats, but JSON has no such
number, so they are null in JSONL and in all strings that hold JSON. A string that is not Unicode,
such as the bytes of a foreign file name, is written with backslash escapes (`\udcff`).
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import IO, Any

from forebay.errors import OutputError
from forebay.jobs.ledger.database import reading
from forebay.jobs.table.column_kinds import NULL, Kind, Row, as_json, final_kind, fit, widen_rows
from forebay.jobs.table.kept_rows import KeptRows
from forebay.jobs.table.table_reader import GROUP_ROWS, batches, encoded, schema_of

Record = tuple[str | int, str | None, str]

# Records that are parsed at once, and the characters of metadata after which there are fewer.
PAGE_ROWS = 1024
_PAGE_CHARACTERS = 1 << 20


def write_metadata(
    path: Path, form: str, columns: tuple[str, ...], records: Iterable[Record]
) -> None:
    """Write the table in one step, replacing an earlier one.

    Args:
        path: The file; never contains a part of a table.
        form: "parquet", "csv" or "jsonl".
        columns: The manifest's columns.
        records: Source, the manifest's row as a JSON object or None, and metadata as a JSON list of
            objects, of each input. A key of the metadata that is also a column replaces the
            column's value.

    Raises:
        OutputError: The file cannot be written.
    """
    front = [name for name in columns if name not in ("source", "destination")]
    own = ["origin", "source"] if _adds_origin(columns) else ["source"]
    kinds = dict.fromkeys([*front, *own, "destination"], NULL)
    rows = _rows(records, columns)
    try:
        with closing(KeptRows(path.parent, GROUP_ROWS)) as kept:
            while page := list(islice(rows, PAGE_ROWS)):
                widen_rows(kinds, page)
                kept.add(page)
            final = {name: final_kind(kind) for name, kind in kinds.items()}
            with _replacing(path) as file:
                _WRITERS[form](file, final, iter(kept))
    except OSError as error:
        raise OutputError(
            f"the metadata table {path} cannot be written: {error.strerror or error}\n"
            "  The inputs are done and in the ledger; an earlier table is unchanged.\n"
            "  Free some space, or fix the folder's permissions, and run again to write it."
        ) from error


def _rows(records: Iterable[Record], columns: tuple[str, ...]) -> Iterator[Row]:
    keeps_origin, wanted = _adds_origin(columns), dict.fromkeys(columns).keys()
    with reading("metadata"):
        for page in _pages(records):
            listed_rows = _parsed(["{}" if text is None else text for _, text, _ in page])
            rows_of_each = _parsed([metadata for _, _, metadata in page])
            for (source, _, _), listed, rows in zip(page, listed_rows, rows_of_each, strict=True):
                row = listed  # in the order of the columns, unless some are missing
                if row.keys() != wanted:
                    row = {name: listed.get(name) for name in columns}
                if keeps_origin:
                    row["origin"] = row["source"]
                # A manifest's `destination` is this step's source, if anything.
                row["destination"] = None
                if source != "":  # the manifest has a path column
                    row["source"] = source
                for given in rows:
                    yield {**row, **given}


def _pages(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Yield the records in lists of a bounded size, to be parsed at once."""
    page: list[Record] = []
    characters = 0
    for record in records:
        page.append(record)
        characters += len(record[2])
        if len(page) == PAGE_ROWS or characters > _PAGE_CHARACTERS:
            yield page
            page, characters = [], 0
    if page:
        yield page


def _parsed(texts: list[str]) -> list[Any]:
    """Return what several strings of JSON hold; one call for all of them is much faster."""
    values: list[Any] = json.loads(f"[{','.join(texts)}]")
    return values if len(values) == len(texts) else [json.loads(text) for text in texts]


def _adds_origin(columns: tuple[str, ...]) -> bool:
    """Tell whether a manifest is the table of a first step, whose sources are the origins."""
    return {"source", "destination"} <= set(columns) and "origin" not in columns


def _write_parquet(file: IO[bytes], kinds: dict[str, Kind], rows: Iterator[Row]) -> None:
    import pyarrow.parquet

    # Without the stored Arrow schema there is nothing in the file but the table itself.
    writer = pyarrow.parquet.ParquetWriter(
        file,
        schema_of(kinds),
        version="2.6",
        compression="zstd",
        store_schema=False,
    )
    with writer:
        for batch in batches(kinds, rows):
            writer.write_batch(batch, row_group_size=GROUP_ROWS)


def _write_csv(file: IO[bytes], kinds: dict[str, Kind], rows: Iterator[Row]) -> None:
    # With "\r\n" as its line end the module quotes cells with either character; with "\n" some
    # versions of Python do not quote a single "\r".
    writer = csv.writer(_Lines(file), lineterminator="\r\n")
    writer.writerow(kinds)
    for row in rows:
        writer.writerow([_cell(row.get(name), kind) for name, kind in kinds.items()])


def _write_jsonl(file: IO[bytes], kinds: dict[str, Kind], rows: Iterator[Row]) -> None:
    for row in rows:
        line = as_json({name: row.get(name) for name in kinds})
        file.write(encoded(line + "\n"))


_WRITERS = {"parquet": _write_parquet, "csv": _write_csv, "jsonl": _write_jsonl}


class _Lines:
    r"""The file of a csv.writer, which writes each row as one string that ends in "\r\n"."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, row: str) -> int:
        return self._file.write(encoded(row[:-2] + "\n"))


def _cell(value: Any, kind: Kind) -> Any:
    if isinstance(value, list | dict):
        return as_json(value)
    value = fit(value, kind)
    return ("false", "true")[value] if isinstance(value, bool) else value


@contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file that replaces `path` in one durable step, or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
