"""The index of packed outputs: an SQLite file beside the shards, from name to place.

It is written with the table of metadata, in one piece, and never changed afterwards, so it is read
without locks. The table does not name the places: they depend on which worker was how fast.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from forebay.errors import InputError, LedgerError
from forebay.jobs.ledger.database import connect, in_words
from forebay.jobs.ledger.records import PackedMember

_APPLICATION_ID = 0x666F7270  # "forp"
_TABLE = (
    "CREATE TABLE members(name TEXT NOT NULL, size INTEGER NOT NULL, "
    "shard INTEGER NOT NULL, offset INTEGER NOT NULL, crc INTEGER NOT NULL)"
)
_BY_NAME = "CREATE UNIQUE INDEX members_by_name ON members(name)"
_SELECT = "SELECT name, size, shard, offset, crc FROM members "


class IndexWriter:
    """Writes an index; a context manager.

    Args:
        path: The file, in a folder of forebay's own; replaced if it exists.
    """

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._path = path
        with in_words(path):
            self._db = connect(path, "mode=rwc&nolock=1")
            self._db.execute("PRAGMA journal_mode = OFF")
            self._db.execute("PRAGMA synchronous = OFF")  # the output folder is flushed as a whole
            self._db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            self._db.execute("BEGIN")
            self._db.execute(_TABLE)

    def __enter__(self) -> IndexWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()

    def add(self, members: Iterable[PackedMember]) -> None:
        """Add members, in any order; call it once.

        Raises:
            LedgerError: Two have the same name, or the disk is full.
        """
        with in_words(self._path):
            self._db.executemany("INSERT INTO members VALUES(?, ?, ?, ?, ?)", members)
            try:
                self._db.execute(_BY_NAME)  # last: one external sort
            except sqlite3.IntegrityError as error:
                raise LedgerError(
                    "the ledger records two packed outputs with the same name\n"
                    "  It is damaged. Nothing was changed. Restore a copy of it, or use another "
                    "output folder."
                ) from error

    def of_shard(self, number: int) -> Iterator[PackedMember]:
        """Yield the members of a shard, in the order of their offsets."""
        with in_words(self._path):
            sql = f"{_SELECT}WHERE shard = ? ORDER BY offset"
            yield from (PackedMember(*row) for row in self._db.execute(sql, (number,)))

    def move(self, places: Mapping[str, tuple[int, int]]) -> None:
        """Give members other places: shard and offset by name."""
        rows = ((shard, offset, name) for name, (shard, offset) in places.items())
        with in_words(self._path):
            self._db.executemany("UPDATE members SET shard = ?, offset = ? WHERE name = ?", rows)

    def complete(self) -> None:
        """Write everything to the file."""
        with in_words(self._path):
            self._db.execute("COMMIT")


class MemberIndex:
    """An index that is read, by one thread of one process.

    Args:
        path: The file.

    Raises:
        InputError: It cannot be read, or is not an index.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._db = connect(path, "mode=ro&immutable=1")
        except (sqlite3.Error, LedgerError) as error:
            raise self._damaged(error) from error
        try:
            (application,) = self._db.execute("PRAGMA application_id").fetchone()
            found = self._db.execute("SELECT sql FROM sqlite_master ORDER BY rowid").fetchall()
            # A view or a trigger could do anything.
            if application != _APPLICATION_ID or found != [(_TABLE,), (_BY_NAME,)]:
                raise sqlite3.DatabaseError("it is not an index of packed outputs")
        except sqlite3.Error as error:
            self._db.close()
            raise self._damaged(error) from error

    def find(self, name: str) -> PackedMember | None:
        """Return the place of a packed output; None if there is none of that name.

        Raises:
            InputError: The index is damaged.
        """
        try:
            row = self._db.execute(f"{_SELECT}WHERE name = ?", (name,)).fetchone()
        except UnicodeEncodeError:  # no packed output has such a name
            return None
        except sqlite3.Error as error:
            raise self._damaged(error) from error
        if row is None:
            return None
        if any(type(each) is not int or each < 0 for each in row[1:]):
            raise self._damaged(ValueError(f"the record of {name!r}"))
        return PackedMember(*row)

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def _damaged(self, error: Exception) -> InputError:
        return InputError(
            f"the index of packed outputs, {str(self._path)!r}, cannot be read: {error}\n"
            "  Remove the table of metadata, and make the call again that made the outputs: it "
            "writes both."
        )
