"""How many workers `num_workers="auto"` has: pure decisions, tried on a model of a loader."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.observe.tuner import (
    BUSY,
    HALF_BUSY,
    HEADROOM,
    HELPED,
    PAUSE_AFTER_FAILURE_S,
    WINDOWS_BEFORE_FEWER,
    Totals,
    Tuner,
)


@dataclass
class Model:
    """A loader in its steady state: as fast as the slowest of trainer, workers, cores, storage."""

    step_s: float
    cpu_s: float
    wait_s: float = 0.0  # of a worker for its storage, for each batch
    cores: float = 2.0
    trainer_cores: float = 0.0
    most_per_s: float = math.inf  # what the storage gives
    uneven_below: int = 0  # so many workers even out batches that differ
    totals: Totals = field(default_factory=lambda: Totals(*[0] * 9))

    def rate(self, workers: int) -> float:
        """Return batches per second with so many workers."""
        by_workers = workers / (self.cpu_s + self.wait_s)
        by_cores = (self.cores - self.trainer_cores) / self.cpu_s if self.cpu_s else math.inf
        even = min(1 / self.step_s, by_workers, by_cores, self.most_per_s)
        return even * 0.92 if workers < self.uneven_below else even

    def run(self, workers: int, seconds: float) -> Totals:
        """Return the totals after some more seconds."""
        was, rate = self.totals, self.rate(workers)
        made = round(rate * seconds)
        is_full = rate >= 1 / self.step_s - 1e-9
        # Workers that are never idle take longer where cores or storage are the limit.
        is_idle = is_full or self.uneven_below > 0
        batch_s = self.cpu_s + self.wait_s if is_idle else workers / rate
        queued_s = 0.0
        if not is_full and math.isinf(self.most_per_s):
            queued_s = batch_s - self.cpu_s - self.wait_s
        self.totals = Totals(
            was.at + seconds,
            was.waited_s + max(seconds - made * self.step_s, 0.0) * (not is_full),
            was.steps + made,
            was.steps_s + made * self.step_s,
            was.made + made,
            was.made_s + batch_s * made,
            was.cpu_s + self.cpu_s * made,
            was.queued_s + queued_s * made,
            was.trainer_cpu_s + self.trainer_cores * seconds,
        )
        return self.totals


def run(tuner, model, windows):
    """Decide once a second, and return the numbers of workers and the decisions."""
    numbers, decisions = [], []
    tuner.decide(model.totals)
    for _ in range(windows):
        decision = tuner.decide(model.run(tuner.num_workers, 1.0))
        if decision is not None:
            decisions.append(decision)
        numbers.append(tuner.num_workers)
    return numbers, decisions


@pytest.mark.parametrize(
    ("model", "most"),
    [
        pytest.param(Model(step_s=0.02, cpu_s=0.001, wait_s=0.1), 8, id="latency"),
        pytest.param(Model(step_s=0.02, cpu_s=0.03), 8, id="cpu"),
        pytest.param(Model(step_s=0.001, cpu_s=0.05, cores=8), 16, id="eight-cores"),
        pytest.param(Model(step_s=1e-5, cpu_s=2e-5, trainer_cores=0.9), 8, id="trivial"),
        pytest.param(Model(step_s=0.05, cpu_s=0.01), 8, id="slow-trainer"),
        pytest.param(Model(step_s=0.01, cpu_s=0.001, wait_s=0.05, most_per_s=30), 8, id="rate"),
        pytest.param(Model(step_s=0.01, cpu_s=0, wait_s=0.043, uneven_below=7), 8, id="uneven"),
    ],
)
def test_it_comes_close_to_the_best_number_and_stays(model, most):
    """Within ten looks, from two workers; then it does not move up and down."""
    best = max(model.rate(workers) for workers in range(1, most + 1))
    numbers, decisions = run(Tuner(2, most, model.cores), model, 25)
    assert model.rate(numbers[9]) >= 0.95 * best
    assert len(set(numbers[15:])) == 1, decisions
    assert len(decisions) <= 3


def test_it_grows_by_what_is_missing_and_says_why():
    """One decision, not one worker at a time; within the limit."""
    _, decisions = run(Tuner(2, 16, 2.0), Model(step_s=0.02, cpu_s=0.0, wait_s=0.1), 3)
    assert [each.num_workers for each in decisions] == [6]
    assert decisions[0].reason == (
        "training waits 60% of the time: a step takes 20 ms and a batch 100 ms of a worker, so "
        "there are 6 workers instead of 2"
    )
    _, decisions = run(Tuner(2, 4, 2.0), Model(step_s=0.02, cpu_s=0.0, wait_s=0.1), 3)
    assert [each.num_workers for each in decisions] == [4]


def test_more_workers_than_the_cores_can_run_are_not_started():
    """Processor time is the limit: two cores run two workers."""
    numbers, decisions = run(Tuner(2, 8, 2.0), Model(step_s=0.01, cpu_s=0.05), 30)
    assert set(numbers) == {2}
    assert decisions == []


def test_fewer_only_after_several_looks_that_agree():
    """A short quiet time takes no worker away; a long one does."""
    tuner = Tuner(6, 8, 2.0)
    quiet, busy = (Model(step_s=step_s, cpu_s=0.0, wait_s=0.1) for step_s in (0.1, 0.02))
    run(tuner, busy, 2)
    numbers, _ = run(tuner, quiet, WINDOWS_BEFORE_FEWER - 1)
    assert set(numbers) == {6}
    numbers, (decision,) = run(tuner, quiet, WINDOWS_BEFORE_FEWER + 1)
    assert numbers[-1] == decision.num_workers == 2
    assert "2 workers are enough instead of 6" in decision.reason


def test_a_change_of_load_is_followed_within_ten_looks():
    """The trainer becomes five times as fast, and slow again."""
    tuner = Tuner(2, 16, 2.0)
    for step_s in (0.1, 0.02, 0.1):
        model = Model(step_s=step_s, cpu_s=0.001, wait_s=0.2)
        numbers, _ = run(tuner, model, 10)
        assert model.rate(numbers[-1]) >= 0.95 / step_s


def test_what_does_not_help_is_undone_and_not_tried_again_for_a_while():
    """A storage that gives so much and no more."""
    model = Model(step_s=0.01, cpu_s=0.0, wait_s=0.05, most_per_s=40)
    tuner = Tuner(2, 16, 2.0)
    numbers, (more, back) = run(tuner, model, int(PAUSE_AFTER_FAILURE_S) - 1)
    assert (more.num_workers, back.num_workers) == (6, 2)
    assert "more do not help" in back.reason
    assert numbers.count(6) == 1
    numbers, later = run(tuner, model, 4)
    assert [each.num_workers for each in later] == [6, 2]
    numbers, later = run(tuner, model, int(PAUSE_AFTER_FAILURE_S) + 10)
    assert later == []


def test_it_keeps_what_it_measured_until_the_load_changes():
    """By number of workers, also of the number that did not help."""
    model = Model(step_s=0.01, cpu_s=0.0, wait_s=0.05, most_per_s=35)
    tuner = Tuner(1, 16, 2.0)
    run(tuner, model, 10)
    tried = sorted(tuner.rates)
    assert tried[0] == 1
    assert len(tried) >= 2
    assert tuner.rates[1] == pytest.approx(20)
    assert {tuner.rates[each] for each in tried[1:]} == {35.0}
    slower = Model(step_s=0.01, cpu_s=0.0, wait_s=0.05, most_per_s=15, totals=model.totals)
    run(tuner, slower, 3)
    assert set(tuner.rates.values()) == {15.0}


def test_where_batches_differ_there_are_more_than_the_average_needs():
    """Five would do for the mean; with eight the trainer does not wait, and they stay."""
    model = Model(step_s=0.01, cpu_s=0.0, wait_s=0.043, uneven_below=7)
    numbers, decisions = run(Tuner(2, 16, 2.0), model, 60)
    assert [each.num_workers for each in decisions] == [5, 8]
    assert decisions[1].reason == (
        "training waits 8% of the time: a step takes 10 ms and a batch 43 ms of a worker on "
        "average, for which 5 are enough, but batches differ, so there are 8 workers instead of 5"
    )
    assert numbers[-1] == 8


def test_what_does_not_even_out_is_undone():
    """The trainer waits for something else; the average decides again afterwards."""
    model = Model(step_s=0.01, cpu_s=0.0, wait_s=0.043, uneven_below=100)
    tuner = Tuner(5, 16, 2.0)
    _, (more, back) = run(tuner, model, 20)
    assert (more.num_workers, back.num_workers) == (8, 5)
    quick = Model(step_s=0.1, cpu_s=0.0, wait_s=0.043, totals=model.totals)
    numbers, _ = run(tuner, quick, WINDOWS_BEFORE_FEWER + 2)
    assert numbers[-1] == 1


def test_workers_elsewhere_are_not_bounded_by_these_cores():
    """On a cluster, the largest number is the only bound."""
    model = Model(step_s=0.01, cpu_s=0.1, cores=64)
    _, decisions = run(Tuner(2, 32, math.inf), model, 3)
    assert [each.num_workers for each in decisions] == [11]


def test_it_waits_for_enough_batches():
    """A second with two batches says little; five seconds with four have to do."""
    tuner = Tuner(2, 8, 2.0)
    assert tuner.decide(Totals(*[0] * 9)) is None
    slow = Totals(2.0, 1.9, 2, 0.1, 2, 4.0, 0.1, 0.0, 0.1)
    assert tuner.decide(slow) is None
    slow = Totals(6.0, 5.9, 6, 0.1, 6, 12.0, 0.1, 0.0, 0.1)
    decision = tuner.decide(slow)
    assert decision is not None
    assert decision.num_workers == 8


@pytest.mark.parametrize(
    ("cpu_s", "wait_s", "expected"),
    [
        pytest.param(0.001, 0.1, 8, id="waits"),
        pytest.param(0.1, 0.0, 2, id="cpu"),
        pytest.param(0.05, 0.05, 4, id="both"),
    ],
)
def test_without_a_trainer_only_cores_and_the_limit_count(cpu_s, wait_s, expected):
    """Inputs of a run: as many workers as the cores keep busy, and no decision to undo."""
    model = Model(step_s=1e-9, cpu_s=cpu_s, wait_s=wait_s)
    tuner, numbers, decisions = Tuner(2, 8, 2.0, "inputs"), [], []
    tuner.decide(model.totals)
    for _ in range(20):
        totals = model.run(tuner.num_workers, 1.0)
        decision = tuner.decide(totals._replace(steps=0, steps_s=0.0, waited_s=totals.at))
        decisions += [decision] if decision else []
        numbers.append(tuner.num_workers)
    assert numbers[-1] == expected
    assert len(decisions) == (expected != 2)
    assert all(each.reason.startswith("inputs take") for each in decisions)


def test_a_look_at_two_loads_at_once_is_not_acted_on():
    """The load changes between two looks: a growth judged by their mean would be undone."""
    tuner, before = Tuner(2, 8, 2.0), Model(step_s=0.005, cpu_s=0.02)
    run(tuner, before, 3)
    after = Model(step_s=0.005, cpu_s=0.01, wait_s=0.03, totals=before.run(2, 0.8))
    tuner.decide(after.run(2, 0.2))  # mostly the old load
    numbers, decisions = run(tuner, after, 6)
    assert numbers[-1] == 8
    assert not any("more do not help" in each.reason for each in decisions)


@given(
    st.integers(1, 8),
    st.lists(
        st.tuples(
            st.floats(0.0, 3.0),  # seconds of waiting in each window
            st.integers(40, 200),  # steps in it
            st.floats(0.001, 0.2),  # of a step
            st.floats(0.0005, 0.5),  # of a batch
            st.floats(0.0, 1.0),  # of that, on a core
        ),
        min_size=2,
        max_size=12,
    ),
)
def test_no_decision_contradicts_its_numbers(start, windows):
    """More workers only where batches need them or keep half of them busy; fewer only if enough."""
    tuner, was, rates = Tuner(start, 16, 4.0), Totals(*[0] * 9), {}
    tuner.decide(was)
    for waited_s, steps, step_s, batch_s, cpu in windows:
        seconds, present = max(waited_s + steps * step_s, 5.0), tuner.num_workers
        now = Totals(
            was.at + seconds,
            was.waited_s + waited_s,
            was.steps + steps,
            was.steps_s + steps * step_s,
            was.made + steps,
            was.made_s + steps * batch_s,
            was.cpu_s + steps * batch_s * cpu,
            was.queued_s,
            was.trainer_cpu_s,
        )
        decision, was, rate = tuner.decide(now), now, steps / seconds
        rates.setdefault(present, []).append(rate)
        if decision is None:
            continue
        needed, busy = batch_s / step_s, steps * batch_s / (seconds * present)
        if decision.num_workers > present:
            assert needed * HEADROOM * (1 + 1e-9) > present or busy >= HALF_BUSY
            assert waited_s > 0.0
        elif "more do not help" in decision.reason:
            assert rate < max(rates[decision.num_workers]) * HELPED
        else:
            assert needed <= decision.num_workers
            assert busy < BUSY


def test_idle_workers_do_not_even_out_batches():
    """Of batches that take a hundredth of a step, more workers make no more."""
    tuner, was = Tuner(2, 8, 4.0), Totals(*[0] * 9)
    tuner.decide(was)
    for number in range(1, 5):
        seconds, steps = number * 10.0, number * 70
        times = (seconds, seconds * 0.07, steps, steps * 0.133, steps, steps * 0.00131)
        assert tuner.decide(Totals(*times, 0.0, 0.0, 0.0)) is None
