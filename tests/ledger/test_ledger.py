"""The ledger: what it remembers of each input, and who may have which output name."""

from __future__ import annotations

import itertools
import sqlite3

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import InputError, LedgerError
from forebay.failures import Failure
from forebay.ledger.database import files_of
from forebay.ledger.ledger import Ledger
from forebay.ledger.records import (
    Counts,
    Done,
    Enrolment,
    FailedInput,
    FileChange,
    Input,
    OutputFile,
)
from forebay.ledger.snapshot import read_failures

# Where no power is cut, hundreds of examples need not wait for the disk.
NO_SYNC = "PRAGMA synchronous = OFF"


@pytest.fixture
def ledger(tmp_path):
    with Ledger.open(tmp_path / "ledger") as opened:
        yield opened


def paths(*sources, identity="1:1"):
    return [Input(source, None, identity) for source in sources]


def done(ordinal, *names, staged=True):
    files = tuple(OutputFile(name, 7, f"s/{ordinal}/{name}" if staged else "") for name in names)
    return Done(ordinal, 1, 0.5, files, '[{"n": 1}]')


def failed(ordinal):
    failure = Failure("exception", "ValueError", "no\nsound", "line 3", attempts=3, seconds=0.25)
    return FailedInput(ordinal, failure)


def states(ledger):
    """What there is of each listed input: its outputs, "failed" or "todo"."""
    found = {
        result.source: [name for name, _ in files_of(result.outputs)] for result in ledger.results()
    }
    found |= {each.source: "failed" for each in ledger.failures()}
    return {todo.source: "todo" for todo in ledger.todo()} | found


def claimed(ledger):
    """The output names that an input, listed or gone, has or contests."""
    return {name for (name,) in ledger.rows("SELECT name FROM outputs")}


# ---- enrolling --------------------------------------------------------------------------------


@pytest.mark.parametrize("earlier", [(), ("a", "b"), ("a", "b", "c")])
def test_an_input_listed_twice_is_named_with_both_positions(ledger, earlier):
    """Duplicates are found wherever they are, and nothing is enrolled."""
    ledger.enrol(paths(*earlier), (), True)
    with pytest.raises(InputError) as caught:
        ledger.enrol(paths("a", "b", "c", "b", "c"), (), True)
    first = str(caught.value).splitlines()[0]
    assert first == "input b is listed twice: at positions 2 and 4 (and so is 1 more)"
    assert ledger.counts().total == len(earlier)


def test_a_listing_that_raises_changes_nothing(ledger):
    """An error halfway through the listing leaves the ledger as it was."""
    ledger.enrol(paths("a", "b"), ("x",), True)

    def torn():
        yield from paths("n", "b")
        raise OSError("the folder went away")

    with pytest.raises(OSError, match="went away"):
        ledger.enrol(torn(), ("y",), True)
    assert [todo.source for todo in ledger.todo()] == ["a", "b"]
    assert ledger.get_meta("columns") == '["x"]'
    assert ledger.enrol(paths("b"), (), True) == Enrolment(0, 1, 0, 1, 1)


listings = st.lists(
    st.tuples(
        st.lists(st.sampled_from("abcdef"), unique=True),
        st.booleans(),
        st.sampled_from(["1", "2", "?"]),
        st.sets(st.sampled_from("abcdef")),
    ),
    max_size=6,
)


@pytest.mark.slow
@given(listings)
def test_any_sequence_of_listings_agrees_with_a_plain_model(tmp_path_factory, steps):
    """However inputs come, go, move, change and are away: only what changed is done again."""
    made: dict[str, tuple[str, bool]] = {}  # source -> identity, done
    order: list[str] = []
    written = set()
    with Ledger.open(tmp_path_factory.mktemp("model")) as ledger:
        ledger.rows(NO_SYNC)
        for listed, complete, identity, finish in steps:
            enrolment = ledger.enrol(paths(*listed, identity=identity), (), complete)
            known = [one for one in listed if one in made]
            changed = {one for one in known if identity not in ("?", made[one][0])}
            # One that is not done has nothing that could stay, not even an identity.
            away = {one for one in known if identity == "?" != made[one][0] and made[one][1]}
            assert enrolment.new == len(listed) - len(known)
            assert enrolment.changed == sum(made[one][1] for one in changed)
            assert enrolment.same == len(known) - enrolment.changed
            assert len(enrolment.unseen) == len(away)
            left = [one for one in order if one not in listed]
            assert enrolment.gone == (len(left) if complete else 0)
            assert ledger.file_changes() == []
            order = listed + ([] if complete else left)
            for one in listed:
                was, is_done = made.get(one, (identity, False))
                made[one] = (was if one in away else identity, is_done and one not in changed)
            todo = list(ledger.todo())
            assert [one.source for one in todo] == [one for one in order if not made[one][1]]
            finished = [one for one in todo if one.source in finish]
            ledger.record([done(one.ordinal, f"out-{one.source}") for one in finished], [])
            ledger.clear_file_changes()
            for one in finished:
                made[one.source] = (made[one.source][0], True)
                written.add(f"out-{one.source}")
            assert [one.source for one in ledger.results()] == [o for o in order if made[o][1]]
            assert ledger.counts() == Counts(len(order), sum(made[o][1] for o in order), 0)
            assert {name for name, _, _ in ledger.outputs()} == written == claimed(ledger)


# ---- recording --------------------------------------------------------------------------------


claims = st.lists(st.sets(st.sampled_from("wxyz"), max_size=3), min_size=1, max_size=5)


@pytest.mark.slow
@given(claims, st.data())
def test_who_fails_does_not_depend_on_who_finished_first(tmp_path_factory, wanted, data):
    """In any order and any batches, exactly those fail that share a name with another."""
    order = data.draw(st.permutations(range(1, len(wanted) + 1)))
    cuts = data.draw(st.lists(st.booleans(), min_size=len(order), max_size=len(order)))
    folder: set[str] = set()
    with Ledger.open(tmp_path_factory.mktemp("order")) as ledger:
        ledger.rows(NO_SYNC)
        ledger.enrol(paths(*map(str, range(1, len(wanted) + 1))), (), True)
        batch: list[Done] = []
        for ordinal, cut in zip(order, cuts, strict=True):
            batch.append(done(ordinal, *sorted(wanted[ordinal - 1])))
            if cut or ordinal == order[-1]:
                for file_change in ledger.record(batch, []).file_changes:
                    (folder.add if file_change.staged else folder.discard)(file_change.name)
                batch = []
        clashing = {
            str(k + 1)
            for k, names in enumerate(wanted)
            if any(names & other for j, other in enumerate(wanted) if j != k)
        }
        assert {each.source for each in ledger.failures()} == clashing
        assert folder == {name for name, _, _ in ledger.outputs()}
        assert ledger.counts() == Counts(len(wanted), len(wanted) - len(clashing), len(clashing))


def test_a_result_for_an_unknown_input_changes_nothing(ledger):
    """A mistake of the driver's is an error, and the whole batch is rolled back."""
    ledger.enrol(paths("a"), (), True)
    with pytest.raises(LedgerError, match="input 5"):
        ledger.record([done(1, "x"), done(5, "y")], [])
    assert states(ledger) == {"a": "todo"}
    assert claimed(ledger) == set()


def test_a_transaction_that_ctrl_c_left_open_is_rolled_back_by_the_next(ledger):
    """It came before the block that would have done so; what was done since must be recorded."""
    left = ledger.transaction()
    left.__enter__().execute("INSERT INTO meta VALUES('half', 'written')")
    ledger.set_meta("whole", "written")
    assert (ledger.get_meta("half"), ledger.get_meta("whole")) == (None, "written")


def test_long_results_come_page_by_page_and_as_often_as_asked(ledger):
    """Reading thousands of inputs loses none at the edges of a page, and may be broken off."""
    number = 9000
    ledger.enrol((Input(str(k)) for k in range(number)), (), True)
    ledger.record([done(k, f"o{k}") for k in range(1, number, 2)], [])
    odd = list(range(1, number, 2))
    assert [result.ordinal for result in ledger.results()] == odd
    assert [one.ordinal for one in itertools.islice(ledger.results(), 3)] == odd[:3]
    ledger.record([], [failed(k) for k in range(2, number, 2)])
    sources = [one.source for one in ledger.failures(limit=5000)]
    assert sources == [str(k) for k in range(1, number - 1, 2)]
    assert [one.source for one in ledger.failures(limit=2)] == ["1", "3"]


# ---- the file ---------------------------------------------------------------------------------


def test_a_ledger_that_lost_its_end_is_damaged(tmp_path):
    """A copy that broke off is not mistaken for a small ledger."""
    with Ledger.open(tmp_path) as ledger:
        ledger.enrol((Input(f"{k:0100d}") for k in range(1000)), (), True)
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(LedgerError, match="is damaged"):
        Ledger.open(tmp_path)


def test_text_that_is_no_text_is_damaged(tmp_path):
    """A page may be whole for SQLite, and its strings not be UTF-8."""
    with Ledger.open(tmp_path) as ledger:
        ledger.enrol(paths("a"), (), True)
    db = sqlite3.connect(tmp_path / "ledger.sqlite", isolation_level=None)
    db.execute("UPDATE inputs SET source = CAST(x'61ff62' AS TEXT), state = 2, error = '{}'")
    db.close()
    with Ledger.open(tmp_path) as ledger:
        with pytest.raises(LedgerError, match=r"is damaged\n.*not UTF-8"):
            list(ledger.todo(9))
        with pytest.raises(LedgerError, match="is damaged"):
            ledger.enrol(paths("b"), (), True)
    with pytest.raises(LedgerError, match="is damaged"):
        list(read_failures(tmp_path))


def test_a_record_too_large_costs_its_input(tmp_path):
    """SQLite's limit is told as what it is; the other results are recorded."""
    with Ledger.open(tmp_path) as ledger:
        ledger.enrol(paths("a", "b"), (), True)
        ledger._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 10_000)
        large = Done(1, 1, 0.1, (), "[" + " " * 10_000 + "]")
        recorded = ledger.record([large, Done(2, 1, 0.1, (), "[]")], [])
        assert [one.ordinal for one in recorded.failed] == [1]
        assert "more than the ledger can hold" in recorded.failed[0].failure.message
        assert (ledger.counts().done, ledger.counts().failed) == (1, 1)


def test_a_database_of_another_program_is_foreign(tmp_path):
    """Another program's SQLite file is not touched."""
    db = sqlite3.connect(tmp_path / "ledger.sqlite")
    db.execute("CREATE TABLE songs(name)")
    db.commit()
    db.close()
    with pytest.raises(LedgerError, match="not a ledger of forebay's"):
        Ledger.open(tmp_path)


def test_a_ledger_of_a_newer_forebay_is_refused(tmp_path):
    """A format from the future is named with both numbers."""
    Ledger.open(tmp_path).close()
    db = sqlite3.connect(tmp_path / "ledger.sqlite", isolation_level=None)
    db.execute("PRAGMA user_version = 33554432")
    db.close()
    with pytest.raises(LedgerError, match="newer forebay: format 2, this one reads 1"):
        Ledger.open(tmp_path)


@pytest.mark.parametrize(
    ("limit", "words"),
    [("max_page_count = 1", "disk is full"), ("query_only = 1", "is read-only")],
)
def test_a_ledger_that_cannot_be_written_says_why_and_keeps_what_it_has(tmp_path, limit, words):
    """A full disk and a read-only file are named; the record before stays."""
    with Ledger.open(tmp_path) as ledger:
        ledger.enrol(paths("a", "b"), (), True)
        ledger.record([done(1, "x")], [])
        ledger.rows(f"PRAGMA {limit}")
        large = Done(2, 1, 0.1, (), "[" + " " * 100_000 + "]")
        with pytest.raises(LedgerError, match=words):
            ledger.record([large], [])
        assert states(ledger) == {"a": ["x"], "b": "todo"}
        assert ledger.file_changes() == [FileChange("x", "s/1/x")]


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    """An output that is a file is an error of the ledger's."""
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerError, match="cannot be created"):
        Ledger.open(tmp_path / "file" / "ledger")


def test_an_error_while_opening_gives_the_folder_back(tmp_path):
    """Once the cause is removed, the next call opens it."""
    (tmp_path / "ledger.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(LedgerError):
        Ledger.open(tmp_path)
    (tmp_path / "ledger.sqlite").unlink()
    Ledger.open(tmp_path).close()
