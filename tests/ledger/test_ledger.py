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
from forebay.ledger.leftovers import leftovers
from forebay.ledger.records import (
    Counts,
    Done,
    Enrolment,
    FailedInput,
    FileChange,
    Input,
    Leftover,
    OutputFile,
    Todo,
    Unpublished,
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


def test_new_inputs_are_todo_in_the_listings_order(ledger):
    """The first listing sets inputs, ordinals from 1, and counts."""
    assert ledger.enrol(paths("b", "a"), (), True) == Enrolment(2, 0, 0, 0)
    assert list(ledger.todo()) == [Todo(1, "b", None), Todo(2, "a", None)]
    assert list(ledger.todo(1)) == [Todo(1, "b", None)]
    assert ledger.counts() == Counts(2, 0, 0)


def test_the_same_listing_changes_nothing(ledger):
    """What is done stays done when the call is made again."""
    ledger.enrol(paths("a", "b"), ("x",), True)
    ledger.record([done(1, "o")], [])
    assert ledger.enrol(paths("a", "b"), ("x",), True) == Enrolment(0, 2, 0, 0)
    assert states(ledger) == {"a": ["o"], "b": "todo"}
    assert ledger.get_meta("columns") == '["x"]'


def test_a_changed_input_is_redone_and_its_outputs_stay_until_then(ledger):
    """Another size or time means another content; what is replaced goes with the next result."""
    ledger.enrol(paths("a", "b"), (), True)
    ledger.record([done(1, "x", "y"), done(2, "z")], [])
    ledger.clear_file_changes()
    changed = [Input("a", None, "2:2"), Input("b", None, "1:1")]
    assert ledger.enrol(changed, (), True) == Enrolment(0, 1, 1, 0)
    assert states(ledger) == {"a": "todo", "b": ["z"]}
    assert (ledger.file_changes(), claimed(ledger)) == ([], {"x", "y", "z"})
    assert ledger.counts() == Counts(2, 1, 0)
    recorded = ledger.record([done(1, "x", "n")], [])
    removals, renames = [FileChange("x"), FileChange("y")], ["x", "n"]
    assert recorded.file_changes == [*removals, *(FileChange(n, f"s/1/{n}") for n in renames)]
    assert claimed(ledger) == {"x", "n", "z"}


def test_a_changed_input_that_fails_keeps_the_outputs_of_before(ledger):
    """They are no row of the table, and stay until it succeeds or somebody prunes them."""
    ledger.enrol(paths("a", "b"), (), True)
    ledger.record([done(1, "x"), done(2, "y")], [])
    ledger.enrol([Input("a", None, "2:2"), Input("b", None, "1:1")], (), True)
    assert ledger.record([], [failed(1)]).file_changes == []
    assert states(ledger) == {"a": "failed", "b": ["y"]}
    assert list(leftovers(ledger.rows)) == [Leftover("x", 7, "its input changed, and fails now")]
    ledger.prune()
    assert (ledger.file_changes(), claimed(ledger)) == ([FileChange("x")], {"y"})
    assert states(ledger) == {"a": "failed", "b": ["y"]}


def test_a_name_passes_from_an_earlier_result_to_a_new_one(ledger):
    """What a changed input made before does not count against another input."""
    ledger.enrol(paths("a", "b"), (), True)
    ledger.record([done(1, "x", "x2")], [])
    ledger.enrol([Input("a", None, "2:2"), Input("b", None, "1:1")], (), True)
    recorded = ledger.record([done(2, "x")], [])
    assert recorded.failed == []
    assert recorded.file_changes == [FileChange("x"), FileChange("x", "s/2/x")]
    assert ledger.record([done(1, "x2")], []).failed == []
    assert states(ledger) == {"a": ["x2"], "b": ["x"]}


@pytest.mark.parametrize(
    "seen", [["?", "1:1"], ["1:1", "?"], ["?", "?"]], ids=["the first", "the last", "all"]
)
def test_an_input_that_cannot_be_seen_keeps_all_that_there_is_of_it(ledger, seen):
    """Also when the listing has another order, and when it is seen again."""
    ledger.enrol(paths("a", "b"), (), True)
    ledger.record([done(1, "x"), done(2, "y")], [])
    before = [*ledger.results()]
    away = [Input(name, None, each) for name, each in zip("ab", seen, strict=True)]
    names = tuple(each.source for each in away if each.identity == "?")
    places = tuple(at for at, each in enumerate(away, 1) if each.identity == "?")
    found = Enrolment(0, 2, 0, 0, unseen=places, unseen_names=names)
    assert ledger.enrol(away, (), True) == found
    assert [*ledger.results()] == before
    moved = ledger.enrol(reversed(away), (), True)
    assert (moved.same, moved.changed, moved.moved, len(moved.unseen)) == (2, 0, 2, len(names))
    assert states(ledger) == {"a": ["x"], "b": ["y"]}
    ledger.enrol(paths("a", "b"), (), True)
    assert [*ledger.results()] == before
    ledger.enrol(paths("a", "b", identity="2:2"), (), True)
    assert states(ledger) == {"a": "todo", "b": "todo"}


def test_a_file_with_another_time_and_the_same_content_stays_done(ledger):
    """Only those whose content is not known, or is another, are done again."""
    ledger.enrol(paths("a", "b", "c"), (), True)
    results = [done(1, "x")._replace(content="1:1#aa"), done(2, "y")._replace(content="1:1#bb")]
    # The file of c changed between the listing and the work.
    ledger.record([*results, done(3, "z")._replace(content="1:2#cc")], [])
    assert ledger.enrol(paths("a", "b", "c"), (), True).same == 3
    asked = []

    def same_contents(given):
        for number, one, content in given:
            asked.append((one.source, one.identity, content))
            if content == "aa":
                yield number

    touched = paths("a", "b", "c", identity="1:9")
    found = ledger.enrol(touched, (), True, same_contents=same_contents)
    assert asked == [("a", "1:9", "aa"), ("b", "1:9", "bb")]
    assert (found.same, found.kept, found.changed, found.retimed) == (1, 1, 2, 2)
    assert states(ledger) == {"a": ["x"], "b": "todo", "c": "todo"}
    assert ledger.enrol(touched, (), True) == Enrolment(0, 3, 0, 0)


def test_an_input_that_is_gone_keeps_its_outputs_and_comes_back_done(ledger):
    """An input that leaves the listing is not counted, not lost, and not done again."""
    ledger.enrol(paths("a", "b", "c"), (), True)
    ledger.record([done(1, "x"), done(2, "y")], [failed(3)])
    assert ledger.enrol(paths("b"), (), True) == Enrolment(0, 1, 0, 2, 1)
    assert ledger.counts() == Counts(1, 1, 0)
    assert states(ledger) == {"b": ["y"]}
    assert {(name, ordinal > 0) for name, _, ordinal in ledger.outputs()} == {
        ("x", False),
        ("y", True),
    }
    assert ledger.enrol(paths("c", "b", "a"), (), True) == Enrolment(0, 3, 0, 0, 3)
    assert states(ledger) == {"a": ["x"], "b": ["y"], "c": "failed"}
    assert ledger.counts() == Counts(3, 2, 1)
    assert list(ledger.outputs()) == [("y", 7, 2), ("x", 7, 3)]


def test_an_input_that_comes_back_changed_is_redone(ledger):
    """Being away does not hide a change."""
    ledger.enrol(paths("a", "b"), (), True)
    ledger.record([done(1, "x")], [])
    ledger.clear_file_changes()
    ledger.enrol(paths("b"), (), True)
    assert ledger.enrol(paths("b", "a", identity="2:2"), (), True) == Enrolment(0, 1, 1, 0)
    assert states(ledger) == {"a": "todo", "b": "todo"}


def test_a_listing_cut_short_leaves_the_others_alone(ledger):
    """A trial on the first few forgets nothing of what was done before."""
    ledger.enrol(paths("a", "b", "c"), (), True)
    ledger.record([done(3, "x")], [])
    assert ledger.enrol(paths("a"), (), False) == Enrolment(0, 1, 0, 0)
    assert ledger.enrol(paths("n", "b"), (), False) == Enrolment(1, 1, 0, 0, 2)
    assert [todo.source for todo in ledger.todo()] == ["n", "b", "a"]
    assert [(result.ordinal, result.source) for result in ledger.results()] == [(4, "c")]
    assert ledger.counts() == Counts(4, 1, 0)


def test_another_order_alone_is_told(ledger):
    """Nothing is redone, but whoever keeps a table in input order has to write it again."""
    ledger.enrol(paths("a", "b", "c"), (), True)
    ledger.record([done(1, "x"), done(2, "y"), done(3, "z")], [])
    assert ledger.enrol(paths("a", "c", "b"), (), True) == Enrolment(0, 3, 0, 0, 2)
    assert [result.source for result in ledger.results()] == ["a", "c", "b"]


def test_claims_follow_their_inputs_to_new_places(ledger):
    """After a renumbering, a clash is still laid to the input that has the name."""
    ledger.enrol(paths("a", "b"), (), True)
    ledger.record([done(1, "x")], [])
    ledger.enrol(paths("n", "a", "b"), (), True)
    recorded = ledger.record([done(3, "x")], [])
    assert {one.ordinal for one in recorded.failed} == {2, 3}


@pytest.mark.parametrize("earlier", [(), ("a", "b"), ("a", "b", "c")])
def test_an_input_listed_twice_is_named_with_both_positions(ledger, earlier):
    """Duplicates are found wherever they are, and nothing is enrolled."""
    ledger.enrol(paths(*earlier), (), True)
    with pytest.raises(InputError) as caught:
        ledger.enrol(paths("a", "b", "c", "b", "c"), (), True)
    first = str(caught.value).splitlines()[0]
    assert first == "input b is listed twice: at positions 2 and 4 (and so is 1 more)"
    assert ledger.counts().total == len(earlier)


def test_rows_with_one_path_are_different_inputs(ledger):
    """A manifest's input is its row; equal rows are duplicates."""
    rows = [Input("a.wav", '{"path": "a.wav", "start": 0}'), Input("a.wav", '{"start": 1}')]
    assert ledger.enrol(rows, ("path", "start"), True).new == 2
    with pytest.raises(InputError, match=r"row .* at positions 1 and 3"):
        ledger.enrol([*rows, rows[0]], ("path", "start"), True)


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


def test_names_that_are_not_unicode_are_kept(ledger):
    """A file name of foreign bytes comes back as it was, everywhere."""
    odd = "caf\udce9.wav"
    ledger.enrol(paths(odd), (), True)
    assert ledger.enrol(paths(odd), (), True) == Enrolment(0, 1, 0, 0)
    ledger.record([Done(1, 1, 0.1, (OutputFile(odd, 1, f"s/{odd}"),), f'["{odd}"]')], [])
    assert ledger.file_changes() == [FileChange(odd, f"s/{odd}")]
    (result,) = ledger.results()
    assert (result.source, files_of(result.outputs), result.metadata) == (
        odd,
        [(odd, 1)],
        f'["{odd}"]',
    )
    assert claimed(ledger) == {odd}


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


def test_done_and_failed_inputs_are_kept_with_all_that_is_known(ledger):
    """Outputs, metadata, error and traceback come back as they went in."""
    ledger.enrol(paths("a", "b"), (), True)
    recorded = ledger.record([done(1, "x", "y")], [failed(2)])
    assert (
        recorded.file_changes
        == ledger.file_changes()
        == [FileChange("x", "s/1/x"), FileChange("y", "s/1/y")]
    )
    assert recorded.failed == [failed(2)]
    assert list(ledger.failures()) == [failed(2).failure._replace(source="b")]
    (result,) = ledger.results()
    assert (files_of(result.outputs), result.metadata) == ([("x", 7), ("y", 7)], '[{"n": 1}]')
    assert ledger.counts() == Counts(2, 1, 1)
    assert [todo.ordinal for todo in ledger.todo()] == [2]


def test_inputs_that_failed_are_tried_after_the_untried_ones(ledger):
    """A job that is killed again and again advances; what fails meanwhile is not tried again."""
    ledger.enrol(paths("a", "b", "c", "d", "e"), (), True)
    ledger.record([done(4)], [failed(1), failed(3)])
    todo = ledger.todo()
    assert [next(todo).source, next(todo).source] == ["b", "e"]
    ledger.record([], [failed(2)])
    assert [each.source for each in todo] == ["a", "c"]
    assert [each.source for each in ledger.todo(2)] == ["a", "b"]
    assert [each.source for each in ledger.todo(failed_only=True)] == ["a", "b", "c"]


def test_the_next_record_forgets_the_file_changes_before_it(ledger):
    """By then they are done and durable."""
    ledger.enrol(paths("a", "b"), (), True)
    ledger.record([done(1, "x")], [])
    ledger.record([done(2, "y", staged=False)], [])
    assert ledger.file_changes() == []


@pytest.mark.parametrize("batches", [[[1, 2]], [[1], [2]], [[2], [1]]])
def test_two_inputs_with_one_name_both_fail(ledger, batches):
    """Whoever came first: neither is kept, each is told of the other, nothing stays behind."""
    ledger.enrol(paths("a", "b"), (), True)
    results = {1: done(1, "x", "only-a"), 2: done(2, "x", "only-b")}
    for batch in batches:
        recorded = ledger.record([results[one] for one in batch], [])
    assert {one.ordinal for one in recorded.failed} == {1, 2}
    messages = {one.ordinal: one.failure.message for one in recorded.failed}
    assert messages[1].startswith("output 'x' is claimed by two inputs, this one and b\n")
    assert messages[2].startswith("output 'x' is claimed by two inputs, this one and a\n")
    kinds = {(one.failure.kind, one.failure.error) for one in recorded.failed}
    assert kinds == {("output", "OutputError")}
    removed = {
        file_change.name for file_change in recorded.file_changes if file_change.staged is None
    }
    last = batches[-1]
    assert {f"s/{one}/x" for one in last} <= removed
    if len(batches) == 2:
        assert {"x", "only-a" if last == [2] else "only-b"} <= removed
    assert not any(file_change.staged for file_change in recorded.file_changes)
    assert states(ledger) == {"a": "failed", "b": "failed"}
    assert ledger.counts() == Counts(2, 0, 2)


def test_a_third_claimant_fails_too(ledger):
    """No input gets a contested name until it is freed for another try."""
    ledger.enrol(paths("a", "b", "c"), (), True)
    ledger.record([done(1, "x"), done(2, "x")], [])
    recorded = ledger.record([done(3, "x")], [])
    assert "this one and a\n" in recorded.failed[0].failure.message
    assert ledger.counts().failed == 3
    ledger.free_contested()
    assert ledger.counts() == Counts(3, 0, 3)
    ledger.record([done(3, "x")], [failed(1), failed(2)])
    assert ledger.counts() == Counts(3, 1, 2)
    assert states(ledger)["c"] == ["x"]


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


def test_a_name_passes_from_a_gone_input_to_a_listed_one(ledger):
    """A folder that was renamed is done again without clashing with its former self."""
    ledger.enrol(paths("old/a", "old/b"), (), True)
    ledger.record([done(1, "a", "a2"), done(2, "b")], [])
    ledger.enrol(paths("new/a"), (), True)
    recorded = ledger.record([done(1, "a")], [])
    assert (recorded.failed, recorded.file_changes) == (
        [],
        [FileChange("a"), FileChange("a", "s/1/a")],
    )
    assert sorted(name for name, _, _ in ledger.outputs()) == ["a", "a2", "b"]
    enrolment = ledger.enrol(paths("old/a", "old/b"), (), True)
    assert (enrolment.changed, enrolment.same) == (0, 2)
    assert states(ledger) == {"old/a": "todo", "old/b": ["b"]}


def test_an_input_may_claim_its_own_names_again(ledger):
    """A result that comes twice replaces itself; what it no longer has is removed."""
    ledger.enrol(paths("a"), (), True)
    ledger.record([done(1, "x", "y")], [])
    recorded = ledger.record([done(1, "x")], [])
    assert recorded.file_changes == [FileChange("x"), FileChange("y"), FileChange("x", "s/1/x")]
    assert ledger.counts() == Counts(1, 1, 0)
    assert claimed(ledger) == {"x"}


def test_an_input_whose_file_cannot_be_published_is_failed(ledger):
    """With the reason; its other files go, what is in the way stays, and so do other inputs."""
    ledger.enrol(paths("a", "b"), (), True)
    ledger.record([done(1, "x", "y"), done(2, "z")], [])
    recorded = ledger.take_back([Unpublished("x", "s/1/x", "in the way"), Unpublished("?", "", "")])
    assert [(one.ordinal, one.failure.message) for one in recorded.failed] == [(1, "in the way")]
    assert recorded.file_changes == [FileChange("y"), FileChange("s/1/x"), FileChange("")]
    assert ledger.file_changes() == [FileChange("z", "s/2/z"), *recorded.file_changes]
    assert states(ledger) == {"a": "failed", "b": ["z"]}
    assert (ledger.counts(), claimed(ledger)) == (Counts(2, 1, 1), {"z"})


def test_a_result_for_an_unknown_input_changes_nothing(ledger):
    """A mistake of the driver's is an error, and the whole batch is rolled back."""
    ledger.enrol(paths("a"), (), True)
    with pytest.raises(LedgerError, match="input 5"):
        ledger.record([done(1, "x"), done(5, "y")], [])
    assert states(ledger) == {"a": "todo"}
    assert claimed(ledger) == set()


def test_what_is_marked_todo_keeps_its_outputs_until_it_is_done_again(ledger):
    """What `verify` found wanting is done again."""
    ledger.enrol(paths("a", "b"), (), True)
    ledger.record([done(1, "x"), done(2, "y")], [])
    ledger.clear_file_changes()
    ledger.mark_todo([1])
    assert (ledger.file_changes(), claimed(ledger)) == ([], {"x", "y"})
    assert states(ledger) == {"a": "todo", "b": ["y"]}
    assert ledger.counts() == Counts(2, 1, 0)


def test_a_run_that_begins_anew_removes_nothing_before_its_end(ledger):
    """Every input is todo; what is not replaced goes at the end, and what failed keeps its own."""
    ledger.enrol(paths("a", "b", "c", "d"), ("c",), True)
    ledger.record([done(1, "x"), done(2, "y"), done(3, "z")], [failed(4)])
    ledger.clear_file_changes()
    ledger.set_meta("version", "1")
    ledger.set_tables({"csv": False, "parquet": True})
    found = ledger.enrol(paths("a", "c", "e"), (), True, anew=True)
    assert (found.new, found.changed, ledger.begins_anew) == (1, 0, True)
    assert (ledger.counts(), ledger.get_meta("version")) == (Counts(3, 0, 0), None)
    assert states(ledger) == {"a": "todo", "c": "todo", "e": "todo"}
    assert {name for name, _, _ in ledger.outputs()} == {"x", "y", "z"}
    assert ledger.tables() == {"csv": False, "parquet": False}
    ledger.record([done(1, "x")], [failed(2)])
    ledger.clear_file_changes()
    ledger.set_tables({"csv": True, "parquet": False})
    ledger.drop_replaced()
    assert ledger.file_changes() == [FileChange("y"), FileChange("metadata.parquet")]
    assert [(name, at) for name, _, at in ledger.outputs()] == [("x", 1), ("z", 2)]
    assert (ledger.tables(), ledger.begins_anew) == ({"csv": True}, False)


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


def test_a_file_that_is_no_database_is_damaged(tmp_path):
    """A truncated ledger is reported as damaged and left as it is."""
    (tmp_path / "ledger.sqlite").write_bytes(b"no database at all, just text" * 100)
    with pytest.raises(LedgerError, match="is damaged") as caught:
        Ledger.open(tmp_path)
    assert "move the whole output folder away" in str(caught.value)
    assert (tmp_path / "ledger.sqlite").read_bytes().startswith(b"no database")


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
