"""A listing that is read while its first inputs are worked on."""

from __future__ import annotations

import pytest

from forebay.errors import InputError, LedgerError
from forebay.failures import Failure
from forebay.ledger import ledger as module
from forebay.ledger.ledger import Ledger
from forebay.ledger.records import Counts, Done, FailedInput, Input, OutputFile
from forebay.ledger.snapshot import read_snapshot


@pytest.fixture(autouse=True)
def page(monkeypatch):
    """Pages of three inputs."""
    monkeypatch.setattr(module, "READ_ON", 3)


@pytest.fixture
def ledger(tmp_path):
    with Ledger.open(tmp_path) as opened:
        yield opened


class Listing:
    """Inputs "1", "2", ..., and how many of them were read."""

    def __init__(self, *sources):
        self.sources = sources
        self.count = 0

    def __iter__(self):
        for source in self.sources:
            if isinstance(source, Exception):
                raise source
            self.count += 1
            yield Input(str(source), None, "1:1")


def finish(ledger, ordinals):
    ledger.record([Done(each, 1, 0.5, (), "[{}]") for each in ordinals], [])


def sources(ledger):
    return [each.source for each in ledger.todo()]


def test_the_first_inputs_are_todo_before_the_others_are_read(ledger):
    """The listing is read as far as the work needs it; the counts grow with it."""
    listing = Listing(*range(1, 11))
    assert ledger.enrol(listing, (), True, ahead=2).new == 2
    assert (listing.count, ledger.counts(), ledger.is_listed) == (3, Counts(2, 0, 0), False)
    todo = ledger.todo()
    assert [next(todo).source for _ in range(3)] == ["1", "2", "3"]
    assert (listing.count, ledger.counts()) == (6, Counts(5, 0, 0))
    assert [each.source for each in todo] == [str(each) for each in range(4, 11)]
    assert (ledger.counts(), ledger.is_listed) == (Counts(10, 0, 0), True)


def test_the_whole_listing_comes_before_the_inputs_that_failed(ledger):
    """They are the last to be tried, however long the rest of the listing is."""
    ledger.enrol(Listing(1, 2), (), True)
    ledger.record([], [FailedInput(1, Failure("exception", "ValueError", "no"))])
    ledger.enrol(Listing(*range(1, 8)), (), True, ahead=1)
    assert sources(ledger) == ["2", "3", "4", "5", "6", "7", "1"]


def test_a_listing_that_ends_early_is_read_at_once(ledger):
    """Then nothing is left for later."""
    assert ledger.enrol(Listing(1, 2, 3), (), True, ahead=3).new == 3
    assert ledger.is_listed


def test_results_are_recorded_between_two_pages(ledger):
    """The next page comes behind what is done."""
    ledger.enrol(Listing(*range(1, 8)), (), True, ahead=2)
    done = []
    for each in ledger.todo():
        finish(ledger, [each.ordinal])
        done.append(each.ordinal)
    assert done == [1, 2, 3, 4, 5, 6, 7]
    assert ledger.counts() == Counts(7, 7, 0)


def in_file(ledger):
    """Return what the ledger's file has: ordinal and state of each input."""
    return ledger.rows("SELECT ordinal, state FROM inputs ORDER BY ordinal")


def test_an_input_that_was_read_ahead_is_written_with_its_result(ledger):
    """Those before it are written as to be done; those after it when they have results."""
    ledger.enrol(Listing(*range(1, 8)), (), True, ahead=1)
    todo = ledger.todo()
    first = [next(todo) for _ in range(4)]
    assert [each.source for each in first] == ["1", "2", "3", "4"]
    assert (in_file(ledger), ledger.counts()) == ([(1, 0)], Counts(4, 0, 0))
    finish(ledger, [1, 3])
    assert (in_file(ledger), ledger.counts()) == ([(1, 1), (2, 0), (3, 1)], Counts(4, 2, 0))
    finish(ledger, [2, 4])
    assert in_file(ledger) == [(1, 1), (2, 1), (3, 1), (4, 1)]
    assert [each.source for each in todo] == ["5", "6", "7"]
    assert (ledger.counts(), ledger.is_listed) == (Counts(7, 4, 0), True)
    assert [each.metadata for each in ledger.results()] == ["[{}]"] * 4


def test_inputs_that_were_read_ahead_fail_and_clash_as_others_do(ledger):
    """One that fails is named, and of two with one output neither is kept."""
    ledger.enrol(Listing(*range(1, 9)), (), True, ahead=1)
    todo = ledger.todo()
    assert [next(todo).ordinal for _ in range(4)] == [1, 2, 3, 4]
    assert ledger.name_of(4) == "4"
    failed = FailedInput(3, Failure("exception", "ValueError", "no", attempts=2, seconds=0.1))
    done = [Done(at, 1, 0.5, (OutputFile("a", 1, f"staged/{at}"),), "[{}]") for at in (2, 4)]
    recorded = ledger.record(done, [failed])
    assert [each.ordinal for each in recorded.failed] == [3, 2, 4]
    assert [each.staged for each in recorded.file_changes] == [None, None]
    assert in_file(ledger) == [(1, 0), (2, 2), (3, 2), (4, 2)]
    assert ledger.counts() == Counts(4, 0, 3)
    texts = [each.message for each in ledger.failures()]
    assert ["claimed by two inputs, this one and 4" in text for text in texts] == [
        True,
        False,
        False,
    ]
    assert ["claimed by two inputs, this one and 2" in text for text in texts] == [
        False,
        False,
        True,
    ]
    assert [each.source for each in todo] == ["5", "6", "7", "8"]


def test_results_that_cannot_be_written_leave_what_was_read_ahead(ledger):
    """The transaction is undone as a whole, and the next one has all of it."""
    ledger.enrol(Listing(*range(1, 8)), (), True, ahead=1)
    todo = ledger.todo()
    assert [next(todo).ordinal for _ in range(4)] == [1, 2, 3, 4]
    with pytest.raises(LedgerError, match="input 9"):
        finish(ledger, [3, 9])
    assert (in_file(ledger), ledger.counts()) == ([(1, 0)], Counts(4, 0, 0))
    finish(ledger, [3])
    assert in_file(ledger) == [(1, 0), (2, 0), (3, 1)]
    ledger.write_ahead()
    assert in_file(ledger) == [(1, 0), (2, 0), (3, 1), (4, 0)]
    assert ledger.counts() == Counts(4, 1, 0)


def test_a_run_that_ends_before_its_listing_is_continued(tmp_path):
    """Status says that there may be more; the next call reads the rest."""
    with Ledger.open(tmp_path) as ledger:
        ledger.enrol(Listing(*range(1, 8)), (), True, ahead=2)
        finish(ledger, [1, 2])
    snapshot = read_snapshot(tmp_path)
    assert not snapshot.is_listed
    assert snapshot.text(0.0).splitlines() == [
        "2 done of the 2 inputs found so far, 0 failed, 0 to do",
        "not running; the same call continues it",
    ]
    with Ledger.open(tmp_path) as ledger:
        enrolment = ledger.enrol(Listing(*range(1, 8)), (), True, ahead=2)
        assert (enrolment.new, enrolment.same) == (2, 2)
        assert sources(ledger) == ["3", "4", "5", "6", "7"]
    assert read_snapshot(tmp_path).is_listed


def test_a_listing_that_fails_further_down_keeps_what_was_done(ledger):
    """The error comes when it is reached; once it is corrected, the run continues."""
    ledger.enrol(Listing(1, 2, 3, 4, InputError("line 5: not CSV")), (), True, ahead=1)
    todo = ledger.todo()
    finish(ledger, [next(todo).ordinal])
    with pytest.raises(InputError, match="line 5"):
        list(todo)
    assert ledger.counts() == Counts(1, 1, 0)
    ledger.enrol(Listing(1, 2, 3, 4, 5), (), True, ahead=1)
    assert sources(ledger) == ["2", "3", "4", "5"]


def test_an_input_that_is_listed_again_further_down_is_named_at_the_end(ledger):
    """Both positions are named, what is done is kept, and the corrected listing is accepted."""
    ledger.enrol(Listing(1, 2, 3, 4, 2, 5, 1), (), True, ahead=2)
    todo = ledger.todo()
    finish(ledger, [next(todo).ordinal for _ in range(5)])
    with pytest.raises(InputError) as caught:
        list(todo)
    first, second = str(caught.value).splitlines()
    assert first == "input 1 is listed twice: at positions 1 and 7 (and so is 1 more)"
    assert "were worked on. Remove" in second or "were worked on. List" in second
    enrolment = ledger.enrol(Listing(1, 2, 3, 4, 5), (), True, ahead=2)
    assert (enrolment.new, enrolment.same, enrolment.gone) == (1, 4, 1)
    assert sources(ledger) == ["5"]
    assert [each.source for each in ledger.results()] == ["1", "2", "3", "4"]
    assert ledger.enrol(Listing(1, 2, 3, 4, 5), (), True, ahead=2).same == 5


def test_a_listing_that_cannot_repeat_itself_is_not_searched(ledger):
    """The files of a folder have different paths."""
    ledger.enrol(Listing(1, 2, 1), (), True, ahead=1, is_distinct=True)
    assert sources(ledger) == ["1", "2", "1"]


@pytest.mark.parametrize("listed", [(2, 1, 3, 4, 5, 6), (1, 3, 4, 5, 6, 7), (0, 1, 2)])
def test_a_listing_that_differs_is_merged_before_anything_is_worked_on(ledger, listed):
    """An input further down may be one that is known here."""
    ledger.enrol(Listing(1, 2, 3), (), True)
    finish(ledger, [1, 3])
    listing = Listing(*listed)
    ledger.enrol(listing, (), True, ahead=1)
    assert (listing.count, ledger.is_listed) == (len(listed), True)
    assert sources(ledger) == [str(each) for each in listed if each not in (1, 3)]
