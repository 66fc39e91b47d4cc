"""The checker of the exactness benchmark: what it calls exact, wrong, refused, crashed."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.exactness.checker import Cell, Seen, judge
from benchmarks.exactness.histories import (
    HISTORIES,
    MEANINGS,
    SAMPLES,
    SIGNAL_AT,
    SIGNAL_MORE,
    History,
    Life,
)
from benchmarks.exactness.life import said
from benchmarks.exactness.measured import Measured, store, stored
from benchmarks.exactness.page import page

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks" / "exactness"
DRIVERS = sorted(path.stem for path in (FOLDER / "drivers").glob("[!_]*.py"))
FILE = ROOT / "docs" / "benchmarks" / "exactness.json"
PAGE = FILE.with_suffix(".md")
FIRST = Life()
CUT = History("cut", "", "", ((FIRST, Life(begin=5)),))
SIGNAL = next(each for each in HISTORIES if each.check == "signal")


def epochs(count=2, batch=4, seed=0):
    """Return the batches of a loader that is right."""
    drawn, batches = random.Random(seed), []
    for _ in range(count):
        ids = drawn.sample(range(SAMPLES), SAMPLES)
        batches += [tuple(ids[at : at + batch]) for at in range(0, SAMPLES, batch)]
    return batches


def seen(batches, draw=lambda number: (number, 1, 2, 3), **options):
    """Return what a life of one rank noted."""
    bits = tuple(tuple(draw(number) for number in batch) for batch in batches)
    return Seen((tuple(batches),), (bits,), **options)


def cut(batches, resumed, **options):
    """Return the verdict on a training that was cut after five batches."""
    whole = seen(batches)
    return judge(CUT, [[whole, seen(resumed, **options)]], whole)


def signalled(*lives):
    """Return the verdict on trainings that got a signal; one stands for all."""
    every = lives if len(lives) > 1 else lives * len(SIGNAL.trials)
    return judge(SIGNAL, [[each] for each in every], None)


def test_a_resume_that_goes_on_is_exact():
    """The batches after the cut are those of the uninterrupted run."""
    batches = epochs()
    assert str(cut(batches, batches[5:])) == "exact"


def test_batches_that_are_skipped_or_repeated_are_wrong_with_their_numbers():
    """Lost and twice are counted in samples."""
    batches = epochs()
    assert cut(batches, batches[6:]).detail == "4 lost"
    assert cut(batches, batches[4:]).detail == "4 twice"
    other = cut(batches, [batches[4], *batches[6:]])
    assert (other.word, other.detail) == ("wrong", "4 lost, 4 twice")


def test_samples_that_move_between_epochs_are_wrong_although_their_sum_is_right():
    """One sample twice in the first epoch and never in the second is no exact training."""
    batches = epochs()
    first, second = [list(batch) for batch in batches[5:12]], [*map(list, batches[12:])]
    wanted = first[0][0]
    place = next(at for at, batch in enumerate(second) if wanted in batch)
    at = second[place].index(wanted)
    other = first[1][0]
    second[place][at], first[1][0] = other, wanted
    found = cut(batches, [*map(tuple, first), *map(tuple, second)])
    assert (found.word, found.detail) == ("wrong", "2 twice in an epoch, and as many lost")


def test_another_order_is_told_from_an_exact_one():
    """Each sample once, but not as without the cut."""
    batches = epochs()
    found = cut(batches, batches[11:4:-1] + batches[12:])
    assert str(found) == "once each"


def test_an_error_in_a_sentence_is_a_refusal_and_one_without_a_crash():
    """The words are kept."""
    batches = epochs()
    words = "RuntimeError: The state is of two workers and cannot be loaded by three"
    assert cut(batches, [], error=words).word == "refused"
    assert cut(batches, [], error=words).detail == words
    assert cut(batches, [], error="AssertionError:").word == "crashed"
    assert cut(batches, [], error="KeyError: 'state'").word == "crashed"
    assert cut(batches, [], error="IndexError: list index out of range").word == "crashed"
    words = "ValueError: The state is of two workers and cannot be loaded by three"
    assert cut(batches, [], error=words).word == "refused"
    assert cut(batches, batches[5:7], hangs=True).word == "hangs"


def test_the_worst_of_several_trials_counts_with_how_many_are_like_it():
    """Twelve cuts of which one is wrong are wrong."""
    batches = epochs()
    whole = seen(batches)
    history = History("", "", "", ((FIRST, Life(begin=5)), (FIRST, Life(begin=6))))
    trials = [[whole, seen(batches[5:])], [whole, seen(batches[7:])]]
    found = judge(history, trials, whole)
    assert (found.word, found.detail) == ("wrong", "1 of 2: 4 lost")


def test_shares_of_ranks_are_one_training():
    """Batches of a step are those of all ranks, whichever has which; other ranks go on there."""
    ids = epochs(batch=12)
    two = Seen(tuple(tuple(batch[rank * 6 : rank * 6 + 6] for batch in ids) for rank in (0, 1)))
    three = Seen(
        tuple(tuple(batch[rank * 4 : rank * 4 + 4] for batch in ids[2:]) for rank in (0, 1, 2))
    )
    lives = (Life(ranks=2, batch=12), Life(ranks=3, batch=12, begin=2))
    history = History("", "", "", (lives,))
    assert str(judge(history, [[two, three]], two)) == "exact"
    turned = Seen(three.ids[::-1])
    assert str(judge(history, [[two, turned]], two)) == "exact"
    later = Seen(tuple(rank[1:] + rank[:1] for rank in three.ids))
    assert str(judge(history, [[two, later]], two)) != "exact"
    again = Seen(tuple(rank[:1] + rank for rank in three.ids))
    assert judge(history, [[two, again]], two).word == "wrong"


def test_draws_that_differ_are_named_by_their_generator():
    """Bits of an augmentation are compared for each sample of each epoch."""
    batches = epochs()
    history = History("", "", "", ((FIRST, Life(begin=5)),), check="bits")
    whole = seen(batches)
    assert str(judge(history, [[whole, seen(batches[5:])]], whole)) == "exact"
    other = seen(batches[5:], lambda number: (number, 1, 7, 3))
    found = judge(history, [[whole, other]], whole)
    assert (found.word, found.detail) == ("wrong", "draws that differ, of 96: torch 76")


def test_a_signal_is_survived_by_the_batches_that_come_and_one_handler():
    """The handler of the program runs in its own process."""
    batches = epochs(10)[: SIGNAL_AT + SIGNAL_MORE]
    assert str(signalled(seen(batches, handlers=1))) == "exact"
    assert signalled(seen(batches, handlers=3)).word == "wrong"
    error = "RuntimeError: DataLoader worker (pid 7) exited unexpectedly"
    found = signalled(seen(batches[: SIGNAL_AT + 2], error=error, handlers=1))
    assert (found.word, found.detail[:22]) == ("refused", "3 of 3: 2 of 100 batch")
    again = batches[:6] + batches[5:-1]
    found = signalled(seen(again, handlers=1))
    assert (found.word, found.detail[-32:]) == ("wrong", "samples lost or twice in an epoch"[-32:])


def test_a_signal_is_sent_several_times_while_workers_have_batches():
    """The worst run counts: what comes depends on when it reaches whom."""
    batches = epochs(10)[: SIGNAL_AT + SIGNAL_MORE]
    good, error = seen(batches, handlers=1), "ConnectionResetError: [Errno 104] Connection reset"
    bad = seen(batches[:SIGNAL_AT], error=error, handlers=1)
    found = signalled(good, bad, good)
    assert (found.word, found.detail[:24]) == ("crashed", "1 of 3: 0 of 100 batches")
    assert found.detail.endswith("; 2 exact")
    assert len({*SIGNAL.trials}) == 3
    assert SIGNAL_AT + 2 * max(life.workers for (life,) in SIGNAL.trials) < SAMPLES // 4


@pytest.mark.parametrize("name", DRIVERS)
def test_a_driver_is_short(name):
    """So that it can be judged for fairness at a glance."""
    lines = (FOLDER / "drivers" / f"{name}.py").read_text().splitlines()
    assert len(lines) <= 100


def test_each_history_is_explained():
    """The page says what each column is."""
    assert set(MEANINGS) == {each.name for each in HISTORIES}


def test_an_error_that_quotes_that_of_a_worker_is_the_worker_s():
    """torch's and Ray's errors have the traceback of another process in their message."""
    quoting = RuntimeError(
        "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call "
        "last):\n  File x, line 1\n    raise ValueError(y)\nValueError: not of this dataset\n"
    )
    assert said(quoting) == "ValueError: not of this dataset"
    assert said(KeyError("a")) == "KeyError: 'a'"


def measured(driver, word, detail=""):
    """Return a loader whose cells are all alike."""
    cells = {each.name: Cell(word, detail) for each in HISTORIES}
    return Measured(driver, driver.title(), "2026-11-26", "x", "1.0", "https://x", cells)


def test_a_loader_that_is_measured_again_takes_the_place_of_its_earlier_results(tmp_path):
    """The others' stay."""
    file = tmp_path / "exactness.json"
    store([measured("a", "exact"), measured("b", "wrong", "1 lost")], file)
    store([measured("b", "exact")], file)
    assert stored(file) == [measured("a", "exact"), measured("b", "exact")]


def test_a_history_that_is_measured_again_takes_the_place_of_its_earlier_cell(tmp_path):
    """The others' stay, if they are of the same versions."""
    file = tmp_path / "exactness.json"
    store([measured("a", "exact")], file)
    again = replace(measured("a", "exact"), cells={"tree": Cell("wrong", "1 lost")}, seconds=1)
    store([again], file)
    assert stored(file) == [
        replace(again, cells=measured("a", "exact").cells | again.cells, seconds=0)
    ]
    with pytest.raises(ValueError, match=r"with 1\.0 and is 2\.0 now: measure all"):
        store([replace(again, versions="2.0")], file)


def test_the_page_has_each_cell_and_the_words_behind_it():
    """Histories in which the same was seen share a row; what is not measured is named."""
    missing = Measured("c", "c", "2026-11-26", missing="not measured: no module named c")
    text = page([measured("a", "wrong", "1 lost|"), measured("b", "exact"), missing])
    assert "| A | **wrong** | **wrong** |" in text
    assert "| B | exact | exact |" in text
    titles = "; ".join(each.title for each in HISTORIES)
    assert f"| A | {titles} | **wrong** | 1 lost/ |" in text
    assert "| c | not measured: no module named c | 2026-11-26 |  |" in text


def test_the_stored_page_is_made_of_the_stored_results():
    """Written by the benchmark, not by hand."""
    assert PAGE.read_text(encoding="utf-8") == page(stored(FILE)), (
        "run python -m benchmarks.exactness.page"
    )


@pytest.mark.parametrize("each", stored(FILE), ids=lambda each: each.driver)
def test_a_stored_cell_that_is_wrong_has_a_script_and_forebay_has_none(each):
    """A maintainer of that library runs the script; forebay's cells are exact or no such thing."""
    bad = [name for name, cell in each.cells.items() if cell.word in ("wrong", "hangs")]
    if "forebay" in each.title:
        assert {cell.word for cell in each.cells.values()} <= {"exact", "-"}
    elif bad:
        assert [*(FOLDER / "wrong").glob(f"{each.driver}_*.py")], bad
