"""The checker of the exactness benchmark: what it calls exact, wrong, refused, crashed."""

from __future__ import annotations

import random

import pytest
from benchmarks.exactness.checker import Seen, judge
from benchmarks.exactness.histories import HISTORIES, SAMPLES, History, Life
from benchmarks.exactness.table import DRIVERS

FIRST = Life()
CUT = History("cut", "", "", ((FIRST, Life(begin=5)),))


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
    """Batches of a step are those of all ranks; another number of ranks goes on from there."""
    ids = epochs(batch=12)
    two = Seen(tuple(tuple(batch[rank * 6 : rank * 6 + 6] for batch in ids) for rank in (0, 1)))
    three = Seen(
        tuple(tuple(batch[rank * 4 : rank * 4 + 4] for batch in ids[2:]) for rank in (0, 1, 2))
    )
    lives = (Life(ranks=2, batch=12), Life(ranks=3, batch=12, begin=2))
    history = History("", "", "", (lives,))
    assert str(judge(history, [[two, three]], two)) == "exact"
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
    history = next(each for each in HISTORIES if each.check == "signal")
    batches = epochs(10)[:110]
    assert str(judge(history, [[seen(batches, handlers=1)]], None)) == "exact"
    assert judge(history, [[seen(batches, handlers=3)]], None).word == "wrong"
    error = "RuntimeError: DataLoader worker (pid 7) exited unexpectedly"
    found = judge(history, [[seen(batches[:12], error=error, handlers=1)]], None)
    assert (found.word, found.detail[:14]) == ("refused", "2 of 100 batch")


@pytest.mark.parametrize("name", DRIVERS)
def test_a_driver_is_short(name):
    """So that it can be judged for fairness at a glance."""
    from pathlib import Path

    import benchmarks.exactness.drivers as drivers

    lines = (Path(drivers.__path__[0]) / f"{name}.py").read_text().splitlines()
    assert len(lines) <= 100
