"""A listing, compared with the inputs in the ledger.

A listing equal to the ledger is only compared with it, and new inputs after the known ones are
appended. From any other difference on, the whole listing is joined with the ledger, see
`rearrangement.py`. Of a long listing the rest is read while the first inputs are worked on, and
those inputs are written with their results: a row that is written twice takes three times as long.

An input has one of four states against the ledger. As it was: its result stays. Not to be seen now:
all that the ledger has of it stays. Changed: it is to be done again, and its outputs stay until
then. No longer listed: it leaves the table, and its outputs stay until `forebay prune`.

No input may be listed twice, which is found in bounded memory, once the ledger has all of them: the
hashes of the keys are divided into 256 parts, which go to a temporary file when there are many.
Each part is then small enough to be looked through in memory.
"""

from __future__ import annotations

import sqlite3
import tempfile
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, repeat
from typing import Any, NamedTuple

from forebay.errors import InputError
from forebay.ledger.database import (
    DONE,
    TODO,
    change_counts,
    last_ordinal,
    listed_rows,
    numbered_columns,
    outputs_column,
    pages,
    query_of,
    storables,
)
from forebay.ledger.identity import (
    CHANGED,
    SAME,
    UNSEEN,
    identity_change,
)
from forebay.ledger.records import (
    NAMED,
    Done,
    Enrolment,
    Input,
    IsAway,
    SameContents,
    Todo,
)

# How a listing compared, and its new inputs that are still to be appended; None without any.
Merged = tuple[Enrolment, Iterator[Input] | None]


def merge(
    db: sqlite3.Connection,
    listing: Iterable[Input],
    complete: bool,
    ahead: int | None = None,
    seen: SeenKeys | None = None,
    same_contents: SameContents | None = None,
    is_away: IsAway | None = None,
) -> Merged:
    """Merge a listing into the ledger within the caller's transaction.

    Args:
        seen: Finds what is listed twice; None if nothing can be.
        is_away: Finds files that are not listed because their folder is away; None for a listing
            that would name them.
    """
    known, remaining = _skip_known(db, iter(listing))
    if known.following is None and not (complete and last_ordinal(db) > known.count):
        return known.enrolment(), None
    rest = remaining if known.following is None else chain((known.following,), remaining)
    if known.following is not None and known.is_all and not _has_gone(db):
        new, more = append(db, known.count, rest, ahead, seen)
        if more is None and seen is not None:
            check_distinct(db, seen, is_late=False)
        return known.enrolment(new), more
    from forebay.ledger.rearrangement import LISTED, list_away, load_listing, rearrange

    if not load_listing(db, known.count, rest):
        found = find_duplicate(lambda: db.execute(LISTED))
        assert found is not None, "the index found one"
        raise listed_twice(found, is_late=False)
    if complete and is_away is not None:
        list_away(db, known.count, is_away)
    return rearrange(db, known.enrolment(), complete, same_contents), None


def extend(
    db: sqlite3.Connection,
    known: int,
    more: Iterator[Input],
    ahead: int | None,
    seen: SeenKeys | None = None,
) -> Merged | None:
    """Append the rest of a listing whose beginning is known to be that of the ledger."""
    first = next(more, None)
    if first is None:
        return Enrolment(0, known, 0, 0), None
    if _has_gone(db):
        return None
    new, rest = append(db, known, chain((first,), more), ahead, seen)
    # Even if nothing is left: the whole listing is searched for duplicates at its end.
    return Enrolment(new, known, 0, 0), iter(()) if rest is None else rest


def append(
    db: sqlite3.Connection,
    known: int,
    listing: Iterator[Input],
    ahead: int | None,
    seen: SeenKeys | None = None,
) -> tuple[int, Iterator[Input] | None]:
    """Append new inputs after the known ones.

    Args:
        ahead: How many of them to read; None for all.
    """
    new = db.executemany(
        "INSERT INTO inputs(source, row, identity, ordinal) "
        "VALUES(CAST(? AS TEXT), CAST(? AS TEXT), CAST(? AS TEXT), ?)",
        numbered_columns(islice(listing, ahead), known, seen.add if seen else None),
    ).rowcount
    change_counts(db, total=new)
    following = next(listing, None)
    return new, None if following is None else chain((following,), listing)


class ReadAhead:
    """The rest of a listing: the inputs that were read and that the ledger lacks, and all others.

    Attributes:
        rest: The others; None if there are none.
    """

    def __init__(self, rest: Iterator[Input] | None = None) -> None:
        self.rest = rest
        self._next: list[Input] = []  # the first of the rest, if it was read
        self._first, self._inputs = 1, list[Input]()  # the ordinal of the first of those read

    @property
    def last(self) -> int:
        """The ordinal of the last one that was read; 0 if there are none."""
        return self._first + len(self._inputs) - 1 if self._inputs else 0

    def get(self, ordinal: int) -> Input | None:
        """Return one that was read; None for another."""
        at = ordinal - self._first
        return self._inputs[at] if 0 <= at < len(self._inputs) else None

    def read(self, known: int, count: int, seen: SeenKeys | None) -> tuple[list[Todo], bool]:
        """Read so many inputs on; return them, and whether they are the last.

        Args:
            known: The last ordinal of the ledger.
        """
        assert self.rest is not None, "nothing is left to read"
        page = [*self._next, *islice(self.rest, count - len(self._next))]
        self._next = [*islice(self.rest, 1)]
        is_whole = not self._next
        if is_whole:
            self.rest = None
        if seen is not None:
            seen.add(page)
        if not self._inputs:
            self._first = known + 1
        first = self._first + len(self._inputs)
        self._inputs += page
        todo = [
            # Calls no Python code, as the class would.
            tuple.__new__(Todo, (ordinal, each[0], each[1], getattr(each, "opens", None)))
            for ordinal, each in enumerate(page, first)
        ]
        return todo, is_whole

    def write(self, db: sqlite3.Connection, last: int, done: Iterable[Done] = ()) -> range:
        """Write those up to an ordinal, each done or still to do; return the ordinals of them."""
        if not self._inputs:
            return range(0)
        known = last_ordinal(db)
        if (count := known - self._first + 1) > 0:  # they were committed
            del self._inputs[:count]
            self._first = known + 1
        page = self._inputs[: max(last - known, 0)]
        results = {one.ordinal: one for one in done if one.ordinal > known}
        rows = [
            (ordinal, *each, *_columns_of(results.get(ordinal)))
            for ordinal, each in enumerate(page, known + 1)
        ]
        if rows:
            ordinals, sources, texts, identities, *numbers, metadata = zip(*rows, strict=True)
            strings = map(storables, (sources, texts, identities, metadata))
            db.executemany(
                "INSERT INTO inputs(source, row, identity, metadata, ordinal, state, attempts, "
                "seconds, outputs) VALUES(CAST(? AS TEXT), CAST(? AS TEXT), CAST(? AS TEXT), "
                "CAST(? AS TEXT), ?, ?, ?, ?, ?)",
                zip(*strings, ordinals, *numbers, strict=True),
            )
            change_counts(db, total=len(rows))
        return range(known + 1, known + 1 + len(rows))


_TO_DO = TODO, 0, 0.0, None, None


def _columns_of(one: Done | None) -> tuple[Any, ...]:
    """Return state, attempts, seconds, outputs and metadata of an input."""
    if one is None:
        return _TO_DO
    return DONE, one.attempts, one.seconds, outputs_column(one.outputs), one.metadata


def check_distinct(db: sqlite3.Connection, seen: SeenKeys, *, is_late: bool) -> None:
    """Raise InputError if an input is listed twice."""
    hashes = seen.hashes if len(seen.hashes) == last_ordinal(db) else None
    found = find_duplicate(lambda: listed_rows(query_of(db)), hashes)
    if found is not None:
        raise listed_twice(found, is_late=is_late)


@dataclass(slots=True)
class _Known:
    """The beginning of a listing, as far as nothing in the ledger changes.

    Attributes:
        following: The first input after it; None at the listing's end.
        is_all: Whether the ledger ends before that one.
    """

    count: int = 0
    unseen: tuple[int, ...] = ()
    unseen_names: tuple[str, ...] = ()
    following: Input | None = None
    is_all: bool = False

    def enrolment(self, new: int = 0) -> Enrolment:
        """Return the enrolment of a listing that continues with new inputs only."""
        unseen = self.unseen, self.unseen_names
        return Enrolment(new, self.count, 0, 0, 0, 0, 0, *unseen)

    def add(self, page: Sequence[Input], rows: Sequence[tuple[Any, ...]]) -> int | None:
        """Add inputs as far as nothing changes; return where something does, None for nowhere.

        Args:
            rows: What the ledger has in their places: ordinal, source, row, identity, state.
        """
        for at, one in enumerate(page):
            found, is_known = CHANGED, at < len(rows)
            if is_known and rows[at][1:3] == one[:2]:
                found = identity_change(rows[at][3], one.identity)
            if found == UNSEEN and rows[at][4] != DONE:
                found = CHANGED  # see `rearrange`
            if found not in (SAME, UNSEEN):
                self.following, self.is_all = one, not is_known
                return at
            if found == UNSEEN:
                self.unseen += (rows[at][0],)
                if len(self.unseen_names) < NAMED:
                    self.unseen_names += (one.source or one.row or "",)
            self.count += 1
        return None


_SELECT_KNOWN = (
    "SELECT ordinal, source, row, identity, state FROM inputs "
    "WHERE ordinal > ? ORDER BY ordinal LIMIT ?"
)


def _skip_known(db: sqlite3.Connection, listing: Iterator[Input]) -> tuple[_Known, Iterator[Input]]:
    """Read a listing up to the first input that is not where the ledger has it, or changed.

    Return the rest of the listing, too, which begins after that input.
    """
    known = _Known()
    for rows in chain(pages(query_of(db), _SELECT_KNOWN), repeat([])):
        page = [*islice(listing, max(len(rows), 1))]
        if not page:
            break
        if len(page) < len(rows) or [row[1:4] for row in rows] != page:  # else all are as they were
            following = known.add(page, rows)
            if following is not None:
                return known, chain(page[following + 1 :], listing)
        else:
            known.count += len(page)
    return known, listing


def _has_gone(db: sqlite3.Connection) -> bool:
    """Return whether there are inputs that are gone: a listing could name some of them again."""
    return db.execute("SELECT 1 FROM inputs WHERE ordinal < 0 LIMIT 1").fetchone() is not None


_PARTS = 256
# Hashes in memory, of 8 bytes each.
_IN_MEMORY = 1 << 21
# Keys that are counted, if very many are listed twice.
_COUNTED = 10_000
# Characters of a value in a message.
_SHOWN = 80


class Duplicate(NamedTuple):
    """An input that is listed twice.

    Attributes:
        second: Its second place.
        more: How many other inputs are.
    """

    first: int
    second: int
    more: int
    value: str
    is_row: bool


class SeenKeys:
    """Hashes of the keys of new inputs, so that these need not be read again.

    Attributes:
        hashes: Those of all, or of the first `_IN_MEMORY`.
    """

    def __init__(self) -> None:
        self.hashes = array("q")

    def add(self, page: Iterable[Input]) -> None:
        """Add inputs."""
        if len(self.hashes) < _IN_MEMORY:
            keys = (each[0] if each[1] is None else each[1] for each in page)
            self.hashes.extend(map(hash, keys))


def _repeated(hashes: Iterable[int]) -> set[int]:
    """Return the hashes that are there more than once, at most about 10,000 of them."""
    found: set[int] = set()
    parts = [array("q") for _ in range(_PARTS)]
    spilled: list[list[tuple[int, int]]] = [[] for _ in range(_PARTS)]
    with tempfile.SpooledTemporaryFile(max_size=1) as file:
        for held, number in enumerate(hashes, 1):
            parts[number % _PARTS].append(number)
            if held % _IN_MEMORY == 0:
                for part, places in zip(parts, spilled, strict=True):
                    places.append((file.tell(), part.itemsize * len(part)))
                    file.write(part.tobytes())
                    del part[:]
        for part, places in zip(parts, spilled, strict=True):
            for offset, nbytes in places:
                file.seek(offset)
                part.frombytes(file.read(nbytes))
            if len(set(part)) < len(part):
                found.update(each for each, count in Counter(part).items() if count > 1)
            del part[:]
            if len(found) > _COUNTED:
                break
    return found


def find_duplicate(
    rows: Callable[[], Iterable[Sequence[Any]]], hashes: Iterable[int] | None = None
) -> Duplicate | None:
    """Return the first key that is listed twice; None if there is none.

    Args:
        rows: Returns the inputs from the first on: ordinal, source and row of each.
        hashes: Those of the keys of all inputs; None if they are not known.
    """
    if hashes is None:
        hashes = (hash(each[1] if each[2] is None else each[2]) for each in rows())
    suspected = _repeated(hashes)
    if not suspected:
        return None
    firsts: dict[str, int] = {}
    seconds: dict[int, Duplicate] = {}
    for ordinal, source, row, *_ in rows():
        key = source if row is None else row
        if hash(key) in suspected and (first := firsts.setdefault(key, ordinal)) != ordinal:
            seconds.setdefault(first, Duplicate(first, ordinal, 0, key, row is not None))
    if not seconds:
        return None  # different keys with one hash
    return seconds[min(seconds)]._replace(more=len(seconds) - 1)


def listed_twice(found: Duplicate, *, is_late: bool) -> InputError:
    """Return the error for an input that is listed twice."""
    value, is_row = found.value, found.is_row
    shown = value if len(value) <= _SHOWN else value[:_SHOWN] + "..."
    what = "row" if is_row else "input"
    more = f" (and so {'is' if found.more == 1 else 'are'} {found.more:,} more)"
    way = "List each input once, as list(dict.fromkeys(paths)) does."
    if is_row:
        way = (
            "Remove one of them, as drop_duplicates() of pandas does, or add a column that tells "
            "them apart."
        )
    if "://" in value:
        way += " URLs that differ in their credentials alone are the same."
    kept = (
        "The listing was read while its first inputs were worked on."
        if is_late
        else "Nothing was started, and the ledger is unchanged."
    )
    return InputError(
        f"{what} {shown} is listed twice: at positions {found.first} and {found.second}"
        f"{more if found.more else ''}\n  {kept} {way}"
    )
