"""Write a batch of results to the ledger, and decide which input may have which output name.

The order in time does not matter: an input fails if another input of this run asked for one of its
names, whichever came first. So all names of an input that failed this way stay contested until
failed inputs are tried again. Otherwise the third of three conflicting inputs would fail or not
depending on which of them finished first.

The outputs of an earlier result do not count, which an input keeps that is no longer listed, or is
to be done again: such a name passes to the input that asks for it now.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

from forebay.base.output_names import path_elsewhere
from forebay.errors import LedgerError
from forebay.failures import Failure
from forebay.ledger.database import (
    DONE,
    FAILED,
    TODO,
    change_counts,
    chunks,
    failure_column,
    fetch,
    files_of,
    input_name,
    input_states,
    outputs_column,
    query_of,
    reading,
    recount,
    select_in,
    storable,
    storables,
)
from forebay.ledger.identity import AFTERWARDS, SAME, identity_change
from forebay.ledger.records import Done, FailedInput, FileChange, Unpublished


class Recorded(NamedTuple):
    """The outcome of recording one batch of results.

    Attributes:
        rewritten: The inputs whose files changed while they were worked on.
    """

    file_changes: list[FileChange]
    failed: list[FailedInput]
    rewritten: Sequence[int] = ()


_outputs_of = attrgetter("outputs")


class _Lost(NamedTuple):
    """The result of an input whose outputs are not kept."""

    ordinal: int
    attempts: int
    seconds: float
    names: list[str]

    def failed(self, message: str) -> FailedInput:
        """Return the failure of the input, for this reason."""
        kind, error = "output", "OutputError"
        failure = Failure(kind, error, message, attempts=self.attempts, seconds=self.seconds)
        return FailedInput(self.ordinal, failure)


def record_results(
    db: sqlite3.Connection,
    done: Sequence[Done],
    failed: Sequence[FailedInput],
    new: range = range(0),
    away: frozenset[int] = frozenset(),
    large: Sequence[Done] = (),
) -> Recorded:
    """Write a batch of results, and what they change in earlier ones.

    Args:
        new: The inputs that were just written, with these results if they are done.
        away: Done inputs that cannot be seen now: what was made of them stays in any case.
        large: Results that are recorded as failures; see `too_large`.
    """
    ordinals = [*map(attrgetter("ordinal"), (*done, *failed, *large))]
    not_done = {*ordinals[len(done) :]}
    found = _of_inputs(db, [each for each in ordinals if each not in new] if new else ordinals)
    before = {ordinal: state for ordinal, state, _ in found}
    before |= dict.fromkeys((each for each in ordinals if each in new), TODO)
    if len(before) < len(ordinals):
        wrong = [one for one in ordinals if one not in before or ordinals.count(one) > 1]
        raise LedgerError(f"a result for input {wrong[0]}, which the ledger does not await")
    again = [ordinal for ordinal, state in before.items() if state == DONE]
    # What failed keeps the outputs of its earlier result.
    earlier = (text for ordinal, _, text in found if text and ordinal not in not_done)
    removals = dict.fromkeys(_given_up(db, earlier))
    claimants: dict[str, list[int]] = {}
    for one in filter(_outputs_of, done):
        for file in one.outputs:
            claimants.setdefault(file.name, []).append(one.ordinal)
    held = _held(db, claimants)
    clashes = _clashes(done, claimants, held, away)
    removals |= dict.fromkeys(_overwritten(db, held))
    winners = [one for one in done if one.ordinal not in clashes] if clashes else [*done]
    losers = [one for one in done if one.ordinal in clashes] if clashes else []
    # What is still staged is removed there; its name was never taken.
    removals |= {file.staged or file.name: None for one in losers for file in one.outputs}
    removals |= {file.staged or file.name: None for one in large for file in one.outputs}
    withdrawn = clashes.keys() - before.keys()
    lost = _recorded(db, withdrawn)
    removals |= {name: None for holder in lost for name in holder.names}
    for one in losers:
        names = [file.name for file in one.outputs]
        lost.append(_Lost(one.ordinal, one.attempts, one.seconds, names))
    contested: dict[str, int] = {}
    for ordinal, _, _, names in lost:
        for name in names:
            if name not in held or held[name].ordinal not in away:
                contested[name] = min(ordinal, contested.get(name, ordinal))
    refused = [_clash(db, each, *clashes[each.ordinal], away) for each in lost]
    refused += [_of_large(one) for one in large]
    all_failed = [*failed, *refused]
    _write(db, winners, all_failed, contested, new)
    contents = {one.ordinal: one.content for one in winners if one.content}
    rewritten = _record_contents(db, contents) if contents else ()
    _clear_outputs(db, refused)
    file_changes = _file_changes(winners, removals)
    add_file_changes(db, file_changes)
    failed_before = sum(state == FAILED for state in before.values())
    more_done = len(winners) - len(again) - len(withdrawn)
    change_counts(db, done=more_done, failed=len(all_failed) - failed_before)
    return Recorded(file_changes, all_failed, rewritten)


def too_large(db: sqlite3.Connection, done: Sequence[Done]) -> list[Done]:
    """Return the results whose metadata this database cannot hold, which has a limit for a row."""
    most = db.getlimit(sqlite3.SQLITE_LIMIT_LENGTH) // 2  # the rest is for the other columns
    return [
        one
        for one in done
        if len(one.metadata) * 4 > most and len(one.metadata.encode(errors="surrogatepass")) > most
    ]


def _of_large(one: Done) -> FailedInput:
    names = [file.name for file in one.outputs]
    return _Lost(one.ordinal, one.attempts, one.seconds, names).failed(
        f"the metadata of this input have {len(one.metadata):,} characters as JSON, more than "
        "the ledger can hold\n"
        "  Nothing of this input was kept. Write large values, or a table of its rows, to a file "
        "in `out`, and return the rest; or divide the input."
    )


def _of_inputs(db: sqlite3.Connection, ordinals: Sequence[int]) -> list[tuple[int, int, Any]]:
    """Return ordinal, state and outputs of those of these inputs that there are."""
    sql = "SELECT ordinal, state, outputs FROM inputs WHERE ordinal"
    first, last = min(ordinals, default=0), max(ordinals, default=0)
    if last - first < 2 * len(ordinals):  # one query for nearly all of a range takes half as long
        wanted = {*ordinals}
        rows = fetch(db, f"{sql} BETWEEN ? AND ?", (first, last))
        return [each for each in rows if each[0] in wanted]
    return [*select_in(db, f"{sql} IN ({{}})", ordinals)]


def _file_changes(winners: Iterable[Done], removals: Iterable[str]) -> list[FileChange]:
    """Return the removals, and after them the renames of the winners' staged files."""
    files = [*chain.from_iterable(map(_outputs_of, winners))]
    published, staged = {file.name for file in files}, {file.name for file in files if file.staged}
    changes = [FileChange(name) for name in removals if name not in published or name in staged]
    return changes + [FileChange(file.name, file.staged) for file in files if file.staged]


def take_back(db: sqlite3.Connection, unpublished: Sequence[Unpublished]) -> Recorded:
    """Mark inputs as failed if some of their files could not be given their names.

    The files that they did publish are to be removed. Files with the other names are kept.
    """
    reasons = {one.name: one.reason for one in unpublished}
    held = _held(db, reasons)
    owners = {one.ordinal: name for name, one in reversed(held.items()) if one.ordinal is not None}
    failed = [each.failed(reasons[owners[each.ordinal]]) for each in _recorded(db, owners)]
    names = release(db, [one.ordinal for one in failed])
    _write(db, [], failed, {}, range(0))
    _clear_outputs(db, failed)
    withdrawn = [*names, *reasons]
    db.executemany(
        "DELETE FROM file_changes WHERE name = CAST(? AS TEXT)",
        ((storable(name),) for name in withdrawn),
    )
    file_changes = [FileChange(name) for name in names if name not in reasons]
    file_changes += [FileChange(one.staged) for one in unpublished]
    add_file_changes(db, file_changes)
    change_counts(db, done=-len(failed), failed=len(failed))
    return Recorded(file_changes, failed)


def release(db: sqlite3.Connection, ordinals: Iterable[int]) -> list[str]:
    """Give up the claims of inputs and return the names of their outputs."""
    rows = select_in(db, "SELECT outputs FROM inputs WHERE ordinal IN ({})", ordinals)
    return _given_up(db, (text for (text,) in rows if text))


def _given_up(db: sqlite3.Connection, outputs: Iterable[str]) -> list[str]:
    """Delete the claims to these outputs, as the ledger keeps them, and return their names."""
    with reading("outputs"):
        names = [name for text in outputs for name, _ in files_of(text)]
    db.executemany(
        "DELETE FROM outputs WHERE name = CAST(? AS TEXT)", ((storable(name),) for name in names)
    )
    return names


def drop(db: sqlite3.Connection, ordinals: Sequence[int]) -> None:
    """Record the removal of what inputs have outputs of, and forget those that are not listed."""
    add_file_changes(db, map(FileChange, release(db, ordinals)))
    gone = ((ordinal,) for ordinal in ordinals if ordinal < 0)
    db.executemany("DELETE FROM inputs WHERE ordinal = ?", gone)
    listed = ((ordinal,) for ordinal in ordinals if ordinal > 0)
    db.executemany("UPDATE inputs SET outputs = NULL WHERE ordinal = ?", listed)


def mark_todo(db: sqlite3.Connection, ordinals: Iterable[int]) -> int:
    """Make done inputs todo again, and return how many of these were done."""
    done = [each for each, state in input_states(db, ordinals).items() if state == DONE]
    change_counts(db, done=-sum(ordinal > 0 for ordinal in done))
    for part, marks in chunks(done):
        db.execute(
            f"UPDATE inputs SET state = {TODO}, attempts = 0, seconds = 0, metadata = NULL "
            f"WHERE ordinal IN ({marks})",
            part,
        )
    return len(done)


def forget_results(db: sqlite3.Connection, identity: str, kept: Sequence[int]) -> None:
    """Make every input todo; their outputs stay.

    Args:
        identity: That of inputs that are no longer listed, and of those that are kept.
        kept: The ordinals of inputs whose results stay until they are seen again.
    """
    db.execute("CREATE TEMP TABLE kept(ordinal INTEGER PRIMARY KEY)")
    db.executemany("INSERT INTO kept VALUES(?)", ((ordinal,) for ordinal in kept))
    is_kept = "ordinal IN (SELECT ordinal FROM kept)"
    db.execute(f"UPDATE inputs SET identity = ? WHERE ordinal < 0 OR {is_kept}", (identity,))
    db.execute(
        f"UPDATE inputs SET state = {TODO}, attempts = 0, seconds = 0, metadata = NULL, "
        f"error = NULL WHERE NOT {is_kept}"
    )
    db.execute("DROP TABLE temp.kept")
    recount(db)
    db.execute("DELETE FROM outputs WHERE ordinal IS NULL")


def add_file_changes(db: sqlite3.Connection, file_changes: Iterable[FileChange]) -> None:
    """Record file changes until they are known to be done."""
    db.executemany(
        "INSERT INTO file_changes VALUES(CAST(? AS TEXT), CAST(? AS TEXT))",
        zip(*map(storables, zip(*file_changes, strict=True)), strict=True),
    )


class _Holder(NamedTuple):
    """Who has an output name.

    Attributes:
        ordinal: The input; None if several claimed the name.
        rival: One of these.
        is_earlier: Whether it is an output of an earlier result.
    """

    ordinal: int | None
    rival: int
    is_earlier: bool


def _held(db: sqlite3.Connection, names: Iterable[str]) -> dict[str, _Holder]:
    """Return who has these names."""
    sql = (
        "SELECT name, o.ordinal, coalesce(rival, 0), "
        f"o.ordinal < 0 OR state != {DONE} "
        "FROM outputs o LEFT JOIN inputs i ON i.ordinal = o.ordinal WHERE name IN ({})"
    )
    return {name: _Holder(*holder) for name, *holder in select_in(db, sql, names)}


def _clashes(
    done: Sequence[Done],
    claimants: dict[str, list[int]],
    held: dict[str, _Holder],
    away: frozenset[int],
) -> dict[int, tuple[str, int]]:
    """Return the inputs that lose a name, these and recorded ones: the name, and another input."""
    clashes: dict[int, tuple[str, int]] = {}
    if not held and len(claimants) == sum(map(len, map(_outputs_of, done))):
        return clashes  # the usual case: every name is new
    for one in done:
        for name, *_ in one.outputs:
            others = [ordinal for ordinal in claimants[name] if ordinal != one.ordinal]
            holder = held.get(name)
            if holder is not None and holder.ordinal is None:
                others.append(holder.rival)
            elif holder is not None and holder.ordinal is not None and not holder.is_earlier:
                others.append(holder.ordinal)
                if holder.ordinal not in away:
                    clashes.setdefault(holder.ordinal, (name, min(claimants[name])))
            if others:
                clashes.setdefault(one.ordinal, (name, min(others)))
    return clashes


def _recorded(db: sqlite3.Connection, ordinals: Iterable[int]) -> list[_Lost]:
    """Return the results of inputs that were done."""
    columns, where = "ordinal, attempts, seconds, outputs", f"ordinal IN ({{}}) AND state = {DONE}"
    rows = select_in(db, f"SELECT {columns} FROM inputs WHERE {where}", ordinals)
    with reading("outputs"):
        return [
            _Lost(ordinal, attempts, seconds, [name for name, _ in files_of(outputs)])
            for ordinal, attempts, seconds, outputs in rows
        ]


def _clash(
    db: sqlite3.Connection, lost: _Lost, name: str, other: int, away: frozenset[int]
) -> FailedInput:
    shown, named = path_elsewhere(name) or name, input_name(query_of(db), other) or "another input"
    is_kept = "Neither is kept, nor any other output of theirs."
    if other in away:
        is_kept = "That one cannot be seen now, so its outputs stay, and this one has none."
    return lost.failed(
        f"output {shown!r} is claimed by two inputs, this one and {named}\n"
        f"  {is_kept} Give each input names of its own, such "
        f"as out / source.stem / {name.rpartition('/')[2]!r}, or with the input's folder or row in "
        "them, and run again."
    )


def _overwritten(db: sqlite3.Connection, held: dict[str, _Holder]) -> dict[str, int]:
    """Delete from earlier results the outputs whose names are claimed; return these names.

    An input that is gone is to be done again if it comes back.
    """
    earlier = {
        name: holder.ordinal
        for name, holder in held.items()
        if holder.is_earlier and holder.ordinal is not None
    }
    for ordinal in {*earlier.values()}:
        (text,) = db.execute("SELECT outputs FROM inputs WHERE ordinal = ?", (ordinal,)).fetchone()
        with reading("outputs"):
            files_of(text)
            left = [each for each in json.loads(text) if each[0] not in earlier]
        db.execute(
            f"UPDATE inputs SET outputs = ?, "
            f"state = CASE state WHEN {DONE} THEN {TODO} ELSE state END WHERE ordinal = ?",
            (json.dumps(left), ordinal),
        )
    return earlier


def record_sizes(db: sqlite3.Connection, sizes: Mapping[str, tuple[int, int]]) -> None:
    """Record other sizes of outputs.

    Args:
        sizes: By name: the input, and the size that the output has now.
    """
    for ordinal in {ordinal for ordinal, _ in sizes.values()}:
        (text,) = db.execute("SELECT outputs FROM inputs WHERE ordinal = ?", (ordinal,)).fetchone()
        with reading("outputs"):
            found = [(name, sizes.get(name, (0, size))[1]) for name, size in files_of(text)]
        db.execute("UPDATE inputs SET outputs = ? WHERE ordinal = ?", (json.dumps(found), ordinal))


def _clear_outputs(db: sqlite3.Connection, lost: Iterable[FailedInput]) -> None:
    """Forget the outputs of inputs of which none is kept."""
    ordinals = ((one.ordinal,) for one in lost)
    db.executemany("UPDATE inputs SET outputs = NULL WHERE ordinal = ?", ordinals)


def _write(
    db: sqlite3.Connection,
    winners: list[Done],
    failed: list[FailedInput],
    contested: dict[str, int],
    new: range,
) -> None:
    if changed := [one for one in winners if one.ordinal not in new] if new else winners:
        ordinals, attempts, seconds, outputs, metadata, _ = zip(*changed, strict=True)
        db.executemany(
            "UPDATE inputs SET state = 1, attempts = ?, seconds = ?, outputs = ?, "
            "metadata = CAST(? AS TEXT), error = NULL WHERE ordinal = ?",
            zip(
                attempts,
                seconds,
                [outputs_column(each) if each else "[]" for each in outputs],
                storables(metadata),
                ordinals,
                strict=True,
            ),
        )
    db.executemany(
        "UPDATE inputs SET state = 2, attempts = ?, seconds = ?, "
        "metadata = ?, error = ? WHERE ordinal = ?",
        (
            (failure.attempts, failure.seconds, metadata, failure_column(failure), ordinal)
            for ordinal, failure, metadata in failed
        ),
    )
    published = {
        file.name: one.ordinal for one in filter(_outputs_of, winners) for file in one.outputs
    }
    claims = "INSERT OR REPLACE INTO outputs VALUES(CAST(? AS TEXT), {})"
    for names, columns in ((published, "?, NULL"), (contested, "NULL, ?")):
        values = zip(storables([*names]), names.values(), strict=True)
        db.executemany(claims.format(columns), values)
    if contested:
        db.execute("INSERT OR REPLACE INTO meta VALUES('_contested', '1')")


def _record_contents(db: sqlite3.Connection, found: Mapping[int, str]) -> list[int]:
    """Write the identities of files as workers saw them; return the inputs that have others now.

    A hash is added to an identity unless the file changed since it was listed. But what was looked
    at after the call stands in any case: the call itself may have changed it.
    """
    rows = select_in(db, "SELECT ordinal, identity FROM inputs WHERE ordinal IN ({})", found)
    seen = [(*each, found[each[0]]) for each in rows]
    changed = [
        ordinal
        for ordinal, identity, content in seen
        if content.startswith(AFTERWARDS)
        and identity_change(content.removeprefix(AFTERWARDS), identity) != SAME
    ]
    db.executemany(
        "UPDATE inputs SET identity = ? WHERE ordinal = ?",
        (
            (content.removeprefix(AFTERWARDS), ordinal)
            for ordinal, identity, content in seen
            if content.startswith(AFTERWARDS) or identity_change(content, identity) == SAME
        ),
    )
    return changed
