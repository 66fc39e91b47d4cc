"""Inputs that are not copied into the ledger: the rows of a large Parquet manifest.

    manifest   row 1, row 2, ...                    read where they are wanted
    ledger     ordinal = row number, hash of row    tells whether the row is still the same

The hash stands in the column `row` of the ledger, so everything else there works as for rows that
are copied. It is part of the format.
"""

from __future__ import annotations

import sqlite3
from base64 import b64encode
from collections.abc import Iterable, Iterator
from hashlib import blake2b

from forebay.errors import InputError
from forebay.jobs.ledger.database import storable, storable_or_none
from forebay.jobs.ledger.done_blocks import compress_all, expand_all
from forebay.jobs.ledger.records import Input, RowsInPlace

# Inputs that were listed last, which are wanted again when they are sent to workers and recorded.
_RECENT = 1 << 15
# To reach a row that is further ahead than this, reading starts again at that row.
_SKIPPED = 1 << 16


def row_hash(row: str) -> str:
    """Return the 11 characters that stand for a row; no JSON object looks like them."""
    return b64encode(blake2b(row.encode(errors="surrogatepass"), digest_size=8).digest())[
        :11
    ].decode()


def hashed(one: Input) -> Input:
    """Return an input as the ledger records it."""
    return one if one.row is None else Input("", row_hash(one.row), one.identity)


class ManifestInputs:
    """The inputs of a manifest, by their ordinals.

    Args:
        rows: The manifest.

    Attributes:
        names_files: Whether one of the rows that were listed names a file.
    """

    def __init__(self, rows: RowsInPlace) -> None:
        self.names_files = False
        self._rows = rows
        self._recent: dict[int, Input] = {}
        self._following: Iterator[Input] = iter(())
        self._next = -_SKIPPED  # no row is at hand

    def listed(self, listing: Iterable[Input], first: int) -> Iterator[Input]:
        """Yield the inputs of a listing as the ledger records them, from an ordinal on."""
        for ordinal, one in enumerate(listing, first):
            self._recent[ordinal] = one
            self._recent.pop(ordinal - _RECENT, None)
            self.names_files |= one.identity != ""
            yield hashed(one)

    def recent(self, ordinal: int) -> Input | None:
        """Return an input that was listed a short while ago; None for any other."""
        return self._recent.get(ordinal)

    def at(self, ordinal: int) -> Input:
        """Return an input; fast for increasing ordinals, and for those listed last.

        Raises:
            InputError: The manifest has changed, or cannot be read.
        """
        found = self._recent.get(ordinal)
        if found is not None:
            return found
        if not self._next <= ordinal < self._next + _SKIPPED:
            self._following, self._next = self._rows.read(ordinal), ordinal
        for one in self._following:
            self._next += 1
            if self._next > ordinal:
                return one
        raise InputError(
            f"{self._rows.name} has no row {ordinal:,}, which the ledger has\n"
            "  Completed work is kept. Make the same call again, which compares all rows."
        )


def hash_rows(db: sqlite3.Connection) -> None:
    """Replace the rows in a ledger by their hashes."""
    expand_all(db)
    db.create_function("row_hash", 1, row_hash, deterministic=True)
    db.execute("UPDATE inputs SET source = '', row = row_hash(row) WHERE row IS NOT NULL")
    compress_all(db)


class CopiedRows:
    """Replaces the hashes in a ledger by the rows of a listing that is not read in place.

    Args:
        db: The ledger, in a transaction that ends with `restore`.
    """

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        db.execute("CREATE TEMP TABLE copies(ordinal INTEGER PRIMARY KEY, source TEXT, row TEXT)")

    def listed(self, listing: Iterable[Input]) -> Iterator[Input]:
        """Yield the inputs as the ledger has them, and remember what they are."""
        for ordinal, one in enumerate(listing, 1):
            self._db.execute(
                "INSERT INTO copies VALUES(?, CAST(? AS TEXT), CAST(? AS TEXT))",
                (ordinal, storable(one.source), storable_or_none(one.row)),
            )
            yield hashed(one)

    def restore(self) -> None:
        """Put the rows in the place of the hashes."""
        expand_all(self._db)
        self._db.execute(
            "UPDATE inputs SET "
            "source = (SELECT source FROM copies WHERE copies.ordinal = inputs.ordinal), "
            "row = (SELECT row FROM copies WHERE copies.ordinal = inputs.ordinal) "
            "WHERE ordinal IN (SELECT ordinal FROM copies)"
        )
        self._db.execute("DROP TABLE temp.copies")
        compress_all(self._db)
