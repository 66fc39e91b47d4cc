"""The zygote: blocked signals, SIGSTOP, hangs, limits, and what a worker's function starts."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

import forebay
from forebay.errors import WorkerDiedError
from forebay.pools import pickling, processes, zygote, zygote_handle
from forebay.pools.base import Pool
from forebay.pools.events import Answer, Assignment, Job, TaskFinished, WorkerDied, WorkerStarted
from forebay.pools.processes import ProcessPool
from kit.conformance import PATIENCE_S, PoolTests
from kit.faults import FaultyJob, Gate, hang

SOURCE = str(Path(forebay.__file__).parents[1])
BLOCKED = {signal.SIGCHLD, signal.SIGUSR1, signal.SIGTERM, signal.SIGINT}


class Calls:
    """A job whose payloads are functions, called with nothing."""

    keeps_tasks = False

    def open(self, incarnation, worker_id):
        pass

    def run(self, assignment):
        return Answer(assignment.payload(), 1)

    def close(self):
        pass


def blocked_signals():
    return set(signal.pthread_sigmask(signal.SIG_BLOCK, ()))


def start_in_a_session():
    """Start a program in a session of its own; return its process id."""
    command = [sys.executable, "-c", "import time; time.sleep(3600)"]
    return subprocess.Popen(command, start_new_session=True).pid


def start_daemon():
    """Start a program as daemons start: its parent ends at once."""
    done = subprocess.run(
        ["sh", "-c", "setsid sleep 3600 >/dev/null 2>&1 & echo $!"], capture_output=True
    )
    return int(done.stdout)


def start_in_a_session_and_hang(path):
    Path(path).write_text(str(start_in_a_session()))
    hang()


def start_in_a_session_and_die(path):
    Path(path).write_text(str(start_in_a_session()))
    os.kill(os.getpid(), signal.SIGKILL)


class Call:
    """A function with an argument, which pickles by its name."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __call__(self):
        return self.function(*self.arguments)


def is_there(pid):
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat.rpartition(b")")[2].split()[0] not in b"ZX"


def until(is_so):
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def stop(pid):
    """Stop a child of this process, and wait until it is stopped."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


class TestProcessesOfADriverThatBlocksSignals(PoolTests):
    """Workers come and go as ever, whatever signals the caller has blocked."""

    @pytest.fixture(autouse=True)
    def blocked(self) -> object:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
        yield
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def make_pool(self, job: Job) -> Pool:
        return ProcessPool(job, 2, "fork")


class Zygotes(PoolTests):
    """Tools of the tests below; its name keeps pytest from running the tests of every pool."""

    start = "fork"

    def make_pool(self, job: Job) -> Pool:
        return ProcessPool(job, 2, self.start)

    def result(self, pool, function, incarnation=0):
        pool.send(incarnation, [Assignment(0, 1, function)])
        (event,) = self.collect(pool)
        assert isinstance(event, TaskFinished), event
        return event.result


tools = Zygotes()


@pytest.fixture
def impatient(monkeypatch):
    """Look after a silent zygote much sooner."""
    monkeypatch.setattr(zygote_handle, "CHECK_S", 0.02)
    monkeypatch.setattr(processes, "CHECK_S", 0.02)


@pytest.mark.parametrize("start", ["fork", "auto"])
def test_a_worker_blocks_no_signal_although_its_driver_does(start):
    """As the programs that a function starts expect it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
    over = threading.Event()
    thread = threading.Thread(target=over.wait)  # a new interpreter inherits the mask too
    thread.start()
    try:
        tools.start = start
        with tools.running(Calls()) as pool:
            assert tools.result(pool, blocked_signals) == set()
    finally:
        tools.start = "fork"
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        over.set()
        thread.join()


# ---- a zygote that is stopped, or hangs ---------------------------------------------------------


def test_a_stopped_zygote_is_continued_by_the_order_to_kill(tmp_path):
    """A worker that hangs is killed in time although its zygote was stopped."""
    gate = Gate(tmp_path)
    with tools.running() as pool:
        pool.send(0, [Assignment(0, 1, ("gate", gate))])
        gate.wait_reached()
        stop(pool._zygote.pid)
        pool.kill(0)
        (death,) = tools.collect(pool, tools.died)
    assert isinstance(death, WorkerDied) and not death.external
    assert "in wait" in death.failure.traceback


def test_a_death_is_told_although_the_zygote_was_stopped(impatient):
    """The end of a worker's channel shows that the zygote owes a report."""
    with tools.running() as pool:
        stop(pool._zygote.pid)
        os.kill(pool.pids[0], signal.SIGKILL)
        (death,) = tools.collect(pool, tools.died)
    assert isinstance(death, WorkerDied)
    assert "SIGKILL" in death.failure.message


def test_a_zygote_that_does_not_answer_is_replaced(impatient, monkeypatch, tmp_path):
    """No task is blamed, and the next worker starts in another zygote."""
    execute, met = zygote._Zygote._execute_order, tmp_path / "met"

    def hang_at_the_first_kill(self):
        order = self._control.recv(zygote.ORDER.size, socket.MSG_PEEK)
        if order and zygote.ORDER.unpack(order)[0] == zygote.KILL and not met.exists():
            met.touch()
            hang()
        return execute(self)

    monkeypatch.setattr(zygote._Zygote, "_execute_order", hang_at_the_first_kill)
    with tools.running(workers=2) as pool:
        before = pool._zygote.pid
        pool.send(0, [Assignment(0, 1, "hang")])
        monkeypatch.setattr(zygote_handle, "ZYGOTE_S", 0.6)  # of one that answers to nothing
        pool.kill(0)
        deaths = tools.collect(pool, lambda heard: len(heard) == 2)
        assert all(isinstance(event, WorkerDied) and event.external for event in deaths)
        assert "did not answer for 0.6 s" in deaths[0].failure.message
        assert not is_there(before)
        monkeypatch.setattr(zygote_handle, "ZYGOTE_S", PATIENCE_S)
        pool.start(2, worker_id=0)
        assert tools.collect(pool) == [WorkerStarted(2)]
        pool.send(2, [Assignment(0, 1, "hang")])
        pool.kill(2)
        (death,) = tools.collect(pool, tools.died)
        assert not death.external


class Slow(FaultyJob):
    """A job that takes its time to be unpickled."""

    def __init__(self, gate):
        super().__init__()
        self.gate = gate

    def __setstate__(self, state):
        self.__dict__.update(state)
        self.gate.wait()


def test_a_zygote_may_import_for_as_long_as_that_takes(impatient, monkeypatch, tmp_path):
    """It owes its answers only once it has the job."""
    monkeypatch.setattr(zygote_handle, "ZYGOTE_S", 0.6)
    gate = Gate(tmp_path)
    pool = ProcessPool(pickling.dumps(Slow(gate)), 1)
    try:
        handle = pool._zygote
        pool.start(0, 0)
        while handle._silent_s < 2 * zygote_handle.ZYGOTE_S:
            assert pool.wait(None) == []
        gate.wait_reached()
        monkeypatch.setattr(zygote_handle, "ZYGOTE_S", PATIENCE_S)
        gate.open()
        assert tools.collect(pool) == [WorkerStarted(0)]
        assert pool._zygote is handle
    finally:
        pool.close()


def arguments():
    return list(sys.argv)


@pytest.mark.parametrize("start", ["auto", "fork"])
def test_workers_have_the_arguments_of_the_driver(monkeypatch, start):
    """In a fresh interpreter, which "auto" starts beside this thread, as in a fork."""
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "0.1"])
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        pool = ProcessPool(Calls(), 1, start)
        try:
            pool.start(0, 0)
            pool.send(0, [Assignment(0, 1, arguments)])
            events = []
            while not any(isinstance(event, TaskFinished) for event in events):
                events += pool.wait(PATIENCE_S)
        finally:
            pool.close()
    finally:
        done.set()
        thread.join()
    assert events[-1].result == ["train.py", "--lr", "0.1"]


# ---- what outlives whom -------------------------------------------------------------------------

DRIVER = """
import multiprocessing, sys, threading, time
from forebay.pools.events import TaskFinished
from forebay.pools.events import Assignment
from forebay.pools.processes import ProcessPool
from test_zygote import Calls, start_daemon, start_in_a_session

def make():
    global pool
    start = sys.argv[1]
    if start == "spawn":
        start = multiprocessing.get_context(start)
    pool = ProcessPool(Calls(), 1, "auto" if start == "thread" else start)
    pool.start(0, 0)

if __name__ == "__main__":
    if sys.argv[1] == "thread":
        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
    else:
        make()
    pool.send(0, [Assignment(0, 1, start_daemon), Assignment(1, 1, start_in_a_session)])
    events = []
    while sum(isinstance(event, TaskFinished) for event in events) < 2:
        events += pool.wait(None)
    started = [event.result for event in events if isinstance(event, TaskFinished)]
    print(pool._zygote.pid, pool.pids[0], *started, flush=True)
    time.sleep(3600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("start", ["fork", "auto", "thread", "spawn"])
def test_nothing_outlives_a_killed_driver(tmp_path, start, stopped):
    """Neither a stopped zygote, nor workers, nor daemons of theirs; whichever way they started."""
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    path = os.pathsep.join([SOURCE, *map(str, Path(__file__).parents[:2])])
    driver = subprocess.Popen(
        [sys.executable, script, start],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    try:
        pids = [int(word) for word in driver.stdout.readline().split()]
        assert len(pids) == 4 and all(map(is_there, pids))
        if stopped:
            os.kill(pids[0], signal.SIGSTOP)
            until(lambda: Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2][1] == "T")
    finally:
        driver.kill()
        driver.communicate()
    until(lambda: not any(map(is_there, pids)))


@pytest.mark.parametrize("start", [start_in_a_session, start_daemon])
def test_what_a_function_starts_does_not_outlive_the_pool(start):
    """In a session of its own, or as a daemon: it is dead when `close` returns."""
    with tools.running(Calls()) as pool:
        pid = tools.result(pool, start)
        assert is_there(pid)
    assert not is_there(pid)


def test_a_killed_worker_takes_sessions_of_its_children_along(tmp_path):
    """A retry does not meet what the attempt that hung has left."""
    path = tmp_path / "pid"
    with tools.running(Calls()) as pool:
        pool.send(0, [Assignment(0, 1, Call(start_in_a_session_and_hang, path))])
        until(lambda: path.exists() and path.read_text())
        pool.kill(0)
        tools.collect(pool, tools.died)
        until(lambda: not is_there(int(path.read_text())))


def test_a_daemon_outlives_a_worker_and_not_the_pool(tmp_path):
    """Of a worker that dies by itself the process group is killed; the rest is, at the end."""
    path = tmp_path / "pid"
    with tools.running(Calls(), workers=2) as pool:
        daemon = tools.result(pool, start_daemon, incarnation=1)
        pool.send(0, [Assignment(1, 1, Call(start_in_a_session_and_die, path))])
        tools.collect(pool, tools.died)
        own = int(path.read_text())
        assert is_there(daemon) and is_there(own)
    assert not is_there(daemon) and not is_there(own)


# ---- limits -------------------------------------------------------------------------------------


def test_a_worker_that_cannot_be_forked_is_an_error_in_words(monkeypatch):
    """The zygote says why, and lives on."""

    def refuse(name):
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(zygote, "memory_file", refuse)
    pool = ProcessPool(FaultyJob(), 1, "fork")
    try:
        pool.start(0, 0)
        (death,) = tools.collect(pool)
        assert "Resource temporarily unavailable" in death.failure.message
        assert death.failure.kind == "exception"  # so that the run ends with it
        assert not pool._zygote.ended
    finally:
        pool.close()


def test_a_zygote_that_cannot_be_forked_is_an_error_in_words(monkeypatch):
    """With the limits that may be the reason."""

    def refuse():
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(os, "fork", refuse)
    with pytest.raises(WorkerDiedError, match=r"cannot be started: .*temporarily") as caught:
        ProcessPool(FaultyJob(), 1, "fork")
    assert "ulimit -u" in str(caught.value)


@pytest.mark.parametrize("at", [1, 2, 3, 4], ids=["waking", "answers", "tasks", "results"])
def test_descriptors_that_run_out_are_an_error_in_words(monkeypatch, at):
    """Whichever pipe of a pool is the one too many; none of the others stays open."""
    make, driver, made = os.pipe, os.getpid(), itertools.count(1)

    def refuse():
        if os.getpid() == driver and next(made) == at:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return make()

    monkeypatch.setattr(os, "pipe", refuse)
    with pytest.raises(WorkerDiedError, match=r"cannot be started: .*open files") as caught:
        with closing(ProcessPool(FaultyJob(), 1)) as pool:
            pool.start(0, 0)
    assert "ulimit -n" in str(caught.value)


def test_ctrl_c_during_a_fork_is_not_lost():
    """Python drops what a handler raises in the functions that it calls behind a fork."""
    driver, armed, called = os.getpid(), [True], []

    def interrupt():
        if os.getpid() == driver and armed:
            armed.clear()
            signal.raise_signal(signal.SIGINT)
            called.append(True)

    os.register_at_fork(after_in_parent=interrupt)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        ProcessPool(FaultyJob(), 1, "fork")
    assert called  # it was not cut short
    assert signal.getsignal(signal.SIGINT) is handler
    with ProcessPoolOfOne() as pool:
        assert tools.collect(pool) == [WorkerStarted(0)]


@pytest.fixture
def no_temporary_files(monkeypatch, tmp_path):
    """A folder for temporary files that is not there, and a second thread."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    yield
    over.set()
    thread.join()


def no_files_in_memory(monkeypatch):
    """Have files in memory refused, and shared memory missing."""

    def refuse(name):
        raise PermissionError("seccomp")

    for way in ("_by_python", "_by_libc"):
        monkeypatch.setattr(f"forebay.base.process.{way}", refuse)
    monkeypatch.setattr("forebay.base.process._SHARED_MEMORY", "")


def test_workers_start_without_a_folder_for_temporary_files(no_temporary_files):
    """What a new interpreter is told lies in memory."""
    with ProcessPoolOfOne() as pool:
        assert tools.collect(pool) == [WorkerStarted(0)]


def test_without_any_room_for_temporary_files_the_error_is_in_words(
    no_temporary_files, monkeypatch
):
    """It names what to set."""
    no_files_in_memory(monkeypatch)
    with pytest.raises(WorkerDiedError, match="cannot be started") as caught:
        ProcessPool(FaultyJob(), 1)
    assert "TMPDIR" in str(caught.value)


class ProcessPoolOfOne:
    """A pool with one worker on its way."""

    def __enter__(self):
        self._pool = ProcessPool(FaultyJob(), 1)
        self._pool.start(0, 0)
        return self._pool

    def __exit__(self, *error):
        self._pool.close()


@pytest.mark.parametrize("start", ["auto", "fork"])
def test_the_kernel_kills_workers_first_when_memory_runs_out(start):
    """Then the process that forks them, and this one, the trainer, last."""

    def score(pid):
        return int(Path(f"/proc/{pid}/oom_score_adj").read_text())

    own = score("self")
    pool = ProcessPool(FaultyJob(), 1, start)
    try:
        pool.start(0, 0)
        tools.collect(pool)
        (worker,) = pool.living_pids()
        assert (score(worker), score(pool._zygote.pid), score("self")) == (1000, 999, own)
    finally:
        pool.close()
