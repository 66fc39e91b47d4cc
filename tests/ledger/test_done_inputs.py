"""Very many done inputs: small in the file, and no obstacle to finding what is left."""

from __future__ import annotations

import pytest

from forebay.failures import Failure
from forebay.ledger.ledger import Ledger
from forebay.ledger.leftovers import leftovers
from forebay.ledger.records import Counts, Done, FailedInput, Input
from forebay.ledger.snapshot import read_entries, read_snapshot

NUMBER = 20_000
LEFT = [7, 9_000, NUMBER]


def finish(ledger, ordinals):
    for start in range(0, len(ordinals), 1024):
        page = ordinals[start : start + 1024]
        ledger.record([Done(each, 1, 0.25, (), '[{"n":1}]') for each in page], [])


@pytest.fixture
def ledger(tmp_path):
    """All inputs are done except for three: two that were not tried, and one that failed."""
    with Ledger.open(tmp_path) as opened:
        opened.rows("PRAGMA synchronous = OFF")
        names = (f"folder/{k:06}.wav" for k in range(1, NUMBER + 1))
        opened.enrol((Input(each, None, f"{len(each)}000:17000") for each in names), (), True)
        finish(opened, [each for each in range(1, NUMBER + 1) if each not in LEFT])
        opened.record([], [FailedInput(LEFT[1], Failure("exception", "ValueError", "no"))])
        yield opened


@pytest.mark.slow
@pytest.mark.parametrize(
    ("look", "found"),
    [
        (lambda ledger: [each.ordinal for each in ledger.todo()], [7, NUMBER, 9_000]),
        (lambda ledger: [*ledger.failed_ordinals()], [9_000]),
        (lambda ledger: [each.source for each in ledger.failures()], ["folder/009000.wav"]),
        (lambda ledger: [*leftovers(ledger.rows)], []),
        (lambda ledger: ledger.prune(), None),
        (lambda ledger: ledger.drop_replaced(), None),
    ],
    ids=["todo", "failed", "failures", "leftovers", "prune", "anew"],
)
def test_what_is_left_is_found_without_reading_what_is_done(ledger, look, found):
    """The steps of SQLite's machine, of which each row that is read takes several."""
    steps = []
    with ledger.transaction() as db:
        db.set_progress_handler(lambda: steps.append(100), 100)
    assert look(ledger) == found
    assert sum(steps) < NUMBER / 10


@pytest.mark.slow
def test_a_second_shell_sees_all_inputs_in_order(tmp_path, ledger):
    """With the states that they have while the driver is at work."""
    entries = [*read_entries(tmp_path)]
    assert [each.ordinal for each in entries] == [*range(1, NUMBER + 1)]
    assert {each.ordinal: each.state for each in entries if each.state != 1} == {
        7: 0,
        9_000: 2,
        NUMBER: 0,
    }
    assert read_snapshot(tmp_path).counts == Counts(NUMBER, NUMBER - 3, 1)


def test_a_done_input_takes_at_most_eighty_bytes(tmp_path, ledger):
    """Its path, size, time, row of metadata and duration, in the file."""
    finish(ledger, LEFT)
    assert (tmp_path / "ledger.sqlite").stat().st_size <= 80 * NUMBER
