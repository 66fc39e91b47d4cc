"""The record of what a loader does: bounded in size, exact in its totals."""

from __future__ import annotations

import pickle

import pytest

from forebay.observe import record as tracing
from forebay.observe.measurements import SlowSample
from forebay.observe.record import FINEST_S, KEPT, KEPT_SLOWEST, MAX_SPANS, MAX_STEPS_AT_ONCE, Trace
from timings import timing


@pytest.fixture
def trace(monkeypatch):
    """A trace that began at 0."""
    monkeypatch.setattr(tracing.time, "perf_counter", lambda: 0.0)
    return Trace()


def made(trace, at, seconds=0.5, worker_id=0, **spent):
    """Record one batch."""
    trace.made(timing(worker_id, at, seconds, **spent), 100)


def test_steps_and_batches_are_kept_one_by_one(trace):
    """Each with the totals so far, so that any two of them give the sums in between."""
    for number in range(10):
        made(trace, number + 0.5, worker_id=number % 2, cpu_s=0.2, queued_s=0.1)
        trace.taken(number + 0.4, 0.1, ready=3)
    first, *_, last = trace.batches
    assert (first.made, last.made, last.nbytes) == (1, 10, 100)
    assert last.total_s == pytest.approx(5.0)
    assert last.total_cpu_s == pytest.approx(2.0)
    assert last.total_queued_s == pytest.approx(1.0)
    step = trace.steps[-1]
    assert (step.taken, step.ready, step.asked_at + step.waited_s) == (10, 3, 9.5)
    assert step.total_waited_s == trace.waited_s == pytest.approx(1.0)


def test_fast_batches_are_sampled_and_counted(trace):
    """Records have a least distance; totals and spans count every batch."""
    gap = FINEST_S / 10
    for number in range(1000):
        made(trace, number * gap, seconds=gap)
        trace.taken(number * gap, 0.0, ready=1)
    assert 90 <= len(trace.batches) <= 101
    assert 18 <= len(trace.steps) <= 21
    assert (trace.made_count, trace.taken_count) == (1000, 1000)
    assert trace.batches[-1].made > 980
    assert sum(span.made for span in trace.spans) == trace.batches[-1].made
    assert sum(span.taken for span in trace.spans) == trace.steps[-1].taken


@pytest.mark.slow
def test_a_week_takes_no_more_memory_than_a_minute(trace):
    """Of 10,000 steps of 100 s each: each part of the record is bounded."""
    for number in range(0, 1_000_000, 100):
        at = float(number)
        slow = SlowSample(1.0 + number, number, 0, number)
        made(trace, at, worker_id=number % 8, slowest=slow)
        trace.taken(at, 0.25, ready=number % 7)
        trace.began_epoch(number, at, 0.0)
    assert len(trace.steps) == len(trace.batches) == KEPT
    assert MAX_SPANS // 2 <= len(trace.spans) <= MAX_SPANS
    assert len(list(trace.slowest)) == KEPT_SLOWEST
    assert [each.index for each in list(trace.slowest)[:2]] == [999_900, 999_800]
    assert len(pickle.dumps(list(trace.spans))) + len(pickle.dumps(list(trace.steps))) < 1_000_000
    assert sum(span.taken for span in trace.spans) == 10_000
    assert sum(span.waited_s for span in trace.spans) == pytest.approx(2_500)
    assert sum(sum(span.busy_s.values()) for span in trace.spans) == pytest.approx(5_000)
    assert sum(trace.wait_bins) == 10_000


def test_an_epoch_begins_with_a_wait(trace):
    """What `iter(loader)` takes counts as a wait; the time between two epochs does not."""
    trace.began_epoch(0, 1.0, 0.5)
    trace.taken(1.5, 0.25, ready=0)
    trace.taken(3.0, 0.0, ready=1)
    trace.began_epoch(1, 100.0, 0.0)
    trace.taken(100.0, 0.0, ready=1)
    first, second, third = trace.steps
    assert (first.asked_at, first.waited_s, first.is_first) == (1.0, 0.75, True)
    assert not second.is_first
    assert third.is_first
    assert trace.waited_s == 0.75
    assert (trace.step_count, trace.steps_s) == (1, pytest.approx(1.25))
    assert list(trace.epochs) == [(0, 1.0), (1, 100.0)]


def test_waits_are_counted_by_their_length(trace):
    """Bin `k` has those below 2**k microseconds; steps without a wait are in none."""
    for number, waited_s in enumerate((0.0, 1e-6, 5e-6, 1.1, 1e9)):
        trace.taken(float(number), waited_s, ready=0)
    found = {place: count for place, count in enumerate(trace.wait_bins) if count}
    assert found == {1: 1, 3: 1, 21: 1, 50: 1}


def test_the_spans_show_the_buffer_and_its_workers(trace):
    """How few and how many batches were ready, and which worker was busy for how long."""
    trace.num_workers, trace.held_bytes = 2, 1000
    trace.taken(0.01, 0.0, ready=5)
    trace.taken(0.02, 0.0, ready=2)
    made(trace, 0.03, seconds=0.02, worker_id=1)
    trace.restarted()
    (span,) = trace.spans
    assert (span.least_ready, span.most_ready, span.restarts) == (2, 5, 1)
    assert (span.num_workers, span.held_bytes, span.busy_s) == (2, 1000, {1: 0.02})


def test_a_timing_covers_the_batches_before_it(trace):
    """A worker sends one of several timings where batches are tiny, with their sums."""
    one = timing(0, 1.0, 0.0001)
    trace.made(one._replace(batches=50, busy_s=0.005, fetch_s=0.004), 100)
    assert (trace.made_count, trace.made_s, trace.fetch_s) == (50, 0.005, 0.004)
    (record,) = trace.batches
    assert (record.made, record.seconds, record.total_s) == (50, 0.0001, 0.005)


def test_tiny_steps_without_a_wait_share_a_reading_of_the_clock(trace, monkeypatch):
    """All are counted at any time, and their time is that of the trainer; then one takes long."""
    readings, now = [], [0.0]

    def clock():
        readings.append(now[0])
        return now[0]

    monkeypatch.setattr(tracing.time, "perf_counter", clock)
    trace.began_epoch(0, 0.0, 0.0)
    for number in range(1, 2001):
        now[0] += 5e-5
        trace.taken_at_once(3)
        assert trace.taken_count == number
    assert len(readings) < 2000 / MAX_STEPS_AT_ONCE + 10
    now[0] += 1.0
    trace.taken(now[0], 0.5, 0)
    trace.taken(now[0] + 0.5, 0.0, 1)
    assert trace.steps_s == pytest.approx(2000 * 5e-5 + 1.0, rel=0.01)
    assert (trace.taken_count, trace.step_count) == (2002, 2001)
    assert sum(trace.waits) == trace.waited_s == 0.5
    assert len(trace.waits) == 2002


def test_a_slow_step_ends_a_group(trace, monkeypatch):
    """Steps that are not tiny are timed one by one."""
    now = [0.0]
    monkeypatch.setattr(tracing.time, "perf_counter", lambda: now[0])
    for step_s in (5e-5,) * 200 + (0.01,) * 50:
        now[0] += step_s
        trace.taken_at_once(3)
    assert [each.taken for each in trace.steps][-30:] == list(range(221, 251))
