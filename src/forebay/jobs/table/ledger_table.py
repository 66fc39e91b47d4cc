"""The metadata table of a run, from its ledger."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from forebay.errors import OutputError
from forebay.jobs.ledger.database import reading
from forebay.jobs.ledger.ledger import Ledger
from forebay.jobs.outputs.output_names import table_name
from forebay.jobs.outputs.output_places import OutputPlace
from forebay.jobs.table.metadata_table import write_metadata


class LedgerTable:
    """The table in an output folder, in each of the formats in which runs wrote it.

    The ledger records these formats, and whether each is up to date. A run records first that none
    is, so a run that is killed leaves no table that counts as up to date.
    """

    def __init__(self, ledger: Ledger, folder: OutputPlace) -> None:
        self._ledger, self._folder = ledger, folder
        self._formats = ledger.tables()
        if any(self._formats.values()):
            ledger.set_tables(dict.fromkeys(self._formats, False))

    def check(self, form: str) -> None:
        """Raise OutputError if a table of this format would replace a file that no run wrote."""
        if form not in self._formats and self._folder.size(table_name(form)) is not None:
            raise self._foreign(form)

    def update(self, form: str, kind: str, *, is_stale: bool) -> None:
        """Write the table and complete the shards, unless both are up to date.

        Args:
            form: "parquet", "csv" or "jsonl".
            kind: What the inputs are: "paths", "rows" or "indices".
            is_stale: Whether the results have changed since the tables were written.

        Raises:
            OutputError: It cannot be written, or would replace a file that no run wrote.
            LedgerError: The ledger is damaged.
        """
        stale = dict.fromkeys(self._formats, False)
        current = stale if is_stale else self._formats
        if not current.get(form) or self._folder.size(table_name(form)) is None:
            # Recorded first: otherwise, after a kill, the table would look like a foreign file.
            self._ledger.set_tables({**stale, form: False})
            self._folder.copy_ledger(self._ledger, now=form not in self._formats)
            self._folder.complete_shards(self._ledger)
            self._write(form, kind, stale)
        self._ledger.set_tables({**current, form: True})

    def _write(self, form: str, kind: str, stale: Mapping[str, bool]) -> None:
        """Write and publish the table; if that fails, record that no run wrote this format."""
        name = table_name(form)

        def write(path: Path) -> None:
            write_metadata(path, form, self._columns(), self._records(kind))

        try:
            self._folder.write_table(name, write, replaces=form in self._formats)
        except FileExistsError:
            self._ledger.set_tables(stale)
            raise self._foreign(form) from None
        except (OSError, OutputError) as error:
            if self._folder.size(name) is None:  # it is there if only the flush failed
                self._ledger.set_tables(stale)
            if isinstance(error, OutputError):
                raise
            raise OutputError(
                f"the metadata table {name} cannot be moved into place: {error}\n"
                "  The inputs are done and in the ledger. Check the disk's space and health, then "
                "make the same call again."
            ) from error

    def _columns(self) -> tuple[str, ...]:
        """Return the columns of the manifest."""
        with reading("columns"):
            return tuple(map(str, json.loads(self._ledger.get_meta("columns") or "[]")))

    def _records(self, kind: str) -> Iterator[tuple[str | int, str | None, str]]:
        for _, source, row, _, metadata in self._ledger.results():
            if kind != "indices":
                yield source, row, metadata
            else:  # the row of a sample that has a name is its index
                yield int(source) if row is None else source, None, metadata

    def _foreign(self, form: str) -> OutputError:
        path = str(self._folder.locate(table_name(form)))
        return OutputError(
            f"{path!r} exists, but no run recorded in this output folder wrote it\n"
            "  It was left as it is, and no table was written. Move it away, write the table in "
            "another format (metadata=), or choose another output folder; then make the same call "
            "again."
        )
