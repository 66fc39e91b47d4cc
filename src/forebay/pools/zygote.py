"""The zygote: a small, single-threaded process that forks the workers and monitors them.

    driver ──── start, kill, close ────> zygote ── fork ──> worker, worker, …
       ^  <─── ready, forked, exited, … ────┘                  │
       └──────────── one channel per worker ───────────────────┘

The driver may hold threads, locks and libraries that do not survive a fork; the zygote holds the
job and nothing else, so it can start a replacement for a dead worker safely and in milliseconds
(as long as importing the user's code starts no thread). The zygote is forked from the driver if
that is safe (`zygote_handle.py` says when), and is otherwise a new interpreter.

Guarantees: a worker's exit is reported once, with its status, its peak memory and the Python
stacks of a crash or hang. The process group of a worker dies with it; if a worker is killed
because it hangs, so are all its descendants. Other processes that workers started, in new sessions
or as daemons, are killed when the zygote ends, since it adopts their orphans. The zygote ends with
the driver, and by SIGTERM; with it ends all that it started. If it is killed, the kernel kills the
workers.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import NoReturn

from forebay.base.generator_search import freeze
from forebay.base.libraries import keep_freed, use_one_thread
from forebay.base.process import (
    OOM_AFTER_WORKERS,
    SENT_TO_ALL,
    adopt_orphans,
    become_worker,
    continue_when_driver_ends,
    die_when_memory_runs_out,
    die_with,
    leave_signals_to_program,
    memory_file,
    signals_held,
    watch_maker_of,
)
from forebay.failures import Failure
from forebay.pools.descendants import kill_descendants
from forebay.pools.events import Assignment, Event, Job, TaskFailed, TaskFinished
from forebay.pools.job_loading import load_job
from forebay.pools.worker import (
    Channel,
    as_sent,
    failure_of,
    flush_streams,
    portable,
    serve,
    without_our_frames,
)
from forebay.pools.worker_files import read_on_alone


def _wake(*_: object) -> None:
    """Do nothing: a signal that has a handler is written to the pipe that `serve` watches."""


# Orders from the driver, all of one size: what, incarnation, worker ID, seconds. "start" carries
# the worker's ends of its channel.
ORDER = struct.Struct("!BxxxIId")
START, KILL, CLOSE, STACKS = range(4)

# How long a worker that will be killed has to write its stacks, and how often it is given that time
# if it has not begun to: a busy machine may not have let it.
STACKS_S = 0.25
STACKS_WAITS = 4
# The end of the stacks that is kept: deep recursion makes long ones.
STACKS_BYTES = 16_384


class _Child:
    def __init__(self, incarnation: int, stacks: int) -> None:
        self.incarnation = incarnation
        self.stacks = stacks  # descriptor of the file that faulthandler writes to
        self.kill_at: float | None = None
        self.stacks_at: float | None = None  # when to read the stacks that it was asked for
        self.waits = 0  # for its stacks
        self._read = 0  # bytes of its stacks

    def take_due(self, now: float) -> bool:
        """Return, once, whether to kill it now; while it has written no stacks, give it time."""
        if self.kill_at is None or self.kill_at > now:
            return False
        self.waits += 1
        if self.waits < STACKS_WAITS and os.fstat(self.stacks).st_size == self._read:
            self.kill_at = now + STACKS_S
            return False
        self.kill_at = None
        return True

    def ask(self, pid: int, now: float) -> None:
        """Ask it for its stacks, unless the signal would end it."""
        self.waits = STACKS_WAITS
        if _catches(pid, signal.SIGUSR1):
            self.waits = 0
            os.kill(pid, signal.SIGUSR1)  # faulthandler writes them
        self.stacks_at = now + STACKS_S

    def take_stacks(self, now: float) -> str | None:
        """Return, once, the stacks that it was asked for; None while they are not there."""
        if self.stacks_at is None or self.stacks_at > now:
            return None
        self.waits += 1
        if self.waits < STACKS_WAITS and os.fstat(self.stacks).st_size == self._read:
            self.stacks_at = now + STACKS_S
            return None
        self.stacks_at = None
        return self.new_stacks()

    def new_stacks(self) -> str:
        """Return the last part of the stacks that were not read before."""
        first, size = self._read, os.fstat(self.stacks).st_size
        self._read = size
        data = os.pread(self.stacks, STACKS_BYTES, max(size - STACKS_BYTES, first))
        return without_our_frames(data.decode(errors="replace"))


def run(
    control: socket.socket,
    answers: int,
    job: Job | bytes,
    handled: Iterable[int],
    *,
    is_limited: bool = False,
) -> NoReturn:
    """Serve the driver until it closes or dies; never returns.

    Args:
        handled: Signals for which the driver has a handler; see `leave_signals_to_program`.
        is_limited: Whether libraries that are loaded use one thread already.
    """
    code = 1
    become_worker()
    die_when_memory_runs_out(OOM_AFTER_WORKERS)
    try:
        zygote = _Zygote(control, answers, job, handled, is_limited=is_limited)
        try:
            zygote.serve()
            code = 0
        finally:  # also if the driver died while a message was sent to it
            zygote.kill_all()
    finally:
        os._exit(code)


def serve_in_new_interpreter(control: int, answers: int, payload: int) -> NoReturn:
    """Serve in a new interpreter."""
    with os.fdopen(payload, "rb") as file:
        sys.path[:], sys.argv[:], script, handled = pickle.load(file)  # noqa: S301 - the driver's
        body = file.read()
    if script is not None:  # for what the user's function starts with multiprocessing
        sys.modules["__main__"].__file__ = script
    run(socket.socket(fileno=control), answers, body, handled)


class _Zygote:
    def __init__(
        self,
        control: socket.socket,
        answers: int,
        job: Job | bytes,
        handled: Iterable[int],
        *,
        is_limited: bool,
    ) -> None:
        self._control = control
        self._answers = answers
        self._driver = Channel(control.fileno(), answers)
        self._driver_ended = watch_maker_of(control)
        self._children: dict[int, _Child] = {}
        self._closing_at: float | None = None
        self._woken, wake = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, _wake)
        # The driver may block signals. SIGCHLD announces deaths, and workers expect the default.
        signal.pthread_sigmask(signal.SIG_SETMASK, SENT_TO_ALL)
        signal.signal(signal.SIGCONT, self._end_with_driver)
        continue_when_driver_ends(control.fileno())
        adopt_orphans()
        # Inherited by the workers, and before the user's code is imported.
        use_one_thread(is_limited=is_limited)
        keep_freed()
        self._job: Job | Failure
        try:
            # It comes from the driver, never from a disk.
            self._job = load_job(job) if isinstance(job, bytes) else job
        except BaseException as error:  # noqa: BLE001 - whatever importing user code raises
            self._job = failure_of(error)
        signal.signal(signal.SIGCONT, signal.SIG_DFL)
        leave_signals_to_program(handled)  # also by importing the user's module
        signal.signal(signal.SIGTERM, _wake)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        self._driver.send(("ready",))
        if isinstance(self._job, Failure):
            self._driver.send(("unloadable", -1))
        freeze(finds=getattr(self._job, "finds_generators", False))

    def _end_with_driver(self, *_: object) -> None:
        """End if the driver has: while the user's module is imported, no order is awaited."""
        ended = select.poll()
        ended.register(self._control, 0)  # whether it was closed is always reported
        for descriptor in self._driver_ended:
            ended.register(descriptor, select.POLLIN)
        if ended.poll(0):
            os._exit(1)

    def serve(self) -> None:
        control = self._control.fileno()
        arrivals = select.poll()  # unlike select() it takes numbers beyond 1,023
        for descriptor in (control, self._woken, *self._driver_ended):
            arrivals.register(descriptor, select.POLLIN)
        while True:
            now = time.monotonic()
            times = ((each.kill_at, each.stacks_at) for each in self._children.values())
            due = [at for pair in times for at in pair if at is not None]
            if self._closing_at is not None:
                due.append(self._closing_at)
            timeout = max(min(due) - now, 0.0) * 1000 if due else None
            ready = {descriptor for descriptor, _ in arrivals.poll(timeout)}
            if self._woken in ready and signal.SIGTERM in os.read(self._woken, 4096):
                break
            if not ready.isdisjoint(self._driver_ended):
                break
            if control in ready and not self._execute_order():
                break
            self._reap()
            now = time.monotonic()
            for pid, child in self._children.items():
                if child.take_due(now):
                    kill_descendants(pid)
                    _kill_group(pid)
                elif (stacks := child.take_stacks(now)) is not None:
                    self._driver.send(("stacks", child.incarnation, stacks))
            if self._closing_at is not None and (not self._children or self._closing_at <= now):
                break

    def kill_all(self) -> None:
        """Kill the workers and all processes that they started; return when all are dead."""
        for pid in self._children:
            _kill_group(pid)
        with suppress(ChildProcessError):  # none is left
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            # The children of those that die become this process's own.
            while kill_descendants(os.getpid()):
                os.waitid(os.P_ALL, 0, os.WEXITED)
            while os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG):
                pass  # nobody else may wait for them: in a container, the driver is process 1

    def _execute_order(self) -> bool:
        """Execute the driver's next order; return False when the driver has ended."""
        try:
            order, descriptors, _, _ = socket.recv_fds(self._control, ORDER.size, 2)
        except ConnectionError:
            return False
        if len(order) < ORDER.size:
            return False
        what, incarnation, worker_id, seconds = ORDER.unpack(order)
        if what == START:
            self._fork(incarnation, worker_id, descriptors)
        elif what == KILL:
            for pid, child in self._children.items():
                if child.incarnation == incarnation and child.kill_at is None:
                    child.waits, child.kill_at = 0, time.monotonic() + STACKS_S
                    os.kill(pid, signal.SIGUSR1)  # faulthandler writes the stacks
        elif what == STACKS:
            for pid, child in self._children.items():
                if child.incarnation == incarnation and child.kill_at is None:
                    child.ask(pid, time.monotonic())
        else:
            self._closing_at = time.monotonic() + seconds
        return True

    def _fork(self, incarnation: int, worker_id: int, descriptors: list[int]) -> None:
        job = self._job
        if isinstance(job, Failure):
            self._refuse(incarnation, descriptors, job)
            return
        zygote, opened = os.getpid(), []
        try:
            opened = [memory_file("forebay")]
            opened += os.pipe()
            with signals_held():  # until the worker has its own handlers
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    for each in (signal.SIGCHLD, signal.SIGTERM):
                        signal.signal(each, signal.SIG_DFL)
        except OSError as error:  # a limit is reached
            from forebay.base.process import refused

            failure = failure_of(refused("worker processes", error))
            self._refuse(incarnation, [*descriptors, *opened], failure)
            return
        stacks, gate_read, gate_write = opened
        if pid == 0:
            try:
                die_with(zygote)
                os.close(gate_write)
                os.read(gate_read, 1)  # until the driver can kill it by ID
                os.close(gate_read)
                self._control.close()
                others = (child.stacks for child in self._children.values())
                for descriptor in (self._answers, *self._driver_ended, *others):
                    os.close(descriptor)
                _run_worker(incarnation, worker_id, job, Channel(*descriptors), stacks)
            finally:
                os._exit(1)
        for descriptor in descriptors:
            os.close(descriptor)
        self._children[pid] = _Child(incarnation, stacks)
        self._driver.send(("forked", incarnation, pid))
        os.close(gate_read)
        os.close(gate_write)

    def _refuse(self, incarnation: int, descriptors: list[int], failure: Failure) -> None:
        for descriptor in descriptors:
            os.close(descriptor)
        self._driver.send(("refused", incarnation, failure))

    def _reap(self) -> None:
        with suppress(ChildProcessError):  # there is none
            while dead := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                self._report_exit(dead.si_pid)

    def _report_exit(self, pid: int) -> None:
        child = self._children.pop(pid, None)
        if child is not None:
            _kill_group(pid)  # the processes that it started; its ID is not reused yet
        _, status, usage = os.wait4(pid, 0)
        if child is not None:
            stacks = child.new_stacks()
            os.close(child.stacks)
            code = os.waitstatus_to_exitcode(status)
            self._driver.send(("exited", child.incarnation, code, usage.ru_maxrss * 1024, stacks))


def _run_worker(
    incarnation: int, worker_id: int, job: Job, channel: Channel, stacks: int
) -> NoReturn:
    """Run a worker in this freshly forked process; never returns."""
    os.setpgid(0, 0)  # so that a kill includes the processes that the user's function started
    die_when_memory_runs_out()
    read_on_alone()
    faulthandler.enable(stacks, all_threads=True)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    _begin_as_child(worker_id)

    def receive(wait: bool) -> list[Assignment] | None:
        try:
            messages = [channel.receive()] if wait else channel.receive_nowait()
        except (EOFError, ConnectionError):
            return None
        if None in messages:  # the driver stops this worker
            return None
        # Calls no Python code, as the class would.
        return [tuple.__new__(Assignment, each) for message in messages for each in message]

    def report(event: Event) -> None:
        if isinstance(event, TaskFailed):
            event = portable(event)
        try:
            channel.send(as_sent(event))
        except ConnectionError:
            os._exit(0)  # the driver has ended, so the answer is not needed
        except Exception as error:  # the result cannot be pickled
            if not isinstance(event, TaskFinished):
                raise
            bad = TaskFailed(
                incarnation, event.task, event.attempt, failure_of(error), event.seconds, final=True
            )
            channel.send(portable(bad))

    serve(incarnation, worker_id, job, receive, report)
    if (util := sys.modules.get("multiprocessing.util")) is not None:
        # Sends what is left in queues. Its `_exit_function` would end children of the driver, too.
        util._run_finalizers()
    flush_streams()
    os._exit(0)


def _begin_as_child(worker_id: int) -> None:
    """Do what `multiprocessing` does in a child of its own, if anything has imported it.

    Otherwise all workers would share a manager's connection, and a queue would wait for a thread.
    """
    if "multiprocessing.util" in sys.modules:
        from multiprocessing.process import BaseProcess, current_process

        BaseProcess._after_fork()  # type: ignore[attr-defined]
        current_process().name = f"Worker-{worker_id}"


def _catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal."""
    with suppress(OSError, ValueError), open(f"/proc/{pid}/status") as file:
        caught = next((line for line in file if line.startswith("SigCgt:")), "SigCgt: 0")
        return bool(int(caught.split()[1], 16) >> (number - 1) & 1)
    return False


def _kill_group(pid: int) -> None:
    """Kill a worker that was not reaped yet, and every process that it started."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)  # it has not created its group yet
