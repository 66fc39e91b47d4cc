r"""The metadata table: the rows of each input, in input order; identical bytes in every run.

    pass 1   read every row, find the columns and their kinds, and write it
    pass 2   only if a later group of rows has other kinds: write every row in those of all

The columns are the manifest's, `source`, `destination`, then the user's keys as they first
appear. If the manifest is the table of an earlier step, this step's `source` is that step's
`destination`; that step's `source` is kept in the column `origin`, which later steps leave as it
is.
Nothing in the file depends on when, how often or by how many workers the inputs were done. The
rows are read in groups of 65,536, as columns, so memory does not grow with the table.

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
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

from forebay.base.arrow_arrays import (
    GROUP_ROWS,
    NULL,
    Group,
    Kind,
    final_kind,
    widen_columns,
)
from forebay.base.files import atomic_file
from forebay.base.output_names import table_name
from forebay.base.table_formats import FORMATS
from forebay.errors import OutputError
from forebay.ledger.database import reading
from forebay.ledger.ledger import Ledger
from forebay.outputs.folder import OutputFolder
from forebay.runs.returned import PIECE_ROWS, PIECES

Record = tuple[str | int, str | None, str]

# Records that are parsed at once, unless their metadata have more characters than that.
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
    try:
        while not _is_written(path, form, kinds, _groups(records(), columns)):
            pass  # it is once more, with the kinds of all rows
    except (OSError, MemoryError) as error:
        raise OutputError(
            f"the metadata table {path} cannot be written: "
            f"{getattr(error, 'strerror', None) or str(error) or 'there is not enough memory'}\n"
            "  The inputs are done and in the ledger; an earlier table is unchanged.\n"
            "  Free some space or memory, or fix the permissions, and run again to write it."
        ) from error


class _OtherKindsError(Exception):
    """A group of rows does not have the kinds that those before it were written with."""


def _is_written(path: Path, form: str, kinds: dict[str, Kind], groups: Iterator[Group]) -> bool:
    """Write the table in the kinds of its first group; return False if others have other kinds.

    Args:
        kinds: Those known of the columns; they are widened by all groups.
    """
    first = [*islice(groups, 1)]
    for _, columns in first:
        widen_columns(kinds, columns)
    final = _final(kinds)

    def checked() -> Iterator[Group]:
        yield from first
        first.clear()  # a group can be large
        for group in groups:
            widen_columns(kinds, group[1])
            if _final(kinds) != final:
                for _, columns in groups:
                    widen_columns(kinds, columns)
                raise _OtherKindsError
            yield group

    try:
        with atomic_file(path) as file:
            FORMATS[form].write(file, final, checked())
    except _OtherKindsError:
        return False
    return True


def _final(kinds: dict[str, Kind]) -> dict[str, Kind]:
    return {name: final_kind(kind) for name, kind in kinds.items()}


def _groups(records: Iterable[Record], columns: tuple[str, ...]) -> Iterator[Group]:
    """Yield the rows of the table in groups of `GROUP_ROWS`."""
    count, held = 0, dict[str, list[Any]]()
    with reading("metadata"):
        for page in _pages(records):
            added, found = _columns_of(page, columns)
            for name in (*found, *held) if found.keys() != held.keys() else ():
                held.setdefault(name, [None] * count)
                found.setdefault(name, [None] * added)
            for name, values in found.items():
                held[name].extend(values)
            count += added
            while count >= GROUP_ROWS:
                yield GROUP_ROWS, {name: values[:GROUP_ROWS] for name, values in held.items()}
                held = {name: values[GROUP_ROWS:] for name, values in held.items()}
                count -= GROUP_ROWS
        if count:
            yield count, held


def _columns_of(page: list[Record], columns: tuple[str, ...]) -> Group:
    """Return the rows of some inputs."""
    sources = [source for source, _, _ in page]
    listed: list[Any] = _parsed([text or "{}" for _, text, _ in page]) if columns else []
    rows_of_each = _parsed([metadata for _, _, metadata in page])
    rows = [*chain.from_iterable(rows_of_each)]
    if {*map(len, rows_of_each)} != {1}:  # as many as each input has rows
        counts = [*map(len, rows_of_each)]
        sources = [*chain.from_iterable(map(repeat, sources, counts))]
        listed = [*chain.from_iterable(map(repeat, listed, counts))]
    found = {name: [row.get(name) for row in listed] for name in columns}
    if _adds_origin(columns):
        found["origin"] = found["source"]
    # A manifest's `destination` is this step's source, if anything.
    found["destination"] = [None] * len(rows)
    if any(source != "" for source in sources):  # the manifest has a path column
        others = found.get("source", found["destination"])
        both = zip(sources, others, strict=True)
        found["source"] = [other if source == "" else source for source, other in both]
    first = rows[0].keys() if rows else ()
    if all(row.keys() == first for row in rows):
        return len(rows), found | {name: [row[name] for row in rows] for name in first}
    for name in dict.fromkeys(chain.from_iterable(rows)):
        pairs = zip(rows, found.get(name) or repeat(None), strict=False)
        found[name] = [row.get(name, other) for row, other in pairs]
    return len(rows), found


def _pages(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Yield the records in lists of a bounded size, to be parsed at once."""
    every = iter(records)
    while page := [*islice(every, PAGE_ROWS)]:
        sizes = [len(metadata) for _, _, metadata in page]
        if sum(sizes) <= _PAGE_CHARACTERS and max(sizes) <= PIECE_ROWS:  # each is one piece
            yield page
        else:
            for source, row, metadata in page:
                yield from ([(source, row, piece)] for piece in _pieces(metadata))


def _pieces(metadata: str) -> Iterator[str]:
    """Yield the lists of JSON that the metadata of an input are; see `runs/returned.py`."""
    begin = 0
    while (end := metadata.find(PIECES, begin)) >= 0:
        yield metadata[begin:end]
        begin = end + 1
    yield metadata[begin:] if begin else metadata


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
        is_new = form not in self._formats and not self._folder.overwrites
        if is_new and self._folder.size(table_name(form)) is not None:
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
            replaces = not is_new or self._folder.overwrites
            self._folder.write_table(name, write, replaces=replaces)
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
        for source, row, metadata in self._ledger.metadata():
            self._without_rows += metadata == "[]"
            if kind != "indices":
                yield source, row, metadata
            else:  # without a row, a sample is known by its number, perhaps there again: "7#2"
                yield source if row else int(source.partition("#")[0]), None, metadata

    def _foreign(self, form: str) -> OutputError:
        path = str(self._folder.locate(table_name(form)))
        return OutputError(
            f"{path!r} exists, but no run recorded in this output folder wrote it\n"
            "  It was left as it is, and no table was written. Make the same call with "
            "overwrite=True (--overwrite) to replace it; or move it away, write the table in "
            "another format (metadata=), or choose another output folder."
        )
