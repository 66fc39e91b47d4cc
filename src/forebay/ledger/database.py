"""The ledger's SQLite file: its tables, their rows and columns, opened and checked."""

from __future__ import annotations

import json
import os
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count, islice
from json.encoder import encode_basestring_ascii
from pathlib import Path
from typing import Any, NamedTuple

from forebay.base.files import open_regular
from forebay.base.output_names import PRIVATE, recorded_name
from forebay.errors import BusyError, ForebayError, LedgerError, shortened
from forebay.failures import Failure, failure_from_json, failure_to_json
from forebay.ledger.records import Counts, Input, OutputFile

NAME = "ledger.sqlite"
LEDGER_FILE = f"{PRIVATE}/{NAME}"  # it marks an output folder of forebay
JOURNAL = f"{NAME}-journal"
FORMAT = 1
APPLICATION_ID = 0x666F7265  # "fore"

# user_version is `FORMAT << 24 | commits`. In exclusive locking mode SQLite does not maintain its
# own change counter; readers compare this one to see whether the file changed.
COMMITS = 1 << 24
# Older versions of SQLite take at most 999 parameters in one statement.
_PARAMETERS = 500

_FIRST = -(1 << 63)  # the lowest ordinal there can be
PAGE = 4096  # rows a query brings into memory at once
TODO, DONE, FAILED = range(3)

# Executes SQL with these parameters, and returns all rows.
Query = Callable[[str, Sequence[Any]], list[Any]]

# `ordinal` is the position in the listing, from 1; inputs that are gone have negative ones.
# `outputs` are those of the result if the input is done, and otherwise those of an earlier one,
# which stay until there is another; `error` is set if and only if it failed.
# A name that two inputs claimed has no ordinal; `rival` is one of these inputs.
# The index finds what is not done; a query uses it if it says so, as IS_FAILED does. Of done inputs
# it holds nothing, so they cost nothing.
_SCHEMA = """
CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE inputs(
    ordinal INTEGER PRIMARY KEY, source TEXT NOT NULL, row TEXT, identity TEXT NOT NULL,
    state INTEGER NOT NULL DEFAULT 0, attempts INTEGER NOT NULL DEFAULT 0,
    seconds REAL NOT NULL DEFAULT 0, outputs TEXT, metadata TEXT, error TEXT);
CREATE INDEX unfinished_inputs ON inputs(state, ordinal) WHERE state != 1;
CREATE TABLE outputs(name TEXT PRIMARY KEY, ordinal INTEGER, rival INTEGER) WITHOUT ROWID;
CREATE TABLE file_changes(name TEXT NOT NULL, staged TEXT);
"""
# SQLite uses a partial index only where a query repeats its condition.
IS_TODO, IS_FAILED = (f"state != {DONE} AND state = {state}" for state in (TODO, FAILED))
STATEMENTS = [statement.strip() for statement in _SCHEMA.split(";\n") if statement.strip()]

# What truncated JSON and values of other types raise when they are read.
DAMAGES = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError)

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
    """Return `storable` of each string, None for None; one look at all of them is much faster."""
    try:
        "".join(filter(None, texts)).encode()
    except UnicodeEncodeError:
        return [None if text is None else storable(text) for text in texts]
    return texts


def open_database(path: Path, query: str) -> sqlite3.Connection:
    """Open an SQLite file, decode strings as the ledger does, and begin no transactions."""
    if path.exists() and not path.is_file():
        raise LedgerError(
            f"{path} is not a file\n  forebay did not make it, and did not open it. Remove it."
        )
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


def query_of(db: sqlite3.Connection) -> Query:
    """Return the `Query` of a connection."""
    return partial(fetch, db)


def pages(query: Query, sql: str, after: int = 0, size: int = PAGE) -> Iterator[list[Any]]:
    """Yield rows in lists; no query is open while the caller uses them."""
    while page := query(sql, (after, size)):
        yield page
        after = page[-1][0]


def _check_journal(path: Path) -> None:
    """Refuse a journal of several databases: forebay writes none; SQLite deletes what it names."""
    journal = path.with_name(f"{path.name}-journal")
    try:
        with open_regular(journal) as file:
            file.seek(-len(_JOURNAL_MAGIC), os.SEEK_END)
            end = file.read(len(_JOURNAL_MAGIC))
    except OSError:  # there is none, or it is shorter than that
        return
    if end == _JOURNAL_MAGIC:
        raise LedgerError(
            f"{journal} names another file, which would be deleted\n"
            "  forebay did not write it. It was left as it is. Choose another output folder."
        )


def version_in(db: sqlite3.Connection) -> int:
    """Return the user version: the format, and the number of commits."""
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def check_tables(db: sqlite3.Connection, path: Path) -> bool:
    """Return whether the file is still empty."""
    application = db.execute("PRAGMA application_id").fetchone()[0]
    version = version_in(db) // COMMITS
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
    if [sql for (sql,) in found] != STATEMENTS:  # a view or a trigger could do anything
        raise sqlite3.DatabaseError("its tables are not those of a ledger")
    return False


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn what truncated JSON and wrong types raise into a `LedgerError`."""
    try:
        yield
    except ForebayError:
        raise
    except DAMAGES as error:
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
        return (
            "Nothing was changed. Check the permissions of the file and its folder, and the space "
            "and inodes of the disk (df -h, df -i)."
        )
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


def select_in(db: sqlite3.Connection, sql: str, items: Iterable[Any]) -> Iterator[Any]:
    """Yield the rows of a query, whose `{}` is a list of these integers or strings."""
    for part, marks in chunks(items):
        yield from db.execute(sql.format(marks), part).fetchall()


def chunks(items: Iterable[Any]) -> Iterator[tuple[list[Any], str]]:
    """Split integers or strings into lists short enough for one statement, each with its marks."""
    everything = list(items)
    for start in range(0, len(everything), _PARAMETERS):
        part = everything[start : start + _PARAMETERS]
        if isinstance(part[0], str):
            yield [*storables(part)], ",".join(["CAST(? AS TEXT)"] * len(part))
        else:
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


def recount(db: sqlite3.Connection) -> None:
    """Count all listed inputs."""
    states = dict(db.execute("SELECT state, count(*) FROM inputs WHERE ordinal > 0 GROUP BY state"))
    write_counts(db, Counts(sum(states.values()), states.get(DONE, 0), states.get(FAILED, 0)))


def change_counts(db: sqlite3.Connection, total: int = 0, done: int = 0, failed: int = 0) -> None:
    """Add to the counts, in the transaction that changes the states."""
    was = counts_in(dict(db.execute("SELECT * FROM meta WHERE key = ?", (_COUNTS_KEY,))))
    write_counts(db, Counts(was.total + total, was.done + done, was.failed + failed))


def write_counts(db: sqlite3.Connection, counts: Counts) -> None:
    """Store the counts."""
    put_meta(db, _COUNTS_KEY, json.dumps([counts.total, counts.done, counts.failed]))


# The columns `error` and `outputs` of the ledger's inputs, which are JSON, and what they hold.

# No output, or one with a name that needs no escapes and is none of forebay's own.
_PART = r'[^"\\./\x00-\x1f][^"\\/\x00-\x1f]*'
_USUAL = re.compile(rf'\[\]|\[\["{_PART}(/{_PART})*", \d{{1,18}}\]\]').fullmatch
# Failures in memory at once: a run may have millions, and each has kilobytes of text.
_FAILURES = 1000


def failure_column(failure: Failure) -> str:
    """Return the column of a failure; other columns have its input, attempts and seconds."""
    return json.dumps(failure_to_json(failure))


def failures_in(query: Query) -> Iterator[Failure]:
    """Yield the failures in input order; `source` is the input's path, or its row."""
    sql = (
        "SELECT ordinal, source, row, attempts, seconds, error FROM inputs "
        f"WHERE ordinal > ? AND {IS_FAILED} ORDER BY ordinal LIMIT ?"
    )
    for page in pages(query, sql, size=_FAILURES):
        for _, source, row, attempts, seconds, error in page:
            yield failure_from(source or row or "", attempts, seconds, error)


def failure_from(source: str, attempts: int, seconds: float, error: str) -> Failure:
    """Return the failure of an input from the columns that keep it."""
    with reading("a failure"):
        found = failure_from_json(json.loads(error))
        return found._replace(source=source, attempts=int(attempts), seconds=float(seconds))


def outputs_column(files: Sequence[OutputFile]) -> str:
    """Return the outputs of an input as the column that keeps them: name and size of each."""
    if not files:
        return "[]"
    if len(files) == 1:  # usual, and `dumps` takes ten times as long
        return f"[[{encode_basestring_ascii(files[0].name)}, {files[0].size}]]"
    return json.dumps([[file.name, file.size] for file in files])


def check_outputs(outputs: str) -> None:
    """Check the column that keeps the outputs of an input; call it in `reading`."""
    if not _USUAL(outputs):  # which takes a tenth of the time
        files_of(outputs)


def files_of(outputs: str) -> list[tuple[str, int]]:
    """Return name and size of each output, from the column of them; call it in `reading`."""
    if outputs == "[]":  # the usual case of inputs that have rows only
        return []
    return [(recorded_name(name), int(size)) for name, size in json.loads(outputs)]


_COLUMNS = "ordinal, source, row, identity, state, attempts, seconds, outputs, metadata, error"


class InputRow(NamedTuple):
    """A row of `inputs`; see the schema."""

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
    def failure(self) -> Failure | None:
        """Why the input failed; None if it did not."""
        if self.state != FAILED:
            return None
        name = self.source or self.row or ""
        return failure_from(name, self.attempts, self.seconds, self.error or "")


# Calls no Python code, as the class would.
_make_row: Callable[[Iterable[Any]], InputRow] = partial(tuple.__new__, InputRow)


def input_states(db: sqlite3.Connection, ordinals: Iterable[int]) -> dict[int, int]:
    """Return the states of those of these inputs that there are."""
    return dict(select_in(db, "SELECT ordinal, state FROM inputs WHERE ordinal IN ({})", ordinals))


def last_ordinal(db: sqlite3.Connection) -> int:
    """Return the highest ordinal of all inputs; 0 if there are none."""
    (found,) = db.execute("SELECT max(0, coalesce(max(ordinal), 0)) FROM inputs").fetchone()
    return int(found)


def input_name(query: Query, ordinal: int) -> str:
    """Return an input's name for messages: its path, or its row; "" if there is none."""
    found = query("SELECT source, row FROM inputs WHERE ordinal = ?", (ordinal,))
    source, row = found[0] if found else ("", None)
    return source or row or ""


def listed_rows(query: Query, where: str = "1") -> Iterator[InputRow]:
    """Yield the rows of all listed inputs in order, a page at a time."""
    sql = f"SELECT {_COLUMNS} FROM inputs WHERE ordinal > ? AND {where} ORDER BY ordinal LIMIT ?"
    for page in pages(query, sql):
        yield from map(_make_row, page)


def outputs_of(query: Query, where: str) -> Iterator[tuple[int, str]]:
    """Yield ordinal and outputs, as the ledger keeps them, of these inputs that have any."""
    sql = (
        f"SELECT ordinal, outputs FROM inputs WHERE ordinal > ? AND {where} "
        "AND outputs IS NOT NULL ORDER BY ordinal LIMIT ?"
    )
    for page in pages(query, sql, after=_FIRST):
        yield from page


def numbered_columns(
    listing: Iterator[Input], known: int, seen: Callable[[list[Input]], None] | None = None
) -> Iterator[tuple[Any, ...]]:
    """Yield source, row, identity and ordinal in the form in which SQLite stores them.

    Args:
        seen: Called with some inputs at a time.
    """
    ordinals = count(known + 1)
    while page := [*islice(listing, PAGE)]:
        if seen is not None:
            seen(page)
        columns = map(storables, zip(*page, strict=True))
        yield from zip(*columns, ordinals, strict=False)  # the ordinals have no end
