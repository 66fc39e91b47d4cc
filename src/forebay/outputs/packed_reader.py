"""Read packed outputs: `open_output` finds the shard that holds an output, by the index.

An index and its shards are replaced when a later run changes them; a reader notices that by the
index's identity as a file, and opens both again.
"""

from __future__ import annotations

import errno
import io
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from forebay.base.files import is_url, open_regular, open_url
from forebay.base.output_names import MEMBER_INDEX, PACKED, shard_name
from forebay.errors import InputError, LedgerError, shortened
from forebay.failures import short_tracebacks
from forebay.ledger.database import connect, in_words
from forebay.ledger.records import PackedMember
from forebay.outputs.shard_writer import OpenShards

# ---- member index --------------------------------------------------------------------------------
# The index of packed outputs: an SQLite file beside the shards, from name to place.
#
# It is written with the table of metadata, in one piece, and never changed afterwards, so it is
# read without locks. The table does not name the places: they depend on which worker was how
# fast.

_APPLICATION_ID = 0x666F7270  # "forp"
_TABLE = (
    "CREATE TABLE members(name TEXT NOT NULL, size INTEGER NOT NULL, "
    "shard INTEGER NOT NULL, offset INTEGER NOT NULL, crc INTEGER NOT NULL)"
)
_BY_NAME = "CREATE UNIQUE INDEX members_by_name ON members(name)"
_SELECT = "SELECT name, size, shard, offset, crc FROM members "


class IndexWriter:
    """Writes an index; a context manager."""

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
        """Add members, in any order; call it once."""
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
    """An index that is read, by one thread of one process."""

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
        """Return the place of a packed output; None if there is none of that name."""
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


# ---- reader --------------------------------------------------------------------------------------

_local = threading.local()
# What opening a file that does not exist may raise; a member may have a longer name than a file.
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG})


@short_tracebacks
def open_output(path: str | os.PathLike[str]) -> BinaryIO:
    """Open an output of `preprocess` for reading, whether it is a file or packed into a shard.

    Args:
        path: The output's path or fsspec URL, as `from_table` and a run over a table pass it in the
            column `destination`.

    Returns:
        A binary file at its beginning. A packed output is read into memory.

    Raises:
        InputError: There is no such output, or its shard or the index is damaged.
        OSError: It cannot be read.
    """
    name = os.fspath(path)
    if is_url(name):
        return open_url(name)
    try:
        return io.BufferedReader(open_regular(name))
    except OSError as error:
        if error.errno not in _ABSENT:
            raise
        found = _found(name)
        if found is None:
            raise InputError(
                f"there is no output {shortened(name)}, neither a file nor packed\n"
                f"  A packed output is found by {PACKED}/{MEMBER_INDEX} in its output folder, an "
                "index which is written at the end of a run, together with the table."
            ) from error
    while True:
        reader, member = found
        try:
            return io.BytesIO(reader.read(member))
        except InputError:
            found = _found(name)  # a run may have replaced the index and the shard meanwhile
            if found is None or found[0] is reader:
                raise


def packed_identity(path: str) -> str:
    """Return what changes with the content of a packed output; "" if there is none of that name."""
    if f"{PACKED}/" not in path:
        return ""  # the usual case
    try:
        found = _found(path)
    except InputError:  # whoever opens it is told
        return ""
    return "" if found is None else f"{found[1].size}:{found[1].crc}"


def _found(path: str) -> tuple[_Reader, PackedMember] | None:
    """Return the reader of a path, and the place; None if it is not a packed output."""
    parts = path.split("/")
    for at in range(len(parts) - 1):
        if parts[at] == PACKED and (reader := _reader("/".join(parts[: at + 1]))) is not None:
            member = reader.index.find("/".join(parts[at:]))
            if member is not None:
                return reader, member
    return None


class _Reader:
    """Reads the packed outputs in one folder, in one thread of one process."""

    def __init__(self, folder: str, index: MemberIndex) -> None:
        self.index = index
        self._shards = OpenShards(lambda number: Path(folder, shard_name(number)))

    def read(self, member: PackedMember) -> bytes:
        """Return a packed output."""
        try:
            file = self._shards[member.shard]
            if os.fstat(file.fileno()).st_size < member.offset + member.size:
                raise InputError(_lost(member, "its shard is too short"))
            data = os.pread(file.fileno(), member.size, member.offset)
            while len(data) < member.size:  # a read returns at most 2 GiB
                more = os.pread(file.fileno(), member.size - len(data), member.offset + len(data))
                if not more:
                    raise InputError(_lost(member, "its shard is too short"))
                data += more
        except OSError as error:
            raise InputError(_lost(member, str(error))) from error
        return data

    def close(self) -> None:
        """Close the index and the shards."""
        self._shards.close()
        self.index.close()

    def __del__(self) -> None:
        """Close them when the thread has ended."""
        self.close()


def _reader(folder: str) -> _Reader | None:
    """Return this thread's reader of a folder of shards; None if that has no index."""
    try:
        status = os.stat(os.path.join(folder, MEMBER_INDEX))
    except (OSError, ValueError):  # ValueError: a NUL in the path
        return None
    identity = (os.getpid(), status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)
    readers: dict[str, tuple[Any, _Reader]] = _local.__dict__.setdefault("readers", {})
    kept, reader = readers.get(folder, (None, None))
    if reader is None or kept != identity:
        if reader is not None:
            reader.close()
        reader = _Reader(folder, MemberIndex(Path(folder, MEMBER_INDEX)))
        readers[folder] = identity, reader
    return reader


def _lost(member: PackedMember, reason: str) -> str:
    return (
        f"the packed output {member.name!r} cannot be read from shard "
        f"{shard_name(member.shard)}: {reason}\n"
        "  Run `forebay verify` on the output folder, then make the call again that made it."
    )
