"""`concurrency=`: several inputs at once in threads of each worker process."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path

import numpy
import pytest
from driving import here, make_inputs, published, staged, table

import forebay
from forebay import OptionError

# On Python 3.12 and newer, a fork beside threads is warned of.
pytestmark = [
    pytest.mark.usefixtures("forked_workers"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]


WAIT_S = 60.0
_meeting = threading.Barrier(4)


def run(work, inputs, output, **options):
    """Return the report of a run in one worker that processes four inputs at once."""
    options = {"num_workers": 1, "concurrency": 4, **options}
    return forebay.preprocess(work, inputs, output, progress=False, **options)


@pytest.fixture
def inputs(tmp_path):
    """Twelve inputs."""
    return make_inputs(tmp_path / "in", 12)


def meet(source: Path, out):
    """Wait for three others."""
    _meeting.wait(WAIT_S)
    (out / source.name).write_bytes(source.read_bytes())


def draw(source: Path, out):
    """Write two files that depend on random numbers, and a tar file."""
    out.file(f"{source.stem}/a").write_text(str(random.random()))
    out.file(f"{source.stem}.txt").write_text(f"{numpy.random.rand()} {random.random()}")
    with out.tar() as tar:
        tar.add(source.name, source.read_bytes())


@pytest.mark.slow
def test_inputs_are_processed_at_once_with_the_same_outputs(inputs, tmp_path):
    """Files, random numbers and the table are those of one at a time."""
    assert run(meet, inputs, tmp_path / "met").done == 12
    assert run(draw, inputs, tmp_path / "out").done == 12
    run(draw, inputs, tmp_path / "expected", concurrency=None)
    assert table(tmp_path / "out") == table(tmp_path / "expected")
    assert published(tmp_path / "out") == published(tmp_path / "expected")
    assert not staged(tmp_path / "out")


def fail(source: Path, out):
    """Fail, die or hang, as the input says."""
    fault = source.read_text()
    if fault == "raise":
        raise ValueError(f"no to {source.name}")
    if fault == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hang":
        threading.Event().wait()
    out.file(source.name).write_text(fault)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "kind"), [("raise", "exception"), ("die", "crash"), ("hang", "timeout")]
)
def test_only_the_input_at_fault_is_blamed(inputs, tmp_path, fault, kind):
    """Those that its worker had begun are processed again, and done."""
    (inputs / "0005.txt").write_text(fault)
    report = run(fail, inputs, tmp_path / "out", timeout=3, retries=0, num_workers=2)
    assert (report.done, report.failed) == (11, 1)
    [failure] = report.failures
    assert (Path(failure.source).name, failure.kind) == ("0005.txt", kind)
    assert len(published(tmp_path / "out")) == 11
    assert not staged(tmp_path / "out")


@pytest.mark.slow
def test_a_run_continues_with_another_concurrency(inputs, tmp_path):
    """It is no part of what the outputs depend on; the command line has it, too."""
    (inputs / "0005.txt").write_text("raise")
    run(fail, inputs, tmp_path / "out")
    (inputs / "0005.txt").write_text("fine")
    report = run(fail, inputs, tmp_path / "out", concurrency=2)
    assert (report.done, report.resumed) == (12, 11)


def test_a_trial_processes_one_at_a_time(inputs, tmp_path):
    """In this process, where an exception is that of the function."""
    (inputs / "0001.txt").write_text("raise")
    with pytest.raises(ValueError, match=r"no to 0001\.txt"):
        run(fail, inputs, tmp_path / "out", limit=3, num_workers=None)


@pytest.mark.parametrize("concurrency", [0, -1, 1.5, True, "4"])
def test_impossible_values_are_refused(inputs, tmp_path, concurrency):
    """At once, and nothing is made."""
    with pytest.raises(OptionError, match=r"concurrency=.* 1, 2, 3, … or None"):
        run(fail, inputs, tmp_path / "out", concurrency=concurrency)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [{"num_workers": 0}, {"backend": "thread"}], ids=str)
def test_without_worker_processes_it_is_refused(inputs, tmp_path, options):
    """Threads are workers of their own."""
    with pytest.raises(OptionError, match="is for worker processes"):
        run(fail, inputs, tmp_path / "out", **options)


def test_the_command_line_has_the_option():
    """As the function does."""
    assert "--concurrency" in here("preprocess", "--help")[1]
