"""Workers as processes on this machine: one per core, and a death affects no other worker.

The driver holds one channel per worker and one to the zygote (see `zygote_handle.py`), and waits on
all of them at once: an answer, a death and the zygote's own death are each something to read. No
lock and no queue is shared, so a dying worker cannot leave one locked or corrupted.
"""

from __future__ import annotations

import os
import resource
import selectors
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any, final

from forebay.base.machine import memory_kills, usable_memory
from forebay.base.process import SENT_TO_ALL, limits_in_words
from forebay.errors import OptionError
from forebay.failures import Failure
from forebay.pools import zygote
from forebay.pools.base import Pool
from forebay.pools.events import Assignment, Event, Job, StacksTaken, WorkerDied
from forebay.pools.worker import Channel, as_received, roomy_pipe
from forebay.pools.zygote_handle import (
    CHECK_S,
    Start,
    ZygoteHandle,
    describe_exit,
    driver_ends,
)

# How long `close` waits for a worker to finish its task before killing it.
CLOSE_S = 0.5
# How long to wait for workers of a zygote that was killed, and how long between two looks.
REAP_S, REAP_WAIT_S = 1.0, 0.005
_WAKE = -1
# What the driver needs besides two descriptors per worker: files, the ledger, the terminal.
SPARE_DESCRIPTORS = 48


def occupy_standard_descriptors() -> None:
    """Open /dev/null where 0, 1 or 2 is closed: what is printed would go to the next file."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


@final
class ProcessPool(Pool):
    """Runs each worker in a separate process.

    A job that cannot be pickled, or that a new interpreter cannot load, gets a zygote that is
    forked from this process, whatever threads it has, as `multiprocessing.Pool` does.

    Args:
        job: What the workers do. It is pickled at most once, however many workers there are. If it
            is already pickled, the zygote is a new interpreter.
    """

    def __init__(
        self,
        job: Job | bytes,
        max_workers: int,
        start: Start = "auto",
        keep: Sequence[int] = (),
    ) -> None:
        """Pickle the job and start the zygote, which takes a moment."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        needed = 2 * max_workers + SPARE_DESCRIPTORS
        if soft != resource.RLIM_INFINITY and needed > soft:
            raise OptionError(
                f"num_workers={max_workers} needs about {needed} open files; {soft} are allowed\n"
                "  Nothing was started. Lower num_workers, or raise the limit: ulimit -n 4096"
            )
        # By incarnation; a dead worker stays in both, for the loader's process handles.
        self.pids: dict[int, int] = {}
        self.exit_codes: dict[int, int] = {}
        self._owner = os.getpid()
        self._memory_kills = memory_kills() or 0  # earlier ones, and those of workers
        self._start = start
        self._keep = keep
        self._job = self._as_it_is = job
        if start == "auto" and not isinstance(job, bytes):
            from forebay.pools.pickling import dumps

            try:
                self._job = dumps(job)
            except Exception:  # noqa: BLE001 - whatever the user's objects raise
                self._start = "fork"
        self._zygote: ZygoteHandle | None = None
        self._owed: set[tuple[str, int]] = set()  # answers that the zygote owes, by worker
        self._workers: dict[int, Channel] = {}
        self._worker_ids: dict[int, int] = {}  # of all that were started
        self._stopping: set[int] = set()  # asked to end; their deaths are not reported
        self._blocked: set[int] = set()  # workers whose pipe is full
        self._events: list[Event] = []
        # Held briefly; reentrant because the garbage collector may close a pool while it is held.
        self._waking = threading.RLock()
        with limits_in_words():
            occupy_standard_descriptors()
            self._selector = selectors.DefaultSelector()
            self._woken, self._waker = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._waker, False)
        driver_ends.update((self._woken, self._waker, self._selector.fileno()))
        self._selector.register(self._woken, selectors.EVENT_READ, _WAKE)
        try:
            self._start_zygote()
        except BaseException:  # the system refuses a process, or `spawn` cannot pickle the job
            self.close()
            raise

    def start(self, incarnation: int, worker_id: int) -> None:
        """Have the zygote fork a worker."""
        if self._zygote is None:
            self._start_zygote()
        with limits_in_words(), ExitStack() as undo:
            tasks, put = roomy_pipe()
            undo.callback(os.close, tasks)
            undo.callback(os.close, put)
            get, answers = roomy_pipe()
            undo.pop_all()
        assert self._zygote is not None
        self._zygote.order(zygote.START, incarnation, worker_id, descriptors=[tasks, answers])
        self._owed.add(("forked", incarnation))
        os.close(tasks)
        os.close(answers)
        os.set_blocking(put, False)
        driver_ends.update((get, put))
        self._worker_ids[incarnation] = worker_id
        self._workers[incarnation] = channel = Channel(get, put)
        self._selector.register(channel, selectors.EVENT_READ, incarnation)

    def send_to_all(self, groups: Sequence[tuple[int, Sequence[Assignment]]]) -> None:
        """Queue the tasks in the workers' channels."""
        for incarnation, assignments in groups:
            self._queue(incarnation, [tuple(each) for each in assignments])

    def stop(self, incarnation: int) -> None:
        """Queue the end in the worker's channel; the zygote reports when its process is gone."""
        if incarnation in self._workers:
            self._stopping.add(incarnation)
            self._queue(incarnation, None)

    def _queue(self, incarnation: int, message: Sequence[tuple[Any, ...]] | None) -> None:
        channel = self._workers.get(incarnation)
        if channel is None or channel.ended:
            return
        channel.queue(message)
        if incarnation not in self._blocked and channel.flush():
            self._blocked.add(incarnation)
            self._selector.register(channel.outgoing, selectors.EVENT_WRITE, incarnation)

    def kill(self, incarnation: int) -> None:
        """Have the zygote take the worker's stacks and kill it."""
        if self._zygote is not None and incarnation in self._workers:
            self._zygote.order(zygote.KILL, incarnation)
            self._owed.add(("exited", incarnation))

    def take_stacks(self, incarnation: int) -> None:
        """Have the zygote take the worker's stacks."""
        if self._zygote is not None and incarnation in self._workers:
            self._zygote.order(zygote.STACKS, incarnation)

    def wait(self, timeout: float | None) -> list[Event]:
        """Return the workers' events and deaths."""
        if not self._events:
            if self._owed:
                timeout = CHECK_S if timeout is None else min(timeout, CHECK_S)
            self.at_rest = True
            ready = self._selector.select(timeout)
            self.at_rest = False
            for key, mask in ready:
                incarnation = key.data
                if incarnation is None:
                    self._receive_from_zygote()
                elif incarnation == _WAKE:
                    with suppress(BlockingIOError):
                        os.read(self._woken, 4096)
                elif incarnation in self._workers:
                    if not mask & selectors.EVENT_WRITE:
                        self._receive(incarnation)
                    elif not self._workers[incarnation].flush():
                        self._unblock(incarnation)
            if self._zygote is not None and (why := self._zygote.check_response(bool(self._owed))):
                self._report_lost_zygote(why)
        events, self._events = self._events, []
        return events

    def hosts(self, incarnation: int) -> bool:
        """Return whether a worker was started and has not ended."""
        return incarnation in self._workers

    def living_pids(self) -> list[int]:
        """Return the processes of the workers that have started and not ended."""
        return [pid for incarnation in self._workers if (pid := self.pids.get(incarnation))]

    def wake(self) -> None:
        """Write to a pipe that `wait` watches."""
        # The lock prevents a write to the descriptor's number after it was closed and reused.
        with self._waking, suppress(BlockingIOError):  # the pipe is full, so `wait` returns anyway
            if self._waker >= 0:
                os.write(self._waker, b"w")

    def close(self) -> None:
        """Stop idle workers, kill the others, and wait for the zygote to end.

        In a fork of the driver it does nothing, since the workers belong to the driver.
        """
        if self._woken < 0 or os.getpid() != self._owner:
            return
        for incarnation in list(self._workers):
            self._forget(incarnation)
        if self._zygote is not None:
            self._zygote.order(zygote.CLOSE, seconds=CLOSE_S)
            self._end_zygote(patience_s=CLOSE_S + 1.0)
        for incarnation in self.pids:  # those whose end was not reported were killed
            self.exit_codes.setdefault(incarnation, -signal.SIGKILL)
        driver_ends.difference_update((self._woken, self._waker, self._selector.fileno()))
        self._selector.close()
        with self._waking:
            os.close(self._woken)
            os.close(self._waker)
            self._woken = self._waker = -1
        self._events.clear()

    # ---- the workers ---------------------------------------------------------------------------

    def _receive(self, incarnation: int) -> None:
        channel = self._workers[incarnation]
        self._events.extend(map(as_received, channel.receive_nowait()))
        if channel.ended:  # it is dead or dying; the zygote reports how
            self._selector.unregister(channel)
            self._owed.add(("exited", incarnation))

    def _unblock(self, incarnation: int) -> None:
        if incarnation in self._blocked:
            self._blocked.remove(incarnation)
            self._selector.unregister(self._workers[incarnation].outgoing)

    def _forget(self, incarnation: int) -> None:
        self._unblock(incarnation)
        channel = self._workers.pop(incarnation)
        if not channel.ended:
            self._selector.unregister(channel)
        driver_ends.difference_update((channel.fileno(), channel.outgoing))
        channel.close()

    def _report_death(self, incarnation: int, death: WorkerDied) -> None:
        """Read a dead worker's last messages, then report its death."""
        if incarnation in self._workers:
            channel = self._workers[incarnation]
            if not channel.ended:
                self._receive(incarnation)
            self._forget(incarnation)
            if incarnation in self._stopping:
                self._stopping.discard(incarnation)
                self.pids.pop(incarnation, None)
                self.exit_codes.pop(incarnation, None)
            else:
                self._events.append(death)
        self._owed -= {("forked", incarnation), ("exited", incarnation)}

    # ---- the zygote ----------------------------------------------------------------------------

    def _start_zygote(self) -> None:
        with limits_in_words():
            self._zygote = ZygoteHandle(self._job, self._start, self._keep)
        self._selector.register(self._zygote, selectors.EVENT_READ, None)

    def _receive_from_zygote(self) -> None:
        zygote = self._zygote
        assert zygote is not None
        for message in zygote.receive_nowait():
            if message[0] == "unloadable" and not isinstance(self._as_it_is, bytes):
                self._fork_instead()
                return
            self._handle_message(*message)
        if zygote.ended:
            self._report_lost_zygote("the process that forks the workers died")

    def _fork_instead(self) -> None:
        """Replace a zygote that cannot load the job, and its workers, by forks of this process."""
        starting = {*self._workers} - self._stopping
        for incarnation in [*self._workers]:
            self._forget(incarnation)
        self._stopping.clear()
        self._end_zygote(patience_s=0.0)
        self._job, self._start = self._as_it_is, "fork"
        for incarnation in sorted(starting):
            self.start(incarnation, self._worker_ids[incarnation])

    def _report_lost_zygote(self, why: str) -> None:
        """Report the deaths of all workers: they die with their zygote, which is dead or killed."""
        ended = self._zygote
        self._end_zygote(patience_s=0.0)
        failure = Failure("crash", "WorkerDiedError", why)
        if ended is not None and ended.has_failed:
            from forebay.pools.job_loading import NOT_BEGUN

            failure = Failure("exception", "WorkerDiedError", NOT_BEGUN)
        for incarnation in list(self._workers):
            # The kernel kills the worker itself, but not the processes that it started.
            if (pid := self.pids.get(incarnation)) is not None:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
                self.exit_codes[incarnation] = -signal.SIGKILL
            self._report_death(incarnation, WorkerDied(incarnation, failure, external=True))

    def _end_zygote(self, patience_s: float) -> None:
        assert self._zygote is not None
        ending, self._zygote = self._zygote, None
        self._selector.unregister(ending)
        for message in ending.end(patience_s):
            self._handle_message(*message)
        if os.getpid() == 1:
            _reap_session(ending.pid)
        self._owed.clear()

    def _handle_message(self, what: str, incarnation: int, *facts: Any) -> None:
        if what == "forked":
            (self.pids[incarnation],) = facts
            self._owed.discard((what, incarnation))
        elif what == "exited":
            code, peak_bytes, stacks = facts
            self.exit_codes[incarnation] = code
            memory = usable_memory() or 0 if code == -signal.SIGKILL else 0
            is_counted = memory > 0 and (memory_kills() or 0) > self._memory_kills
            self._memory_kills += is_counted
            words = describe_exit(code, peak_bytes, memory if is_counted else None)
            pid = self.pids.get(incarnation)
            failure = Failure("crash", "WorkerDiedError", words, stacks, pid=pid)
            death = WorkerDied(incarnation, failure, memory=memory, signalled=-code in SENT_TO_ALL)
            self._report_death(incarnation, death)
        elif what == "stacks":
            if incarnation in self._workers:
                self._events.append(StacksTaken(incarnation, *facts))
        elif what == "refused":
            (failure,) = facts
            self._report_death(incarnation, WorkerDied(incarnation, failure))


def _reap_session(session: int) -> None:
    """Wait for those of a zygote's session that it has left to this process.

    The first process of a container becomes the parent of all whose own parent has ended.
    """
    until = time.monotonic() + REAP_S
    while (left := _children_in(session)) and time.monotonic() < until:
        for pid in left:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(REAP_WAIT_S)


def _children_in(session: int) -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            _, parent, _, own = file.read().rpartition(b")")[2].split()[:4]
            if (int(parent), int(own)) == (os.getpid(), session):
                found.append(int(name))
    return found
