"""The ideal schedule that the waiting benchmark compares with, and the trainings it is for."""

from __future__ import annotations

import pytest
from benchmarks.loading.patterns import PATTERNS, Pattern
from benchmarks.loading.schedule import waiting_share

pytestmark = pytest.mark.full


def test_a_consumer_slower_than_its_workers_waits_for_the_first_batch_alone():
    """One worker, 1 s a batch, steps of 3 s: one second of ten."""
    assert waiting_share([1.0] * 3, [3.0] * 3, 1) == pytest.approx(1 / 10)


def test_a_consumer_faster_than_its_workers_waits_for_each_batch():
    """One worker, 2 s a batch, steps of 1 s: 2 s before the first, then 1 s before each."""
    assert waiting_share([2.0] * 4, [1.0] * 4, 1) == pytest.approx(5 / 9)


def test_two_workers_make_two_batches_at_once():
    """The second is ready with the first, the third and fourth two seconds later."""
    assert waiting_share([2.0] * 4, [0.0, 0.0, 0.0, 4.0], 2) == pytest.approx(4 / 8)


def test_a_slow_batch_keeps_its_own_worker_only_and_the_order_holds():
    """The other worker makes the four that follow, which wait behind the slow one."""
    assert waiting_share([4.0, 1.0, 1.0, 1.0, 1.0], [1.0] * 5, 2) == pytest.approx(4 / 9)


def test_what_was_made_during_a_pause_is_there_after_it():
    """Two bursts of two: the second one's batches are made while the consumer pauses."""
    assert waiting_share([1.0] * 4, [0.0, 5.0, 0.0, 5.0], 1) == pytest.approx(2 / 12)


def test_nothing_to_do_is_no_wait():
    """No batches, no time, no division by zero."""
    assert waiting_share([], [], 2) == 0.0


def test_every_batch_needs_a_step():
    """Lists of different lengths are a mistake of the caller's."""
    with pytest.raises(ValueError, match="zip"):
        waiting_share([1.0], [], 2)


@pytest.mark.parametrize("name", PATTERNS)
def test_the_makers_of_every_pattern_are_fast_enough_on_average(name: str):
    """What two workers make takes no longer than what the consumer does with it."""
    pattern = PATTERNS[name]
    cycles = pattern.cycles(30)
    making = 8 * sum(pattern.sample_costs(cycles)) / 2
    assert making < sum(pattern.steps(cycles))


def test_one_batch_of_each_cycle_is_slow_at_places_that_vary_and_stay():
    """A fixed place could fall to one worker always, which would be unfair to some."""
    pattern = Pattern("", sample_s=1.0, step_s=1.0, cycle=10, slow=10.0)
    costs = pattern.sample_costs(20)
    cycles = [costs[at : at + 10] for at in range(0, len(costs), 10)]
    assert all(sorted(cycle) == [1.0] * 9 + [10.0] for cycle in cycles)
    assert len({cycle.index(10.0) for cycle in cycles}) > 3
    assert pattern.sample_costs(20) == costs


def test_cycles_fill_the_time_with_steps():
    """A cycle is its steps and its pause; there is always one."""
    assert PATTERNS["epochs"].cycles(15) == 30
    assert PATTERNS["bursts"].cycles(16) == 8
    assert PATTERNS["bursts"].cycles(0.1) == 1
