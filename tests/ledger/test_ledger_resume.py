"""The ledger after a kill, and the ledger as a second shell sees it."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys

import pytest

from forebay.errors import BusyError, LedgerError
from forebay.ledger import snapshot as snapshots
from forebay.ledger.ledger import Ledger
from forebay.ledger.lock import Holder
from forebay.ledger.records import Counts, Done, Input, OutputFile
from forebay.ledger.snapshot import Snapshot, read_snapshot

DRIVER = """
import sys
from itertools import islice
from pathlib import Path
from forebay.ledger.ledger import Ledger
from forebay.ledger.records import Done, Input, OutputFile

ledger = Ledger.open(Path(sys.argv[1]), "driver")
ledger.enrol((Input(str(k)) for k in range(1, 100_001)), (), True)
print("enrolled", flush=True)
while todo := list(islice(ledger.todo(), 50)):
    ledger.record([Done(t.ordinal, 1, 0.0, (OutputFile(f"o{t.ordinal}", 1, "s"),), "[]")
                   for t in todo], [])
    print(todo[-1].ordinal, flush=True)
while True:
    ledger.set_meta("after", "the last input")
"""


def inputs(number):
    return [Input(str(k)) for k in range(1, number + 1)]


def done(ordinal, *names):
    files = tuple(OutputFile(name, 7, f"s/{name}") for name in names)
    return Done(ordinal, 1, 0.5, files, "[]")


@pytest.fixture
def driver(tmp_path):
    """A driver at work in another process, some commits along."""
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "enrolled\n"
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_looking_changes_no_file(tmp_path):
    """A second shell may have no right to write."""
    with Ledger.open(tmp_path) as ledger:
        ledger.enrol(inputs(3), (), True)
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        read_snapshot(tmp_path)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_commit_between_two_looks_is_noticed(tmp_path, monkeypatch):
    """Pages that moved while they were read are read again."""
    read = snapshots._read
    with Ledger.open(tmp_path) as ledger:
        ledger.enrol(inputs(3), (), True)
        moves = [1, 2]

        def slow(*arguments):
            snapshot = read(*arguments)
            if moves:
                ledger.record([done(moves.pop(0))], [])
            return snapshot

        monkeypatch.setattr(snapshots, "_read", slow)
        assert read_snapshot(tmp_path).counts.done == 2


def test_a_ledger_that_never_rests_is_busy_not_damaged(tmp_path, monkeypatch):
    """A reader that cannot read a consistent state says so and reports no damage."""
    monkeypatch.setattr(snapshots, "_PATIENCE_S", 0)
    with Ledger.open(tmp_path) as ledger:
        ledger.enrol(inputs(3), (), True)
        with ledger.transaction() as db:
            db.execute("UPDATE inputs SET attempts = 9")
            with pytest.raises(BusyError, match=r"Try again.*\n?.*Ctrl-Z, continue it first"):
                read_snapshot(tmp_path)


def test_a_commit_that_was_cut_off_is_rolled_back_for_the_reader_and_the_next_run(tmp_path):
    """A driver killed within a commit leaves a journal; both see the state before it."""
    live, dead = tmp_path / "live", tmp_path / "dead"
    dead.mkdir()
    with Ledger.open(live) as ledger:
        ledger.enrol(inputs(20_000), (), True)
        ledger.rows("PRAGMA cache_size = 5")  # so that pages reach the file early
        with ledger.transaction() as db:
            db.execute("UPDATE inputs SET state = 1, metadata = '[]', outputs = '[]'")
            for path in live.iterdir():
                shutil.copy(path, dead)
    (dead / "lock").unlink()
    assert (dead / "ledger.sqlite-journal").stat().st_size > 0
    before = (dead / "ledger.sqlite").read_bytes()
    assert read_snapshot(dead).counts == Counts(20_000, 0, 0)
    assert (dead / "ledger.sqlite").read_bytes() == before
    with Ledger.open(dead) as ledger:
        assert next(ledger.results(), None) is None
        assert sum(1 for _ in ledger.todo()) == 20_000


def test_a_damaged_or_foreign_ledger_is_no_busy_one(tmp_path):
    """What stays wrong at rest is said to be wrong."""
    (tmp_path / "ledger.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(LedgerError, match="is damaged"):
        read_snapshot(tmp_path)
    (tmp_path / "ledger.sqlite").unlink()
    db = sqlite3.connect(tmp_path / "ledger.sqlite")
    db.execute("CREATE TABLE songs(name)")
    db.close()
    with pytest.raises(LedgerError, match="not a ledger"):
        read_snapshot(tmp_path)


@pytest.mark.parametrize(
    ("counts", "rate"),
    [
        (Counts(100, 30, 50), "0.0 inputs/s, unknown left"),  # none has ended yet
        (Counts(100, 40, 40), "1.0 inputs/s, unknown left"),  # ten of them are done by now
        (Counts(100, 40, 55), "1.5 inputs/s, unknown left"),  # five others failed meanwhile
    ],
)
def test_failures_of_an_earlier_run_are_no_part_of_the_rate(counts, rate):
    """They stay failed until they are tried again, with another result or the same."""
    run = {"began": 0.0, "done": 30, "failed": 50}
    snapshot = Snapshot(counts, {"run": json.dumps(run)}, Holder("here", 1, "now"))
    assert snapshot.text(10.0).splitlines()[-1] == rate
