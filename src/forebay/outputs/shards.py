"""Packed outputs: shards are completed and published when the table is written, then read.

    worker ── append ──> .forebay/packed/00000.tar     open; may end in bytes that no input owns
    commit ────────────> the ledger: name, size, shard, offset
    complete ──────────> packed/00000.tar, packed/index.sqlite

A shard whose members follow each other without a gap is cut after the last one and gets the end of
a tar file. A shard with a gap, because an input was changed or two inputs claimed one name, is
copied without the gap, under a new number; so is a shard that somebody may still write to. So a
published shard lists the recorded members, and no others. It is never changed: if a member of it is
outdated, also the last one, it is replaced by a copy.

After a kill at any point the next run does the same again. `open_output` finds the shard that holds
an output by the index. A reader notices by the identity of the index as a file that a later run
replaced index and shards, and opens both again.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import sqlite3
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from forebay.base.files import is_url, open_regular, open_url
from forebay.base.output_names import MEMBER_INDEX, PACKED, member_name, shard_name
from forebay.errors import InputError, LedgerError, OutputError, shortened
from forebay.failures import short_tracebacks
from forebay.ledger.database import connect, in_words
from forebay.ledger.names import (
    ShardRecord,
    move_members,
    read_shards,
    recorded_members,
    write_shards,
)
from forebay.ledger.records import PackedMember
from forebay.outputs.shard_writer import (
    BLOCK,
    END,
    OpenShards,
    ShardFiles,
    header,
    header_bytes,
    padding,
    write_at,
)
from forebay.outputs.staging import rename_new

if TYPE_CHECKING:
    from forebay.ledger.ledger import Ledger

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


@contextmanager
def _new_index(path: Path) -> Iterator[sqlite3.Connection]:
    """Write an index: give its connection, in a transaction that ends with the block."""
    path.unlink(missing_ok=True)
    with in_words(path), closing(connect(path, "mode=rwc&nolock=1")) as db:
        db.execute("PRAGMA journal_mode = OFF")
        db.execute("PRAGMA synchronous = OFF")  # the output folder is flushed as a whole
        db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        db.execute("BEGIN")
        db.execute(_TABLE)
        yield db
        db.execute("COMMIT")


def _add_members(index: sqlite3.Connection, members: Iterable[PackedMember]) -> None:
    """Add all members to an index, in any order."""
    index.executemany("INSERT INTO members VALUES(?, ?, ?, ?, ?)", members)
    try:
        index.execute(_BY_NAME)  # last: one external sort
    except sqlite3.IntegrityError as error:
        raise LedgerError(
            "the ledger records two packed outputs with the same name\n"
            "  It is damaged. Nothing was changed. Restore a copy of it, or use another output "
            "folder."
        ) from error


# ---- completion ----------------------------------------------------------------------------------
# The driver's end.

# How long to wait for a worker that is ending to close its shard.
_PATIENCE_S = 0.5
_COPY_BYTES = 1 << 20


@dataclass(slots=True)
class _Extent:
    """What the recorded members of a shard take up."""

    nbytes: int = 0
    end: int = 0

    @property
    def has_gaps(self) -> bool:
        return self.nbytes != self.end


def complete_shards(ledger: Ledger, root: str, flush: Callable[[], None]) -> None:
    """Publish all recorded packed outputs, and nothing else, with an index; safe to do twice.

    No worker may be at work.
    """
    files, known = ShardFiles(root), read_shards(ledger)
    if not known.numbers and not files.opened.is_dir():
        return
    _check_folder(files, known)
    try:
        files.opened.mkdir(exist_ok=True)
        with _new_index(files.opened / MEMBER_INDEX) as index:
            extents: defaultdict[int, _Extent] = defaultdict(_Extent)
            _add_members(index, _measured(recorded_members(ledger), extents))
            live = {
                _completed(number, extent, files, index, ledger, flush)
                for number, extent in sorted(extents.items())
            }
        flush()
        _publish(frozenset(live), known, files, ledger)
        flush()
        write_shards(ledger, ShardRecord(frozenset(live)))
    except OSError as error:
        raise OutputError(
            f"the shards of packed outputs cannot be completed: {error}\n"
            "  The inputs are done and in the ledger, and their outputs in the shards. Check the "
            "disk's space and health, then make the same call again."
        ) from error


def intact_members(ledger: Ledger, root: str) -> Iterator[tuple[str, int]]:
    """Yield name and bytes of the recorded packed outputs that are in their shards."""
    shards = OpenShards(ShardFiles(root).path)
    try:
        for _, member in recorded_members(ledger):
            with suppress(OSError):
                if _is_there(member, shards[member.shard]):
                    yield member.name, member.size
    finally:
        shards.close()


def _check_folder(files: ShardFiles, known: ShardRecord) -> None:
    """Raise OutputError if shards cannot be published."""
    folder, index = str(files.complete), files.complete / MEMBER_INDEX
    if os.path.islink(folder) or (os.path.lexists(folder) and not os.path.isdir(folder)):
        raise OutputError(
            f"{folder!r} is a link or a file, where the shards of packed outputs belong\n"
            "  Nothing was written there. Remove it, and make the same call again."
        )
    if not known.numbers and os.path.lexists(index):
        raise OutputError(
            f"{str(index)!r} exists, but no run recorded in this output folder wrote it\n"
            "  It was left as it is, and no shard was published. Move it away, with the shards "
            "beside it, and make the same call again."
        )


def _measured(
    members: Iterable[tuple[int, PackedMember]], extents: defaultdict[int, _Extent]
) -> Iterator[PackedMember]:
    """Yield the members, and sum up each shard in `extents`."""
    for _, member in members:
        name, size, shard, offset, _ = member
        end = offset + size + (-size % BLOCK)
        extent = extents[shard]
        extent.nbytes += end - offset + header_bytes(member_name(name), size)
        extent.end = max(extent.end, end)
        yield member


def _completed(
    number: int,
    extent: _Extent,
    files: ShardFiles,
    index: sqlite3.Connection,
    ledger: Ledger,
    flush: Callable[[], None],
) -> int:
    """Make a shard one that can be published, or copy it; return its number then."""
    path = files.path(number)
    is_open = path.parent == files.opened
    try:
        file = open_regular(path, os.O_RDWR if is_open else os.O_RDONLY, follows=False)
    except FileNotFoundError:
        raise _damaged(path, "it does not exist") from None
    with file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes < extent.end:
            raise _damaged(path, f"it has fewer than {extent.end:,} bytes")
        # If it is longer, outdated members are at its end.
        if not is_open and not extent.has_gaps and nbytes == extent.end + len(END):
            return number
        if is_open and not extent.has_gaps and _is_unused(file):
            os.ftruncate(file.fileno(), extent.end)
            write_at(file, END, extent.end)
            return number
        new, copy = files.create()
        with copy:
            rows = index.execute(f"{_SELECT}WHERE shard = ? ORDER BY offset", (number,))
            places = _copied(file, map(PackedMember._make, rows), new, copy)
    flush()  # first, or after a power cut the ledger might name a copy that is not on the disk
    move_members(ledger, places)
    moved = ((shard, offset, name) for name, (shard, offset) in places.items())
    index.executemany("UPDATE members SET shard = ?, offset = ? WHERE name = ?", moved)
    return new


def _copied(
    source: FileIO, members: Iterator[PackedMember], number: int, target: FileIO
) -> dict[str, tuple[int, int]]:
    """Copy members to another shard; return the shard and offset of each by its name."""
    places: dict[str, tuple[int, int]] = {}
    end = 0
    for member in members:
        if not _is_there(member, source):
            raise _damaged(source.name, f"{member.name!r} is not where it should be")
        head = header(member_name(member.name), member.size)
        write_at(target, head, end)
        end += len(head)
        places[member.name] = number, end
        for at in range(0, member.size, _COPY_BYTES):
            data = os.pread(source.fileno(), min(_COPY_BYTES, member.size - at), member.offset + at)
            write_at(target, data, end + at)
        write_at(target, padding(member.size), end + member.size)
        end += member.size + (-member.size % BLOCK)
    write_at(target, END, end)
    return places


def _publish(live: frozenset[int], known: ShardRecord, files: ShardFiles, ledger: Ledger) -> None:
    """Give complete shards and the index their names; remove all others of ours."""
    dead = known.numbers - live
    write_shards(ledger, ShardRecord(live, dead))  # first, or they would be foreign after a kill
    index = files.opened / MEMBER_INDEX
    if live:
        files.complete.mkdir(exist_ok=True)
        for number in sorted(live & files.numbers(files.opened)):
            name = shard_name(number)
            try:
                rename_new(str(files.opened / name), str(files.complete / name))
            except FileExistsError:
                raise OutputError(
                    f"'{PACKED}/{name}' exists already, and forebay did not make it\n"
                    "  It was left as it is, and the shard was not published. Move it away, and "
                    "make the same call again."
                ) from None
        os.replace(index, files.complete / MEMBER_INDEX)
    else:
        (files.complete / MEMBER_INDEX).unlink(missing_ok=True)
    for number in dead:
        (files.complete / shard_name(number)).unlink(missing_ok=True)
    for name in os.listdir(files.opened):  # no recorded member is in them
        with suppress(OSError):
            (files.opened / name).unlink()
    for folder in (files.opened, files.complete):
        with suppress(OSError):  # something else is in it
            folder.rmdir()


def _is_there(member: PackedMember, file: FileIO) -> bool:
    """Return whether a shard has a member where the ledger says."""
    head = header(member_name(member.name), member.size)
    start = member.offset - len(head)
    if start < 0 or os.fstat(file.fileno()).st_size < member.offset + member.size:
        return False
    return os.pread(file.fileno(), len(head), start) == head


def _is_unused(file: FileIO) -> bool:
    """Wait until nobody else can write to a shard; return False if that takes too long.

    Without locks, on some network file systems, nobody can tell.
    """
    until = time.monotonic() + _PATIENCE_S
    while True:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                return False
            time.sleep(0.01)
        except OSError:
            return False
        else:
            return True


def _damaged(path: object, reason: str) -> OutputError:
    return OutputError(
        f"the shard {str(path)!r} is missing or damaged: {reason}\n"
        "  No shard was published, and nothing is lost besides. Run `forebay verify` on the output "
        "folder, then make the same call again: it processes the inputs again whose outputs were "
        "in the shard."
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
            member = reader.find("/".join(parts[at:]))
            if member is not None:
                return reader, member
    return None


class _Reader:
    """Reads the packed outputs in one folder, in one thread of one process."""

    def __init__(self, folder: str, path: Path, index: sqlite3.Connection) -> None:
        self._path, self._index = path, index
        self._shards = OpenShards(lambda number: Path(folder, shard_name(number)))

    def find(self, name: str) -> PackedMember | None:
        """Return the place of a packed output; None if there is none of that name."""
        try:
            row = self._index.execute(f"{_SELECT}WHERE name = ?", (name,)).fetchone()
        except UnicodeEncodeError:  # no packed output has such a name
            return None
        except sqlite3.Error as error:
            raise _damaged_index(self._path, error) from error
        if row is None:
            return None
        if any(type(each) is not int or each < 0 for each in row[1:]):
            raise _damaged_index(self._path, ValueError(f"the record of {name!r}"))
        return PackedMember(*row)

    def read(self, member: PackedMember) -> bytes:
        """Return a packed output."""
        try:
            descriptor, data = self._shards[member.shard].fileno(), b""
            is_whole = os.fstat(descriptor).st_size >= member.offset + member.size
            while is_whole and len(data) < member.size:  # a read returns at most 2 GiB
                more = os.pread(descriptor, member.size - len(data), member.offset + len(data))
                is_whole, data = bool(more), data + more
            if not is_whole:
                raise InputError(_lost(member, "its shard is too short"))
        except OSError as error:
            raise InputError(_lost(member, str(error))) from error
        return data

    def close(self) -> None:
        """Close the index and the shards."""
        self._shards.close()
        self._index.close()

    def __del__(self) -> None:
        """Close them when the thread has ended."""
        self.close()


def _opened_index(path: Path) -> sqlite3.Connection:
    """Open an index for reading, by one thread of one process."""
    try:
        db = connect(path, "mode=ro&immutable=1")
    except (sqlite3.Error, LedgerError) as error:
        raise _damaged_index(path, error) from error
    try:
        (application,) = db.execute("PRAGMA application_id").fetchone()
        found = db.execute("SELECT sql FROM sqlite_master ORDER BY rowid").fetchall()
        # A view or a trigger could do anything.
        if application != _APPLICATION_ID or found != [(_TABLE,), (_BY_NAME,)]:
            raise sqlite3.DatabaseError("it is not an index of packed outputs")
    except sqlite3.Error as error:
        db.close()
        raise _damaged_index(path, error) from error
    return db


def _damaged_index(path: Path, error: Exception) -> InputError:
    return InputError(
        f"the index of packed outputs, {str(path)!r}, cannot be read: {error}\n"
        "  Remove the table of metadata, and make the call again that made the outputs: it writes "
        "both."
    )


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
        path = Path(folder, MEMBER_INDEX)
        reader = _Reader(folder, path, _opened_index(path))
        readers[folder] = identity, reader
    return reader


def _lost(member: PackedMember, reason: str) -> str:
    return (
        f"the packed output {member.name!r} cannot be read from shard "
        f"{shard_name(member.shard)}: {reason}\n"
        "  Run `forebay verify` on the output folder, then make the call again that made it."
    )
