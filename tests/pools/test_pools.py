"""Every pool against the one conformance suite, and what is particular to each."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from forebay.errors import OptionError
from forebay.pools.base import InlinePool, Pool, ThreadPool
from forebay.pools.events import Assignment, Job, TaskFinished, WorkerDied, WorkerStarted
from forebay.pools.processes import ProcessPool
from kit.conformance import PoolTests
from kit.faults import FaultyJob, Gate


class TestInline(PoolTests):
    """The caller's own thread."""

    survives_death = False
    can_kill = False

    def make_pool(self, job: Job) -> Pool:
        return InlinePool(job)


class TestThreads(PoolTests):
    """Threads of this process."""

    survives_death = False

    def make_pool(self, job: Job) -> Pool:
        return ThreadPool(job)

    @pytest.mark.skip(reason="a thread that hangs for ever would stay for the other tests")
    def test_a_worker_that_hangs_can_be_killed(self) -> None:
        """Covered by the stack of a hang, which ends by its gate."""


class TestProcesses(PoolTests):
    """Processes, forked from a zygote that is forked from here."""

    def make_pool(self, job: Job) -> Pool:
        return ProcessPool(job, 2)

    def test_the_zygotes_death_blames_no_task_and_is_repaired(self) -> None:
        """The workers of a killed zygote die; no task is blamed, and the next start works."""
        with self.running(workers=2) as pool:
            assert isinstance(pool, ProcessPool)
            assert pool._zygote is not None
            os.kill(pool._zygote.pid, signal.SIGKILL)
            deaths = self.collect(pool, lambda heard: len(heard) == 2)
            assert all(isinstance(event, WorkerDied) and event.external for event in deaths)
            pool.start(2, worker_id=0)
            assert self.collect(pool) == [WorkerStarted(2)]
            pool.send(2, [Assignment(0, 1, "x")])
            assert isinstance(self.collect(pool)[0], TaskFinished)

    def test_nothing_is_kept_of_a_stopped_worker(self) -> None:
        """Its number and its exit code would pile up where the number of workers changes often."""
        with self.running(workers=2) as pool:
            assert isinstance(pool, ProcessPool)
            pool.stop(1)
            self.until(pool, lambda: set(pool.pids) == {0})
            assert (pool.exit_codes, pool.hosts(0), pool.hosts(1)) == ({}, True, False)

    def test_closing_kills_a_stopped_worker_that_does_not_end(self, tmp_path: Path) -> None:
        """The user's code may hang where the job is closed; only that worker is affected."""
        gate = Gate(tmp_path)
        with self.running(_HangsInClose(gate), workers=2) as pool:
            pool.stop(1)
            gate.wait_reached()
            pool.send(0, [Assignment(0, 1, "x")])
            assert isinstance(self.collect(pool)[0], TaskFinished)
        # the autouse leak check fails if the worker is still there

    def test_the_zygotes_death_ends_stopped_workers(self, tmp_path: Path) -> None:
        """Only the death of the worker that was not stopped is reported."""
        gate = Gate(tmp_path)
        with self.running(_HangsInClose(gate), workers=2) as pool:
            assert isinstance(pool, ProcessPool)
            pool.stop(1)
            gate.wait_reached()
            assert pool._zygote is not None
            os.kill(pool._zygote.pid, signal.SIGKILL)
            (death,) = self.collect(pool, self.died)
            assert isinstance(death, WorkerDied) and death.incarnation == 0
            assert not pool.hosts(1)

    def test_what_a_killed_worker_has_started_dies_with_it(self, tmp_path: Path) -> None:
        """A kill reaches the programs that the user's function runs."""
        gate = Gate(tmp_path)
        with self.running(_StartsAProgram(gate)) as pool:
            pool.send(0, [Assignment(0, 1, None)])
            gate.wait_reached()
            pool.kill(0)
            self.collect(pool, self.died)
        # the autouse leak check fails if the program is still there

    def test_too_few_descriptors_are_noticed_at_once(self) -> None:
        """Before anything starts, with the numbers."""
        with pytest.raises(OptionError, match="num_workers=10000000 needs about 20000048 open"):
            ProcessPool(FaultyJob(), 10_000_000)


class TestProcessesOfAThreadedDriver(PoolTests):
    """Processes, where forking this process would not be safe."""

    @pytest.fixture(autouse=True)
    def another_thread(self) -> object:
        """Keep a second thread alive, which rules a fork out."""
        over = threading.Event()
        thread = threading.Thread(target=over.wait)
        thread.start()
        yield
        over.set()
        thread.join()

    def make_pool(self, job: Job) -> Pool:
        return ProcessPool(job, 2)


class TestProcessesOfAJobThatCannotBePickled(PoolTests):
    """Processes, forked from a zygote that is forked from here, with the job as it is."""

    pytestmark = pytest.mark.full  # the other two classes show what a zygote does

    def make_pool(self, job: Job) -> Pool:
        job.lock = threading.Lock()  # type: ignore[attr-defined]
        return ProcessPool(job, 2)


def _load_nowhere(pid: int) -> FaultyJob:
    raise RuntimeError(f"only process {pid} has this job")


def _reduce(job: FaultyJob) -> tuple[object, ...]:
    return _load_nowhere, (os.getpid(),)


class TestProcessesOfAJobThatCannotBeLoaded(TestProcessesOfAThreadedDriver):
    """A new interpreter gives up, and a zygote that is forked from here takes its place."""

    pytestmark = pytest.mark.full

    def make_pool(self, job: Job) -> Pool:
        job.__class__ = type("OnlyHere", (type(job),), {"__reduce__": _reduce})
        return ProcessPool(job, 2)


class _HangsInClose(FaultyJob):
    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self._gate = gate

    def close(self) -> None:
        self._gate.wait()


class _StartsAProgram:
    keeps_tasks = False

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def open(self, incarnation: int, worker_id: int) -> None:
        pass

    def run(self, assignment: Assignment) -> object:
        with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"]):
            self._gate.wait()
        raise AssertionError("not reached")

    def close(self) -> None:
        pass
