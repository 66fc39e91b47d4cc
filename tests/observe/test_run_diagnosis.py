"""What a run of preprocess waited for: from made-up sums, and from real runs."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace

import pytest
import torch
from computing import compute_in_threads
from test_diagnosis import trace_of, workers

import forebay
from forebay.observe.measurements import RunTimes
from forebay.observe.record import Trace
from forebay.observe.run_diagnosis import diagnose_run

# On Python 3.12 and newer, a fork beside threads is warned of.
pytestmark = [
    pytest.mark.usefixtures("forked_workers"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]


BUSY = RunTimes(
    inputs=1000,
    committed=1000,
    elapsed_s=10.0,
    num_workers=4,
    busy_s=39.0,
    cpu_s=38.0,
    flush_s=0.5,
    record_s=0.5,
    cores=4.0,
)


@pytest.mark.parametrize(
    ("times", "cause", "words"),
    [
        ({}, "cpu", "used 3.8 of 4 cores"),
        ({}, "cpu", "no number of workers helps. Spend less on each input"),
        (
            {"threads_s": 19.0, "queued_s": 19.0},
            "cpu",
            "4 cores: libraries compute in threads of their own, for 50% of the processor time",
        ),
        ({"threads_s": 19.0, "queued_s": 19.0}, "cpu", "start no threads in the function."),
        ({"threads_s": 15.0, "queued_s": 20.0, "cpu_s": 25.0}, "cpu", "2.5 of 4 cores: libraries"),
        # One thread each that the worker waits for, as Arrow's, is none beyond the cores.
        ({"threads_s": 19.0}, "cpu", "no number of workers helps. Spend less on each input"),
        ({"threads_s": 10.0, "queued_s": 1.0}, "cpu", "no number of workers helps. Spend less"),
        (
            {"queued_s": 20.0, "cpu_s": 16.0},
            "contention",
            "used 1.6 of 4 cores, and waited for a core for 51% of their work: other programs",
        ),
        ({"queued_s": 30.0, "cpu_s": 16.0, "threads_s": 8.0}, "cpu", "for 50% of the processor"),
        ({"queued_s": 20.0, "cpu_s": 16.0, "threads_s": 8.0}, "contention", "51% of their work"),
        ({"queued_s": 6.0, "cpu_s": 3.0}, "storage", "for 77% of their work"),
        (
            {"system_s": 30.0, "faults": 5_000_000},
            "cpu",
            "The system takes 79% of the workers' processor time, 30 s in all, for 5,000,000 page",
        ),
        ({"system_s": 30.0, "faults": 5_000_000, "keeps_freed": False}, "cpu", "are processes:"),
        ({"system_s": 30.0}, "cpu", "for calls such as reading and opening files"),
        ({"cores": 8.0}, "workers", "Use num_workers=8"),
        ({"cores": 5.5}, "workers", "used 3.8 of 5.5 cores. Use num_workers=6"),
        ({"cpu_s": 3.0}, "storage", "for 92% of their work"),
        ({"cpu_s": 25.0}, "healthy", "used 2.5 of 4 cores"),
        ({"cpu_s": None}, "healthy", "more of them"),
        (
            {"busy_s": 16.0, "flush_s": 7.0},
            "storage",
            "Workers were idle 60% of the time, and flushing outputs took 70%",
        ),
        ({"busy_s": 16.0, "record_s": 7.0}, "consumer", "recording results"),
        ({"busy_s": 16.0}, "unknown", "neither the disk nor"),
        ({"inputs": 19}, "unknown", "too little"),
        ({"elapsed_s": 0.5, "busy_s": 2.0}, "unknown", "too little"),
    ],
)
def test_the_sums_of_a_run_show_its_cause(times, cause, words):
    """By what the workers did, and else by what they waited for."""
    found = diagnose_run(replace(BUSY, **times))
    assert (found.cause, found.advice, found.expected_rate) == (cause, {}, None)
    assert words in str(found)


def sleepy(path, out):
    """Wait for a disk, as it were."""
    time.sleep(0.03)
    return {"n": 1}


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [{}, {"backend": "thread"}], ids=repr)
def test_a_real_run_reports_what_it_waited_for(arguments, tmp_path):
    """Workers that sleep use hardly any processor time, and are busy all the time."""
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    for number in range(80):
        (inputs / f"{number}.txt").write_text("x")
    report = forebay.preprocess(
        sleepy, inputs, tmp_path / "outputs", num_workers=2, progress=False, **arguments
    )
    found = report.diagnosis
    assert found.evidence["inputs"] == 80
    assert found.evidence["busy_s"] > 80 * 0.03
    assert found.evidence["cpu_s"] > 0
    assert found.rate > 0
    again = forebay.preprocess(
        sleepy, inputs, tmp_path / "outputs", num_workers=2, progress=False, **arguments
    )
    assert again.diagnosis.cause == "unknown"


def threaded(path, out):
    """Compute in two more threads, as a library would."""

    compute_in_threads(0.02)


@pytest.mark.full  # as in test_diagnosis.py
@pytest.mark.slow
def test_processor_time_of_other_threads_is_measured(tmp_path):
    """In the workers, while they live; what the system did, when they have ended."""
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    for number in range(40):
        (inputs / f"{number}.txt").write_text("x")
    report = forebay.preprocess(
        threaded, inputs, tmp_path / "outputs", num_workers=1, progress=False
    )
    evidence = report.diagnosis.evidence
    # The rest is the worker's start, which takes the longer the busier the machine is.
    assert 0.0 < evidence["threads_s"] < evidence["cpu_s"]
    assert evidence["queued_s"] > 0.0
    assert 0.0 < evidence["system_s"] < evidence["cpu_s"]
    assert evidence["faults"] > 0


class Slow(torch.utils.data.Dataset):
    """Samples that wait for their storage."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        time.sleep(0.03)
        return torch.tensor([float(index)])


def test_predict_says_what_the_model_waited_for(tmp_path, monkeypatch):
    """In the words of predict: no step of a training, and nothing to say where nothing was left."""
    traces = []

    class KeptTrace(Trace):
        def __init__(self):
            super().__init__()
            traces.append(self)

    monkeypatch.setattr("forebay.predicting.predict.Trace", KeptTrace)
    report = forebay.predict(
        torch.nn.Identity(), Slow(), tmp_path, batch_size=1, num_workers=1, progress=False
    )
    (trace,) = traces
    assert (trace.taken_count, trace.made_count) == (40, 40)
    assert trace.steps
    # What a busy machine measured may be anything: the times are those of one that is not.
    trace.steps, trace.batches = map(deque, trace_of([0.001] * 40, workers(1), 0.03))
    found = report.diagnosis
    assert found.cause == "storage"
    assert found.wait_share > 0.9
    assert str(found).startswith("The model waits ")
    assert "raining" not in str(found)
    again = forebay.predict(
        torch.nn.Identity(), Slow(), tmp_path, batch_size=1, num_workers=1, progress=False
    )
    assert again.diagnosis.cause == "unknown"


def identity():
    """Return a model; a factory for each worker."""
    return torch.nn.Identity()


@pytest.mark.slow
def test_predict_with_a_factory_has_the_diagnosis_of_its_workers(tmp_path):
    """Each makes whole parts, of which there are few here."""
    report = forebay.predict(identity, Slow(), tmp_path, num_workers=1, progress=False)
    assert report.diagnosis.cause == "unknown"
    assert report.done == len(Slow())
