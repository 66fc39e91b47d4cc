"""Blocks of done inputs: small, and expanded when one of them changes."""

from __future__ import annotations

import json

import pytest

from forebay.failures import Failure
from forebay.ledger import inputs as ledger_inputs
from forebay.ledger.database import read_snapshot
from forebay.ledger.inputs import BLOCK, read_entries
from forebay.ledger.ledger import Ledger
from forebay.ledger.records import Counts, Done, FailedInput, Input, OutputFile


def done(ordinal, metadata='[{"n":1}]'):
    return Done(ordinal, 1, 0.25, (), metadata)


def finish(ledger, first, last):
    for start in range(first, last + 1, 1024):
        ledger.record([done(each) for each in range(start, min(start + 1024, last + 1))], [])


def numbers(ledger):
    rows = ledger.rows
    return rows("SELECT count(*) FROM blocks")[0][0], rows("SELECT count(*) FROM inputs")[0][0]


@pytest.fixture
def ledger(tmp_path):
    """Two blocks and a half, of which one and a half are done."""
    with Ledger.open(tmp_path) as opened:
        opened.rows("PRAGMA synchronous = OFF")
        opened.enrol((Input(f"in/{k}", None, f"{k}:1") for k in range(BLOCK * 5 // 2)), (), True)
        finish(opened, 1, BLOCK * 3 // 2)
        yield opened


def test_a_block_is_packed_when_its_last_input_is_done(ledger):
    """Its inputs are no rows any more, and everything that was known of them is read from it."""
    assert numbers(ledger) == (1, BLOCK * 3 // 2)
    finish(ledger, BLOCK * 3 // 2 + 1, BLOCK * 5 // 2)
    assert numbers(ledger) == (2, BLOCK // 2)
    results = [*ledger.results()]
    assert [each.ordinal for each in results] == [*range(1, BLOCK * 5 // 2 + 1)]
    assert {(each.row, each.metadata) for each in results} == {(None, '[{"n":1}]')}
    assert results[5000].source == "in/5000"
    assert ledger.name_of(17) == "in/16"
    assert ledger.counts() == Counts(BLOCK * 5 // 2, BLOCK * 5 // 2, 0)


def test_a_reader_sees_packed_inputs_and_others_in_order(tmp_path, ledger):
    """A second shell needs no driver to expand them."""
    entries = [*read_entries(tmp_path)]
    assert [each.state for each in entries] == [1] * (BLOCK * 3 // 2) + [0] * BLOCK
    assert read_snapshot(tmp_path).counts == Counts(BLOCK * 5 // 2, BLOCK * 3 // 2, 0)


def test_a_failure_keeps_its_block_as_rows(ledger):
    """It is tried again; the block is compressed once it is done."""
    failure = Failure("exception", "ValueError", "no")
    finish(ledger, BLOCK * 3 // 2 + 1, BLOCK * 2 - 1)
    ledger.record([], [FailedInput(BLOCK * 2, failure)])
    assert numbers(ledger) == (1, BLOCK * 3 // 2)
    assert [each.ordinal for each in ledger.todo(BLOCK * 2)] == [BLOCK * 2]
    ledger.record([done(BLOCK * 2)], [])
    assert numbers(ledger) == (2, BLOCK // 2)


def test_an_input_of_a_block_may_fail_later(ledger):
    """Its block is rows again, and its earlier result is gone."""
    ledger.record([], [FailedInput(7, Failure("exception", "ValueError", "no"))])
    assert numbers(ledger) == (0, BLOCK * 5 // 2)
    assert ledger.counts() == Counts(BLOCK * 5 // 2, BLOCK * 3 // 2 - 1, 1)
    assert [each.source for each in ledger.failures()] == ["in/6"]


@pytest.mark.parametrize(
    "change",
    [
        lambda ledger: ledger.mark_todo([7]),
        lambda ledger: ledger.enrol([Input("other")], (), False),
        lambda ledger: ledger.record(
            [Done(BLOCK * 2, 1, 0.1, (OutputFile("x", 1, "s/x"),), "[]")], []
        ),
    ],
    ids=["todo", "another listing", "a conflict"],
)
def test_a_change_expands_the_blocks_that_it_concerns(ledger, change):
    """And what is not concerned stays as it was."""
    ledger.record([Done(7, 2, 0.5, (OutputFile("x", 1, "s/x"),), '["again"]')], [])
    assert numbers(ledger)[0] == 1
    before = {each.source: each for each in ledger.results()}
    change(ledger)
    after = {each.source: each for each in ledger.results()}
    assert "in/6" not in after or after["in/6"].metadata == '["again"]'
    others = after.keys() & before.keys() - {"in/6"}
    assert len(others) >= BLOCK * 3 // 2 - 1
    assert all(before[each].metadata == after[each].metadata for each in others)


def test_a_block_too_large_for_memory_stays_as_rows(tmp_path, monkeypatch):
    """Packing it would take its bytes several times."""
    monkeypatch.setattr(ledger_inputs, "BLOCK", 4)
    monkeypatch.setattr(ledger_inputs, "LARGEST", 1000)
    with Ledger.open(tmp_path) as ledger:
        ledger.enrol([Input(str(each)) for each in range(4)], (), True)
        ledger.record([done(each, json.dumps(["x" * 300])) for each in range(1, 5)], [])
        assert numbers(ledger) == (0, 4)


def test_a_done_input_takes_at_most_forty_bytes(tmp_path):
    """Its path, size, time, row of metadata and duration, 8 blocks of them, in the file."""
    number = BLOCK * 8
    with Ledger.open(tmp_path) as ledger:
        ledger.rows("PRAGMA synchronous = OFF")
        for first in range(0, number, BLOCK):  # as a run that lists while it works
            names = (f"folder/{k:06}.wav" for k in range(first + BLOCK))
            ledger.enrol((Input(each, None, f"{len(each)}000:17000") for each in names), (), True)
            finish(ledger, first + 1, first + BLOCK)
        assert numbers(ledger) == (8, 0)
    assert (tmp_path / "ledger.sqlite").stat().st_size <= 40 * number
