"""`num_workers="auto"` of preprocess and cache: what is measured, and what is decided."""

from __future__ import annotations

import os
import time

import pytest

import forebay
from forebay.base.machine import ProcessTimes
from forebay.observe.progress import LONG_S, RunTrace
from forebay.options import AutoWorkers, PreprocessOptions
from forebay.runs.tuning import EVERY_S, RunTuning


def use_processor(seconds):
    """Use that much processor time, however long it takes."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_processor_time_counts_from_the_first_decision():
    """What a process did before is its start; the clock ticks every 10 ms."""
    times = ProcessTimes()
    times.add([os.getpid()])
    assert times.cpu_s == 0
    use_processor(0.2)
    times.add([os.getpid()])
    assert times.cpu_s >= 0.18
    assert times.queued_s >= 0


def test_a_process_that_has_ended_counts_no_more():
    """Its ID may be another process's by the next look."""
    times = ProcessTimes()
    times.add([os.getpid(), 2**22 + 1])
    times.add([2**22 + 1])
    use_processor(0.1)
    times.add([os.getpid()])
    assert times.cpu_s == 0


@pytest.fixture
def tuning(monkeypatch):
    """Return a tuning that starts with one worker, of which there may be six."""
    monkeypatch.setattr("forebay.runs.tuning.whole_cores", lambda: 1)
    return RunTuning(6, ProcessTimes(), 0.0)


def test_nothing_is_decided_before_an_input_is_done(tuning):
    """The workers may still be starting."""
    for second in range(30):
        tuning.update(float(second), RunTrace(), pytest.fail)


def test_inputs_that_wait_get_more_workers_at_once(tuning):
    """To the limit, with the reason; the processor is not used."""
    numbers, trace = [], RunTrace()
    for second in range(3):
        for task in range(10):
            trace.took([(task, 0.1)])
        tuning.update(second * EVERY_S * 1.01, trace, numbers.append)
    assert numbers == [6]
    assert list(tuning.decisions) == [
        "inputs take 100 ms of a worker each, and 0 s of that on a core, so there are 6 workers "
        "instead of 1"
    ]

    assert tuning.mean_workers(1000.0) == 6


def test_what_is_published_is_the_present_state():
    """A new number of workers, and what ended before a publication was due; no state twice."""
    published, trace = [], RunTrace()
    at = trace.began_at
    trace.publish_from(
        at, lambda: lambda record: published.append((record.done, record.num_workers))
    )
    trace.num_workers = 4
    trace.publish(at)
    trace.num_workers = 2
    trace.publish(at + 0.5)
    assert published == [(0, 4)]
    trace.publish(at + 1.5)
    trace.publish(at + 9.0)
    assert published == [(0, 4), (0, 2)]


def test_a_task_that_runs_for_long_is_published_every_second():
    """Its name and when it began; the rate falls meanwhile."""
    published, trace = [], RunTrace()
    at = trace.began_at
    trace.publish_from(at, lambda: lambda record: published.append(record.longest))
    trace.longest_task = lambda: ("a.wav", at)
    for seconds in (0, LONG_S - 1, LONG_S, LONG_S + 0.5, LONG_S + 1):
        trace.publish(at + seconds)
    trace.longest_task = lambda: None
    trace.publish(at + LONG_S + 2)
    assert published == [None, ("a.wav", at), ("a.wav", at), None]


def test_a_cluster_has_as_many_as_there_is_room_for():
    """As without a number; a limit of the user's stays one."""

    def workers(num_workers, backend):
        return PreprocessOptions(num_workers=num_workers, backend=backend).num_workers

    assert workers("auto", "ray") is None
    assert workers(AutoWorkers(max=3), "ray") == 3
    assert isinstance(workers("auto", "process"), AutoWorkers)
    assert workers(None, "process") is None


def test_other_strings_are_refused():
    """Only one of them is a number of workers."""
    with pytest.raises(forebay.OptionError, match="num_workers='many' is not valid"):
        PreprocessOptions(num_workers="many")
    with pytest.raises(forebay.OptionError, match="num_workers='2' is not valid; it must be 0, 1"):
        forebay.DataLoader([1], num_workers="2")
