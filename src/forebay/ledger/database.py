"""The ledger's SQLite file: its tables, how it is opened and checked, and its error messages."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from json.encoder import encode_basestring_ascii
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from forebay.base.output_names import recorded_name
from forebay.errors import BusyError, ForebayError, LedgerError, shortened
from forebay.failures import Failure, failure_from_json, failure_to_json
from forebay.ledger.records import Counts, OutputFile

NAME = "ledger.sqlite"
FORMAT = 1
APPLICATION_ID = 0x666F7265  # "fore"

# user_version is `FORMAT << 24 | commits`. In exclusive locking mode SQLite does not maintain its
# own change counter; readers compare this one to see whether the file changed.
_COMMITS = 1 << 24
# Older versions of SQLite take at most 999 parameters in one statement.
_PARAMETERS = 500

TODO, DONE, FAILED, GONE = range(4)

# `ordinal` is the position in the listing, from 1; inputs that are gone have negative ones.
# `outputs` is set if and only if the input was done, `error` if and only if it failed.
# A name that two inputs claimed has no ordinal; `rival` is one of these inputs.
# The index holds failed inputs only, so the others cost nothing.
# `blocks` holds blocks of done inputs instead of their rows; see `done_blocks.py`.
_SCHEMA = """
CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE inputs(
    ordinal INTEGER PRIMARY KEY, source TEXT NOT NULL, row TEXT, identity TEXT NOT NULL,
    state INTEGER NOT NULL DEFAULT 0, attempts INTEGER NOT NULL DEFAULT 0,
    seconds REAL NOT NULL DEFAULT 0, outputs TEXT, metadata TEXT, error TEXT);
CREATE INDEX failed_inputs ON inputs(ordinal) WHERE state = 2;
CREATE TABLE blocks(block INTEGER PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE outputs(name TEXT PRIMARY KEY, ordinal INTEGER, rival INTEGER) WITHOUT ROWID;
CREATE TABLE file_changes(name TEXT NOT NULL, staged TEXT);
"""
_STATEMENTS = [statement.strip() for statement in _SCHEMA.split(";\n") if statement.strip()]

# What truncated JSON and values of other types raise when they are read.
_DAMAGES = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError)

# How a journal ends that names another file, which SQLite then deletes.
_JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")


def _decode(body: bytes) -> str:
    """Decode a string of the file; file names may hold lone surrogates."""
    try:
        return str(body, "utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise sqlite3.DatabaseError(f"a string that is not UTF-8: {error.reason}") from error


def storable(text: str) -> str | bytes:
    """Return a string in a form that `CAST(? AS TEXT)` stores, lone surrogates included."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="surrogatepass")
    return text


def storables(texts: Sequence[str | None]) -> Sequence[str | bytes | None]:
    """Return `storable_or_none` of each string; one look at all of them is much faster."""
    try:
        "".join(filter(None, texts)).encode()
    except UnicodeEncodeError:
        return [*map(storable_or_none, texts)]
    return texts


def storable_or_none(text: str | None) -> str | bytes | None:
    """Return `storable(text)`, or None for None."""
    return None if text is None else storable(text)


class Database:
    """One connection to a ledger's file, with transactions and readable errors."""

    def __init__(self, path: Path, *, locks: bool = True) -> None:
        self.path = path
        self._commits = 0
        query = "mode=rwc" if locks else "mode=rwc&nolock=1"
        with in_words(path):
            self._connection = connect(path, query)
        try:
            with in_words(path):
                self._prepare()
        except BaseException:
            self._connection.close()
            raise

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._connection.close()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Commit what the block does; if it raises, roll everything back."""
        db = self._connection
        with in_words(self.path):
            try:
                if db.in_transaction:  # Ctrl-C came before the one before could be rolled back
                    db.execute("ROLLBACK")
                db.execute("BEGIN IMMEDIATE")
                yield db
                self._commits = (self._commits + 1) % _COMMITS
                db.execute(f"PRAGMA user_version = {FORMAT * _COMMITS + self._commits}")
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:  # SQLite itself rolls back when a disk is full
                    db.execute("ROLLBACK")
                raise

    def backup(self, path: Path) -> None:
        """Copy the file as of the last commit, replacing an earlier copy."""
        path.unlink(missing_ok=True)
        with in_words(path):
            copy = connect(path, "mode=rwc")
            try:
                copy.execute("PRAGMA synchronous = OFF")
                self._connection.backup(copy)
            finally:
                copy.close()

    def load(self, path: Path) -> None:
        """Replace the content by that of a copy; if the copy is unusable, change nothing."""
        with in_words(path):
            copy = connect(path, "mode=ro")
            try:
                if check(copy, path) or copy.execute("PRAGMA quick_check").fetchone()[0] != "ok":
                    raise sqlite3.DatabaseError("the copy is incomplete")
                copy.backup(self._connection)
            finally:
                copy.close()
            version = self._connection.execute("PRAGMA user_version").fetchone()[0]
            self._commits = version % _COMMITS

    def rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[Any]:
        """Return all rows of a query; the caller bounds their number with LIMIT."""
        with in_words(self.path):
            return fetch(self._connection, sql, parameters)

    def _prepare(self) -> None:
        db = self._connection
        # Needs no shared memory maps (NFS, Lustre); keeps other processes out between commits.
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        fresh = check(db, self.path)
        db.execute("PRAGMA journal_mode = TRUNCATE")
        db.execute("PRAGMA synchronous = FULL")
        db.execute("PRAGMA cache_size = -65536")
        self._commits = db.execute("PRAGMA user_version").fetchone()[0] % _COMMITS
        if fresh:
            with self.transaction():
                db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                for statement in _STATEMENTS:
                    db.execute(statement)


def connect(path: Path, query: str) -> sqlite3.Connection:
    """Open an SQLite file, decode strings as the ledger does, and begin no transactions."""
    _check_journal(path)
    uri = f"{path.absolute().as_uri()}?{query}"
    db = sqlite3.connect(uri, uri=True, isolation_level=None)
    db.text_factory = _decode
    return db


def fetch(db: sqlite3.Connection, sql: str, parameters: Sequence[Any] = ()) -> list[Any]:
    """Return all rows of a query."""
    db.text_factory = str  # half of the time is decoding otherwise
    try:
        return db.execute(sql, parameters).fetchall()
    except sqlite3.OperationalError:  # a string that is not UTF-8, perhaps
        db.text_factory = _decode
        return db.execute(sql, parameters).fetchall()
    finally:
        db.text_factory = _decode


def _check_journal(path: Path) -> None:
    """Refuse a journal of several databases: forebay writes none; SQLite deletes what it names."""
    journal = path.with_name(f"{path.name}-journal")
    if not journal.is_file():  # and a pipe must not be opened
        return
    try:
        with journal.open("rb") as file:
            file.seek(-len(_JOURNAL_MAGIC), os.SEEK_END)
            end = file.read()
    except OSError:  # it is shorter than that
        return
    if end == _JOURNAL_MAGIC:
        raise LedgerError(
            f"{journal} names another file, which would be deleted\n"
            "  forebay did not write it. It was left as it is. Choose another output folder."
        )


def check(db: sqlite3.Connection, path: Path) -> bool:
    """Tell whether the file is still empty."""
    application = db.execute("PRAGMA application_id").fetchone()[0]
    version = db.execute("PRAGMA user_version").fetchone()[0] // _COMMITS
    tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if not (application or version or tables):
        return True
    if application != APPLICATION_ID:
        raise LedgerError(
            f"{path} is an SQLite file, but not a ledger of forebay's\n"
            "  It was not changed. Choose another output folder."
        )
    if version > FORMAT:
        raise LedgerError(
            f"{path} was written by a newer forebay: format {version}, this one reads {FORMAT}\n"
            "  It was not changed. Upgrade forebay, or choose another output folder."
        )
    found = db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY rowid")
    if [sql for (sql,) in found] != _STATEMENTS:  # a view or a trigger could do anything
        raise sqlite3.DatabaseError("its tables are not those of a ledger")
    return False


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn what truncated JSON and wrong types raise into a `LedgerError`."""
    try:
        yield
    except ForebayError:
        raise
    except _DAMAGES as error:
        raise LedgerError(
            f"the ledger's record of {what} is damaged: {shortened(error)}\n  {_advice('')}"
        ) from error


@contextmanager
def in_words(path: Path) -> Iterator[None]:
    """Turn SQLite's errors into `LedgerError`s that name the file, the cause and what to do."""
    try:
        yield
    except sqlite3.ProgrammingError:
        raise  # a bug of forebay's, such as a call after `close`
    except (sqlite3.Error, UnicodeDecodeError) as error:  # a message may quote damaged bytes
        name = getattr(error, "sqlite_errorname", "")
        kind = BusyError if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")) else LedgerError
        raise kind(f"{_first_line(path, name)}\n  {_advice(name)} (SQLite: {error})") from error


def _first_line(path: Path, name: str) -> str:
    if name.startswith("SQLITE_FULL"):
        return f"the disk is full: the ledger {path} cannot grow"
    if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM", "SQLITE_AUTH")):
        return f"the ledger {path} is read-only or cannot be opened"
    if name.startswith("SQLITE_IOERR"):
        return f"the ledger {path} cannot be written: the file system reports an error"
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return f"another process has the ledger {path} open"
    if name.startswith("SQLITE_TOOBIG"):
        return f"one record is larger than the ledger {path} can hold"
    return f"the ledger {path} is damaged"


def _advice(name: str) -> str:
    if name.startswith("SQLITE_FULL"):
        return (
            "Nothing recorded was lost. Free some space (for temporary files too), and make the "
            "same call again."
        )
    if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM", "SQLITE_AUTH")):
        return "Nothing was changed. Check the permissions of the file and its folder."
    if name.startswith("SQLITE_IOERR"):
        return "Nothing recorded was lost. Check quota, disk and mount; make the same call again."
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return "Nothing was changed. End that process, and make the same call again."
    if name.startswith("SQLITE_TOOBIG"):
        return "It was not recorded. One input's names, row and metadata may take 1 GB together."
    return (
        "It was not changed. Restore a copy of it; or move the whole output folder away and make "
        "the same call again, which then processes every input."
    )


def put_meta(db: sqlite3.Connection, key: str, value: str) -> None:
    """Store a string under a key."""
    db.execute("INSERT OR REPLACE INTO meta VALUES(?, CAST(? AS TEXT))", (key, storable(value)))


def chunks(items: Iterable[Any]) -> Iterator[tuple[list[Any], str]]:
    """Split `items` into lists short enough for one statement, each with its `?,?,...`."""
    everything = list(items)
    for start in range(0, len(everything), _PARAMETERS):
        part = everything[start : start + _PARAMETERS]
        yield part, ",".join("?" * len(part))


# How many inputs are in which state: kept in the ledger, so that they need not be counted.

_COUNTS_KEY = "_counts"
# The key that is there while the driver reads the listing on.
UNLISTED = "_unlisted"


def counts_in(meta: dict[str, str]) -> Counts:
    """Return the counts that the ledger's meta table holds."""
    with reading("counts"):
        total, done, failed = map(int, json.loads(meta.get(_COUNTS_KEY, "[0, 0, 0]")))
        return Counts(total, done, failed)


def change_counts(db: sqlite3.Connection, total: int = 0, done: int = 0, failed: int = 0) -> None:
    """Add to the counts, in the transaction that changes the states."""
    was = counts_in(dict(db.execute("SELECT * FROM meta WHERE key = ?", (_COUNTS_KEY,))))
    write_counts(db, Counts(was.total + total, was.done + done, was.failed + failed))


def write_counts(db: sqlite3.Connection, counts: Counts) -> None:
    """Store the counts."""
    put_meta(db, _COUNTS_KEY, json.dumps([counts.total, counts.done, counts.failed]))


# ---- done blocks ---------------------------------------------------------------------------------
# Blocks of done inputs: the rows of 4,096 consecutive inputs in one compressed row.
#
#     inputs    one row for each input of a block in which anything is still to be done
#     blocks    one row for each block in which every input is done
#
# An input that is done rarely changes again. So a block is compressed by the transaction in which
# the last of its inputs becomes done, which takes about a tenth of the space, and expanded by the
# one in which one of its inputs changes. Everything else in the ledger works on rows of `inputs`.

# Inputs in a block. It is part of the format.
BLOCK = 4096
# A block with more bytes of JSON stays as rows; one that has more is damaged.
LARGEST = 64 << 20
_PAGE = 4096  # rows a query brings into memory at once
_LAST_BLOCK = 1 << 50

_COLUMNS = "ordinal, source, row, identity, state, attempts, seconds, outputs, metadata, error"
_INSERT = (
    "INSERT INTO inputs VALUES(?, CAST(? AS TEXT), CAST(? AS TEXT), CAST(? AS TEXT), "
    f"{DONE}, ?, ?, CAST(? AS TEXT), CAST(? AS TEXT), NULL)"
)
_TEXT: frozenset[type] = frozenset({str})
# The types of the columns that are compressed, in their order.
_TYPES: tuple[frozenset[type], ...] = (
    _TEXT,
    frozenset({str, type(None)}),
    _TEXT,
    frozenset({int}),
    frozenset({int, float}),
    _TEXT,
    _TEXT,
)

# Executes SQL with these parameters, and returns all rows.
Query = Callable[[str, Sequence[Any]], list[Any]]


class InputRow(NamedTuple):
    """A row of `inputs`; see the schema in `database.py`."""

    ordinal: int
    source: str
    row: str | None
    identity: str
    state: int
    attempts: int
    seconds: float
    outputs: Any  # a string, unless the ledger is damaged or the input is not done
    metadata: Any
    error: str | None

    @property
    def key(self) -> str:
        """What identifies the input; see `Input.key`."""
        return self.source if self.row is None else self.row


def block_of(ordinal: int) -> int:
    """Return the block of an input: 0 for the first 4,096."""
    return (ordinal - 1) // BLOCK


def compress(db: sqlite3.Connection, ordinals: Iterable[int]) -> None:
    """Pack the blocks of these inputs in which every input is done."""
    rows = "FROM inputs WHERE ordinal BETWEEN ? AND ?"
    for block in {block_of(ordinal) for ordinal in ordinals if ordinal > 0}:
        # From the end, where most blocks have an input that is not done yet.
        todo = f"SELECT 1 {rows} AND state != {DONE} ORDER BY ordinal DESC LIMIT 1"
        if db.execute(todo, _bounds(block)).fetchone() is None:
            (done,) = db.execute(f"SELECT count(*) {rows}", _bounds(block)).fetchone()
            if done == BLOCK:
                _compress(db, block)


def compress_all(db: sqlite3.Connection) -> None:
    """Compress every block in which every input is done."""
    sql = (
        f"SELECT (ordinal - 1) / {BLOCK} AS block FROM inputs WHERE ordinal > 0 "  # noqa: S608
        f"AND state = {DONE} GROUP BY block HAVING count(*) = {BLOCK}"
    )
    for (block,) in db.execute(sql).fetchall():
        _compress(db, block)


def expand(db: sqlite3.Connection, ordinals: Iterable[int]) -> None:
    """Make rows of the compressed blocks that hold these inputs, which are going to change."""
    with reading("inputs"):
        blocks = {*map(block_of, ordinals)}
    for part, marks in chunks(sorted(blocks)):
        found = db.execute(f"SELECT block, body FROM blocks WHERE block IN ({marks})", part)  # noqa: S608
        for block, body in found.fetchall():
            _expand(db, block, body)


def expand_all(db: sqlite3.Connection) -> None:
    """Make rows of all compressed blocks."""
    for block, body in _blocks(query_of(db)):
        _expand(db, block, body)


def count_in_blocks(db: sqlite3.Connection, after: int = 0) -> int:
    """Return how many inputs after an ordinal are in compressed blocks."""
    (whole,) = db.execute(
        "SELECT count(*) FROM blocks WHERE block > ?", (after // BLOCK,)
    ).fetchone()
    begun = db.execute("SELECT 1 FROM blocks WHERE block = ?", (after // BLOCK,)).fetchone()
    return int(whole) * BLOCK + (BLOCK - after % BLOCK if begun else 0)


def recount(db: sqlite3.Connection) -> None:
    """Count all inputs again, after a change of too many of them to keep track."""
    states = dict(db.execute("SELECT state, count(*) FROM inputs WHERE ordinal > 0 GROUP BY state"))
    compressed = count_in_blocks(db)
    total = compressed + sum(states.values())
    write_counts(db, Counts(total, compressed + states.get(DONE, 0), states.get(FAILED, 0)))


def last_ordinal(db: sqlite3.Connection) -> int:
    """Return the highest ordinal of all inputs; 0 if there are none."""
    (row,) = db.execute("SELECT coalesce(max(ordinal), 0) FROM inputs").fetchone()
    (block,) = db.execute("SELECT coalesce(max(block), -1) FROM blocks").fetchone()
    return max(int(row), (int(block) + 1) * BLOCK, 0)


def row_in_block(query: Query, ordinal: int) -> InputRow | None:
    """Return an input's row from its compressed block; None if that is not compressed."""
    found = query("SELECT body FROM blocks WHERE block = ?", (block_of(ordinal),))
    return None if not found else _rows(block_of(ordinal), found[0][0])[(ordinal - 1) % BLOCK]


def listed_rows(query: Query, where: str = "1") -> Iterator[InputRow]:
    """Yield the rows of all listed inputs in order, compressed or not, a page at a time."""
    row_pages = _row_pages(query, where)
    rows = next(row_pages, [])
    last = 0
    for block, body in _blocks(query):
        first, _ = _bounds(block)
        while rows and rows[0].ordinal < first:
            count = bisect_left(rows, first, key=itemgetter(0))
            yield from rows[:count]
            last = rows[count - 1].ordinal
            rows = rows[count:] or next(row_pages, [])
        # A driver may have compressed the block since its rows were read.
        yield from (each for each in _rows(block, body) if each.ordinal > last)
    while rows:
        yield from rows
        rows = next(row_pages, [])


def listed_keys(query: Query) -> Iterator[list[str]]:
    """Yield what identifies the listed inputs, their rows or else their paths, in any order."""
    for _, body in _blocks(query):
        with reading("a block of inputs"):
            source, row, *_ = _columns(body)
        yield [name if text is None else text for name, text in zip(source, row, strict=True)]
    sql = (
        "SELECT ordinal, coalesce(row, source) FROM inputs WHERE ordinal > ? "
        "ORDER BY ordinal LIMIT ?"
    )
    for page in pages(query, sql):
        yield [key for _, key in page]


def query_of(db: sqlite3.Connection) -> Query:
    """Return the `Query` of a connection."""
    return partial(fetch, db)


def pages(query: Query, sql: str, after: int = 0, size: int = _PAGE) -> Iterator[list[Any]]:
    """Yield rows in lists; no query is open while the caller uses them."""
    while page := query(sql, (after, size)):
        yield page
        after = page[-1][0]


def _row_pages(query: Query, where: str) -> Iterator[list[InputRow]]:
    sql = f"SELECT {_COLUMNS} FROM inputs WHERE ordinal > ? AND {where} ORDER BY ordinal LIMIT ?"  # noqa: S608
    return ([*map(InputRow._make, page)] for page in pages(query, sql))


def _blocks(query: Query) -> Iterator[tuple[int, bytes]]:
    sql = "SELECT block, body FROM blocks WHERE block > ? ORDER BY block LIMIT ?"
    return (page[0] for page in pages(query, sql, after=-1, size=1))


def _bounds(block: int) -> tuple[int, int]:
    """Return the first and the last ordinal of a block."""
    return block * BLOCK + 1, (block + 1) * BLOCK


def _compress(db: sqlite3.Connection, block: int) -> None:
    rows = fetch(
        db,
        "SELECT source, row, identity, attempts, seconds, outputs, metadata FROM inputs "
        "WHERE ordinal BETWEEN ? AND ? ORDER BY ordinal",
        _bounds(block),
    )
    source, row, identity, attempts, seconds, outputs, metadata = zip(*rows, strict=True)
    with reading("inputs"):
        # More digits than microseconds would be half of a block.
        shorter = [round(each, 6) for each in seconds]
        columns = [source, row, identity, attempts, shorter, outputs, metadata]
        _check_types(columns)
        text = json.dumps(columns, separators=(",", ":")).encode()
    if len(text) > LARGEST:
        return
    db.execute("INSERT INTO blocks VALUES(?, ?)", (block, zlib.compress(text, 1)))
    db.execute("DELETE FROM inputs WHERE ordinal BETWEEN ? AND ?", _bounds(block))


def _expand(db: sqlite3.Connection, block: int, body: bytes) -> None:
    db.executemany(
        _INSERT,
        (
            (
                each.ordinal,
                storable(each.source),
                storable_or_none(each.row),
                storable(each.identity),
                each.attempts,
                each.seconds,
                storable_or_none(each.outputs),
                storable_or_none(each.metadata),
            )
            for each in _rows(block, body)
        ),
    )
    db.execute("DELETE FROM blocks WHERE block = ?", (block,))


def _rows(block: int, body: bytes) -> list[InputRow]:
    """Return the rows of a compressed block."""
    with reading("a block of inputs"):
        if not 0 <= block < _LAST_BLOCK:
            raise ValueError(f"block {block}")
        columns = _columns(body)
        first, last = _bounds(block)
        source, row, identity, attempts, seconds, outputs, metadata = columns
        return [
            *map(
                InputRow,
                range(first, last + 1),
                source,
                row,
                identity,
                repeat(DONE),
                attempts,
                seconds,
                outputs,
                metadata,
                repeat(None),
            )
        ]


def _columns(body: bytes) -> list[list[Any]]:
    inflate = zlib.decompressobj()
    try:
        text = inflate.decompress(body, LARGEST + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if len(text) > LARGEST or not inflate.eof:
        raise ValueError(f"more than {LARGEST:,} bytes, or truncated")
    columns: list[list[Any]] = json.loads(text)
    if [len(each) for each in columns] != [BLOCK] * len(_TYPES):
        raise ValueError("not the columns of 4,096 inputs")
    _check_types(columns)
    return columns


def _check_types(columns: Sequence[Sequence[Any]]) -> None:
    for each, types in zip(columns, _TYPES, strict=True):
        if not types >= {*map(type, each)}:
            raise TypeError("a value of another type")


# ---- result columns ------------------------------------------------------------------------------
# The columns `error` and `outputs` of the ledger's inputs, which are JSON, and what they hold.

# No output, or one with a name that needs no escapes and is none of forebay's own.
_PART = r'[^"\\./\x00-\x1f][^"\\/\x00-\x1f]*'
_USUAL = re.compile(rf'\[\]|\[\["{_PART}(/{_PART})*", \d{{1,18}}\]\]').fullmatch
# Failures in memory at once: a run may have millions, and each has kilobytes of text.
_FAILURES = 1000


def failure_column(failure: Failure, source: str | None) -> str:
    """Return the column of a failure.

    Args:
        source: Its path or row; None if another column has it.
    """
    return json.dumps(failure_to_json(failure._replace(source=source)))


def failures_in(query: Query) -> Iterator[Failure]:
    """Yield the failures in input order; `source` is the input's path, or its row."""
    sql = (
        "SELECT ordinal, source, row, attempts, seconds, error FROM inputs "
        "WHERE ordinal > ? AND state = 2 ORDER BY ordinal LIMIT ?"
    )
    for page in pages(query, sql, size=_FAILURES):
        for _, source, row, attempts, seconds, error in page:
            yield failure_from(source or row or "", attempts, seconds, error)


def failure_from(source: str, attempts: int, seconds: float, error: str) -> Failure:
    """Return the failure of an input from the columns that keep it."""
    with reading("a failure"):
        found = failure_from_json({"source": source, **json.loads(error)})
        source = str(found.source)
        return found._replace(source=source, attempts=int(attempts), seconds=float(seconds))


def outputs_column(files: Sequence[OutputFile]) -> str:
    """Return the outputs of an input as the column that keeps them: name, size, place of each."""
    if not files:
        return "[]"
    if len(files) == 1 and files[0].place is None:  # usual, and `dumps` takes ten times as long
        return f"[[{encode_basestring_ascii(files[0].name)}, {files[0].size}]]"
    return json.dumps([[file.name, file.size, *(file.place or ())] for file in files])


def check_outputs(outputs: str) -> None:
    """Check the column that keeps the outputs of an input; call it in `reading`."""
    if not _USUAL(outputs):  # which takes a tenth of the time
        files_of(outputs)


def files_of(outputs: str) -> list[tuple[str, int]]:
    """Return name and size of each output, from the column of them; call it in `reading`."""
    if outputs == "[]":  # the usual case of inputs that have rows only
        return []
    return [(recorded_name(name), int(size)) for name, size, *_ in json.loads(outputs)]
