"""How the benchmarks of large datasets tell what fits into memory, and end a run that does not."""

from __future__ import annotations

import os

import benchmarks.watch
import pytest
from benchmarks.call import Call, own_processes
from benchmarks.large_objects import needed_mib
from benchmarks.watch import EndedError, available_mib, cpu_s, watched

pytestmark = pytest.mark.full


def test_needed_memory_grows_from_the_two_largest_sizes_measured():
    """100 MiB of libraries and three copies of the objects."""
    peaks = {64: 292.0, 256: 868.0, 16: 999.0}
    assert needed_mib(peaks, 2048) == pytest.approx(100 + 3 * 2048)


def test_needed_memory_after_one_size_is_in_proportion():
    """Too much rather than too little: libraries do not grow."""
    assert needed_mib({64: 292.0}, 256) == pytest.approx(4 * 292)


def test_nothing_is_known_of_the_first_size():
    """It is always run."""
    assert needed_mib({}, 64) == 0


def test_a_run_is_ended_before_the_machine_has_no_memory_left(monkeypatch: pytest.MonkeyPatch):
    """Whatever the run started ends with it."""
    monkeypatch.setattr(benchmarks.watch, "SPARE_MIB", available_mib() * 2)
    with Call("benchmarks.large_order", "forebay", "1000000000", "0", "start") as call:
        with pytest.raises(EndedError, match="no memory left"):
            watched(call, 60.0)
        assert call.left() == []


def test_a_run_ends_with_its_time_limit():
    """A run that hangs does not hold up the table."""
    with (
        Call("benchmarks.large_order", "forebay", "1000000000", "0", "start") as call,
        pytest.raises(EndedError, match="after 0 s"),
    ):
        watched(call, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["start", pytest.param("middle", marks=pytest.mark.thorough)])
def test_a_run_over_a_billion_samples_gives_its_figures(place: str):
    """Seconds, CPU seconds and memory, of a loader that is not made from a list."""
    with Call("benchmarks.large_order", "forebay", "1000000000", "0", place) as call:
        found = watched(call, 120.0)
    assert found["seconds"] > 0
    assert found["cpu_s"] > 0
    assert 0 < found["peak_mib"] < 2048


@pytest.mark.slow
def test_a_run_over_python_objects_gives_its_figures():
    """With workers, whose memory and CPU time count too."""
    with Call("benchmarks.large_objects", "forebay-fork", "4096") as call:
        found = watched(call, 120.0)
    assert set(found) == {"first_s", "rate", "cpu_ms", "before_mib", "peak_mib"}
    assert found["peak_mib"] > found["before_mib"] > 0


def test_a_call_knows_its_own_processes(monkeypatch: pytest.MonkeyPatch):
    """By the mark in the environment, which processes keep from their start."""
    monkeypatch.setenv("BENCHMARK_MARK", "none has this")
    assert own_processes() == []
    assert cpu_s([os.getpid()]) > 0
    assert cpu_s([]) == 0
