r"""The metadata table: the rows of each input, in input order; identical bytes in every run.

    pass 1   read every row, find the columns and their kinds
    pass 2   write every row: the same ones of a short table, others after reading them again

The columns are the manifest's, `source`, `destination`, then the user's keys as they first
appear. If the manifest is the table of an earlier step, this step's `source` is that step's
`destination`; that step's `source` is kept in the column `origin`, which later steps leave as it
is.
Nothing in the file depends on when, how often or by how many workers the inputs were done. The
rows are read in groups of 65,536, so memory does not grow with the table.

JSONL keeps each value as the function returned it; CSV and Parquet have one kind per column, as
`base/table_formats.py` finds it. NaN and the infinities are kept as floats, but JSON has no such
number, so they are null in JSONL and in all strings that hold JSON. A string that is not Unicode,
such as the bytes of a foreign file name, is written with backslash escapes (`\udcff`).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from forebay.base.arrow_arrays import GROUP_ROWS, NULL, Row, final_kind, widen_rows
from forebay.base.files import atomic_file
from forebay.base.output_names import table_name
from forebay.base.table_formats import FORMATS
from forebay.errors import OutputError
from forebay.ledger.database import reading
from forebay.ledger.ledger import Ledger
from forebay.outputs.folder import OutputFolder

Record = tuple[str | int, str | None, str]

# Records that are parsed at once, and the characters of metadata after which there are fewer.
PAGE_ROWS = 1024
_PAGE_CHARACTERS = 1 << 20


def write_metadata(
    path: Path, form: str, columns: tuple[str, ...], records: Callable[[], Iterable[Record]]
) -> None:
    """Write the table in one step, replacing an earlier one.

    Args:
        records: Returns source, the manifest's row as a JSON object or None, and metadata as a JSON
            list of objects, of each input; the same ones each time. A key of the metadata that is
            also a column replaces the column's value.
    """
    front = [name for name in columns if name not in ("source", "destination")]
    own = ["origin", "source"] if _adds_origin(columns) else ["source"]
    kinds = dict.fromkeys([*front, *own, "destination"], NULL)
    rows, kept, count = _rows(records(), columns), list[Row](), 0
    try:
        while page := list(islice(rows, PAGE_ROWS)):
            widen_rows(kinds, page)
            count += len(page)
            kept = [*kept, *page] if count <= GROUP_ROWS else []
        final = {name: final_kind(kind) for name, kind in kinds.items()}
        with atomic_file(path) as file:
            FORMATS[form].write(file, final, iter(kept or _rows(records(), columns)))
    except (OSError, MemoryError) as error:
        raise OutputError(
            f"the metadata table {path} cannot be written: "
            f"{getattr(error, 'strerror', None) or str(error) or 'there is not enough memory'}\n"
            "  The inputs are done and in the ledger; an earlier table is unchanged.\n"
            "  Free some space or memory, or fix the permissions, and run again to write it."
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
    """Return whether a manifest is the table of a first step, whose sources are the origins."""
    return {"source", "destination"} <= set(columns) and "origin" not in columns


def import_for_table(form: str) -> threading.Thread:
    """Import what writes a table, which takes 0.1 s, while the workers start; return the thread."""

    def load() -> None:
        if form == "parquet":
            with suppress(ImportError):  # the writer says so
                import pyarrow.parquet  # noqa: F401

    thread = threading.Thread(target=load, name="forebay-imports", daemon=True)
    with suppress(RuntimeError):  # the system refuses it: the writer imports them itself
        thread.start()
    return thread


class LedgerTable:
    """The table in an output folder, in each of the formats in which runs wrote it.

    The ledger records these formats, and whether each is up to date. A run records first that none
    is, so a run that is killed leaves no table that counts as up to date.
    """

    def __init__(self, ledger: Ledger, folder: OutputFolder) -> None:
        self._ledger, self._folder = ledger, folder
        self._formats, self._without_rows = ledger.tables(), 0
        if any(self._formats.values()):
            ledger.mark_tables_stale()

    def check(self, form: str) -> None:
        """Raise OutputError if a table of this format would replace a file that no run wrote."""
        if form not in self._formats and self._folder.size(table_name(form)) is not None:
            raise self._foreign(form)

    def update(self, form: str, kind: str, *, is_stale: bool) -> None:
        """Write the table, unless it is up to date."""
        stale = dict.fromkeys(self._formats, False)
        current = stale if is_stale else self._formats
        if current.get(form) and self._folder.size(table_name(form)) is not None:
            self._ledger.set_tables({**current, form: True})
        else:
            self._write(form, kind, current, stale)

    def _write(
        self, form: str, kind: str, current: Mapping[str, bool], stale: Mapping[str, bool]
    ) -> None:
        """Write and publish the table; if that fails, record that no run wrote this format."""
        name, is_new = table_name(form), form not in self._formats

        def record() -> None:
            written = {"without_rows": str(self._without_rows)}
            self._ledger.set_tables({**current, form: True}, **written)

        def write(path: Path) -> None:
            write_metadata(path, form, self._columns(), partial(self._records, kind))
            if is_new:
                # Recorded first: otherwise, after a kill, the table would look like a foreign
                # file. One that is recorded but not there is written again.
                record()
            self._folder.copy_ledger(self._ledger, now=is_new)

        try:
            self._folder.write_table(name, write, replaces=not is_new)
        except FileExistsError:
            self._ledger.set_tables(stale)
            raise self._foreign(form) from None
        except (OSError, OutputError) as error:
            is_there = self._folder.size(name) is not None  # then only the flush failed
            self._ledger.set_tables({**stale, form: False} if is_there else stale)
            if isinstance(error, OutputError):
                raise
            raise OutputError(
                f"the metadata table {name} cannot be moved into place: {error}\n"
                "  The inputs are done and in the ledger. Check the disk's space and health, then "
                "make the same call again."
            ) from error
        if not is_new:
            record()

    def _columns(self) -> tuple[str, ...]:
        """Return the columns of the manifest."""
        with reading("columns"):
            return tuple(map(str, json.loads(self._ledger.get_meta("columns") or "[]")))

    @property
    def without_rows(self) -> int:
        """How many done inputs had no row when the table was last written."""
        with reading("the table"):
            return int(self._ledger.get_meta("without_rows") or 0)

    def _records(self, kind: str) -> Iterator[Record]:
        self._without_rows = 0
        for _, source, row, *_, metadata, _ in self._ledger.results():
            self._without_rows += metadata == "[]"
            if kind != "indices":
                yield source, row, metadata
            else:  # without a row, a sample is known by its number, perhaps there again: "7#2"
                yield source if row else int(source.partition("#")[0]), None, metadata

    def _foreign(self, form: str) -> OutputError:
        path = str(self._folder.locate(table_name(form)))
        return OutputError(
            f"{path!r} exists, but no run recorded in this output folder wrote it\n"
            "  It was left as it is, and no table was written. Move it away, write the table in "
            "another format (metadata=), or choose another output folder; then make the same call "
            "again."
        )
