"""The record of what a loader does: bounded in size, exact in its totals."""

from __future__ import annotations

import pickle

import pytest

from forebay.observe import record as tracing
from forebay.observe.measurements import SlowSample
from forebay.observe.record import KEPT, KEPT_SLOWEST, MAX_STEPS_AT_ONCE, Trace
from timings import timing


@pytest.fixture
def trace(monkeypatch):
    """A trace that began at 0."""
    monkeypatch.setattr(tracing.time, "perf_counter", lambda: 0.0)
    return Trace()


def made(trace, at, seconds=0.5, worker_id=0, **spent):
    """Record one batch."""
    trace.made(timing(worker_id, at, seconds, **spent), 100)


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
    assert len(list(trace.slowest)) == KEPT_SLOWEST
    assert [each.index for each in list(trace.slowest)[:2]] == [999_900, 999_800]
    assert len(pickle.dumps(list(trace.steps))) < 1_000_000
    assert (trace.taken_count, trace.waited_s) == (10_000, pytest.approx(2_500))
    assert sum(trace.busy_s.values()) == pytest.approx(5_000)
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
