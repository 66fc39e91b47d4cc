"""Limits of processes, threads and recursion: what works within them, and what is said."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from contextlib import closing

import pytest

from forebay.base import machine, process
from forebay.errors import WorkerDiedError
from forebay.pools.events import Answer, Assignment, TaskFinished, WorkerDied
from forebay.pools.processes import ProcessPool
from kit.control_groups import control_group


class Deep:
    """A job that calls itself as often as its payload says."""

    keeps_tasks = False

    def open(self, incarnation, worker_id):
        pass

    def run(self, assignment):
        return Answer(self.call(assignment.payload), 1)

    def call(self, calls):
        return self.call(calls - 1) + 1 if calls else 0

    def close(self):
        pass


def call_below(calls, function):
    return call_below(calls - 1, function) if calls else function()


def depth():
    frame, found = sys._getframe(1), 0
    while frame is not None:
        frame, found = frame.f_back, found + 1
    return found


def test_a_worker_forked_near_the_recursion_limit_has_all_of_it():
    """The calls of the process that it was forked from do not count."""
    limit = sys.getrecursionlimit()
    pool = call_below(limit - depth() - 60, lambda: ProcessPool(Deep(), 1, "fork"))
    with closing(pool):
        pool.start(0, 0)
        pool.send(0, [Assignment(0, 1, limit - 100)])
        events = []
        while not any(isinstance(each, TaskFinished | WorkerDied) for each in events):
            events += pool.wait(None)
    assert [each.result for each in events if isinstance(each, TaskFinished)] == [limit - 100]
    assert sys.getrecursionlimit() == limit


def test_a_thread_that_the_system_refuses_is_said_with_the_limits(monkeypatch):
    """The limits of threads are those of processes."""

    def refuse(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(WorkerDiedError, match="threads cannot be started") as caught:
        process.start_thread(threading.Thread(target=print))
    assert "ulimit -u" in str(caught.value)


def test_a_worker_that_cannot_be_forked_is_said_with_the_limits_of_groups(tmp_path, monkeypatch):
    """The number allowed in the fullest control group, and in use."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text("0::/job/step\n")
    (tmp_path / "job" / "step").mkdir(parents=True)
    for name, most, used in (("job", "20", "19"), ("job/step", "30", "2"), (".", "max", "300")):
        (tmp_path / name / "pids.max").write_text(f"{most}\n")
        (tmp_path / name / "pids.current").write_text(f"{used}\n")
    monkeypatch.setattr(machine, "PROC", tmp_path / "proc")
    monkeypatch.setattr(machine, "GROUPS", tmp_path)
    error = process.refused("worker processes", OSError(11, "not now"))
    assert "the control group, 20, of which 19 are in use (pids.max" in str(error)
    assert str(error).count("control group") == 1, "the fullest"


@pytest.fixture
def three_processes():
    """A real control group of three processes, as its file that takes processes."""
    with control_group("pids", ("pids.max",), 3) as processes:
        yield processes


PROGRAM = """
import os, sys
open(sys.argv[1], "w").write(str(os.getpid()))
import forebay
def work(source, out):
    return {"a": 1}
try:
    forebay.preprocess(work, [__file__], sys.argv[2], num_workers=1, progress=False)
except forebay.WorkerDiedError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_control_group_of_three_processes_is_said(three_processes, tmp_path):
    """In a real one, which is not the root."""
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, tmp_path / "program.py", three_processes, tmp_path / "out"]
    one = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=one)
    # They are counted after the refusal, when one of them may have ended.
    words = r"of the control group, 3, of which [123] are in use \(pids.max"
    assert re.search(words, run.stdout), run.stdout + run.stderr
