"""What a run leaves to its next commit: its beginning waits for the disk once."""

from __future__ import annotations

import pytest

from forebay.ledger.database import NAME
from forebay.ledger.ledger import Ledger
from forebay.ledger.records import Input

INPUTS = [Input("a", None, "1:1")]


def sources(ledger):
    return [each.source for each in ledger.todo()]


def test_the_beginning_of_a_run_is_one_commit(tmp_path):
    """Its tables, its listing and its settings: each commit waits for the disk."""
    with Ledger.open(tmp_path, call="this call") as ledger:
        ledger.mark_tables_stale()
        ledger.enrol(INPUTS, [], complete=True)
        assert sources(ledger) == ["a"]
        assert (tmp_path / NAME).stat().st_size == 0
        ledger.set_meta("run", "1")
        assert ledger._commits == 1
        assert (tmp_path / NAME).stat().st_size > 0


def test_what_was_left_to_the_next_commit_survives_its_failure(tmp_path):
    """A block that raises takes only its own changes with it; the end commits the others."""
    with Ledger.open(tmp_path, call="this call") as ledger:
        ledger.enrol(INPUTS, [], complete=True)
        with pytest.raises(KeyError), ledger.transaction() as db:
            db.execute("DELETE FROM inputs")
            raise KeyError
        assert sources(ledger) == ["a"]
    with Ledger.open(tmp_path) as ledger:
        assert sources(ledger) == ["a"]


def test_a_block_that_is_cut_off_is_never_committed(tmp_path):
    """Ctrl-C may come before it is rolled back; the next transaction does that."""
    with Ledger.open(tmp_path, call="this call") as ledger:
        ledger.settle()
        cut_off = ledger.transaction(is_held=True)
        cut_off.__enter__().execute("INSERT INTO meta VALUES('half', '1')")
        ledger.set_meta("whole", "1")
        assert (ledger.get_meta("half"), ledger.get_meta("whole")) == (None, "1")
        assert not cut_off.__exit__(KeyError, KeyError(), None)
