"""Workers as processes on this machine: one per core, and a death affects no other worker.

The driver holds one channel per worker and one to the zygote (see `zygote.py`), and waits on all of
them at once: an answer, a death and the zygote's own death are each something to read. No lock
and no queue is shared, so a dying worker cannot leave one locked or corrupted.
"""

from __future__ import annotations

import os
import resource
import selectors
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.context import BaseContext
from typing import Any, Literal, final

from forebay.errors import OptionError, WorkerDiedError
from forebay.failures import Failure
from forebay.pools import launch, zygote
from forebay.pools.base import Pool
from forebay.pools.events import Assignment, Event, Job, WorkerDied, as_received
from forebay.pools.worker import Channel, roomy_pipe
from forebay.pools.zygote import kill_descendants

# ---- zygote handle -------------------------------------------------------------------------------
# The driver's end of a zygote: starts it, sends orders, receives answers, monitors and ends it.
#
# The zygote must answer each order and report each death. If an answer is due and the zygote sends
# nothing, it is sent SIGCONT after CHECK_S, in case it was stopped, and given up after ZYGOTE_S.

# How long a zygote that has loaded the job may owe an answer without sending anything.
ZYGOTE_S = 10.0
# How often it is checked while it owes one.
CHECK_S = 1.0

# The driver's ends of all descriptors of all pools. If one zygote kept some of them open, another
# would not notice the driver's death.
driver_ends: set[int] = set()

# How the zygote starts; see `launch.py`.
Start = Literal["auto", "fork"] | BaseContext


class ZygoteHandle:
    """One zygote, which is starting or running."""

    def __init__(self, job: Job | bytes, start: Start, keep: Sequence[int]) -> None:
        self._spawned: Any = None  # the multiprocessing.Process, if it was spawned
        self._is_loaded = False  # whether it has loaded the job
        self._silent_s = 0.0
        self._checked_at = time.monotonic()
        with ExitStack() as theirs, ExitStack() as undo:
            get, answers = os.pipe()
            theirs.callback(os.close, answers)
            undo.callback(os.close, get)
            ours, control = socket.socketpair()
            theirs.enter_context(control)
            undo.enter_context(ours)
            driver_ends.update((get, ours.fileno()))
            undo.callback(driver_ends.difference_update, (get, ours.fileno()))
            self.pid = self._launch(job, start, keep, control, answers)
            undo.pop_all()
        self._channel = Channel(get, ours.detach())

    def _launch(
        self,
        job: Job | bytes,
        start: Start,
        keep: Sequence[int],
        control: socket.socket,
        answers: int,
    ) -> int:
        if isinstance(start, BaseContext):
            assert not isinstance(job, bytes)
            self._spawned = launch.spawn(start, control, answers, job)
            return int(self._spawned.pid)
        if start == "fork":
            return launch.fork(control, answers, job, closing=driver_ends)
        assert isinstance(job, bytes)
        if launch.is_single_threaded() and not keep:
            return launch.fork(control, answers, job, closing=None)
        return launch.execute(control, answers, job, keep)

    def fileno(self) -> int:
        """Return the descriptor that its answers come from, for a selector."""
        return self._channel.fileno()

    @property
    def ended(self) -> bool:
        """Return whether it is known to have ended."""
        return self._channel.ended

    def order(
        self,
        what: int,
        incarnation: int = 0,
        worker_id: int = 0,
        *,
        descriptors: Sequence[int] = (),
        seconds: float = 0.0,
    ) -> None:
        """Send an order; see `zygote.ORDER`."""
        order = zygote.ORDER.pack(what, incarnation, worker_id, seconds)
        control = socket.socket(fileno=self._channel.outgoing)
        # If it is dead, the end of the answers shows that.
        with suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(control, [order], list(descriptors))
        control.detach()  # the channel owns the descriptor

    def receive_nowait(self) -> list[tuple[Any, ...]]:
        """Return its messages: "forked", "exited" or "refused", a worker, and details."""
        messages = self._channel.receive_nowait()
        self._silent_s = 0.0
        self._is_loaded |= ("ready",) in messages
        return [message for message in messages if message != ("ready",)]

    def check_response(self, owes: bool) -> str | None:
        """Check how long it has been silent; continue it if it was stopped."""
        now = time.monotonic()
        # A pause of this process, such as by Ctrl-Z, does not count against the zygote.
        passed, self._checked_at = min(now - self._checked_at, CHECK_S), now
        self._silent_s = self._silent_s + passed if owes else 0.0
        if self._silent_s >= CHECK_S:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGCONT)
        # Until it has loaded the job there is no limit: imports may take long.
        if not self._is_loaded or self._silent_s < ZYGOTE_S:
            return None
        return f"the process that forks the workers did not answer for {ZYGOTE_S:g} s"

    def end(self, patience_s: float) -> list[tuple[Any, ...]]:
        """Wait for it to end; kill it and all its descendants if it does not."""
        messages = []
        until = time.monotonic() + patience_s
        with selectors.PollSelector() as selector:  # poll needs no descriptor, and none may be left
            selector.register(self._channel, selectors.EVENT_READ)
            while not self.ended and (left := until - time.monotonic()) > 0:
                if selector.select(left):
                    messages += self.receive_nowait()
        driver_ends.difference_update((self._channel.fileno(), self._channel.outgoing))
        self._channel.close()
        if not self.ended:
            kill_descendants(self.pid)
        if self._spawned is not None:
            if self._spawned.is_alive():
                self._spawned.kill()
            self._spawned.join()
            self._spawned.close()
        else:
            with suppress(ProcessLookupError, ChildProcessError):  # it was reaped by another `wait`
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
        return messages


@contextmanager
def limits_in_words() -> Iterator[None]:
    """Raise WorkerDiedError, which says what to do, if the system refuses something in the block.

    Only for blocks that start processes.
    """
    try:
        yield
    except OSError as error:
        raise WorkerDiedError(
            f"worker processes cannot be started: {error}\n"
            "  No input counts as failed, and completed work is kept.\n"
            "  A limit may be reached: of processes (ulimit -u), of open files (ulimit -n), of "
            "memory, or of space for temporary files (TMPDIR). Raise it, or lower num_workers."
        ) from error


# ---- processes -----------------------------------------------------------------------------------

# How long `close` waits for a worker to finish its task before killing it.
CLOSE_S = 0.5
_WAKE = -1
# What the driver needs besides two descriptors per worker: files, the ledger, the terminal.
SPARE_DESCRIPTORS = 48


@final
class ProcessPool(Pool):
    """Runs each worker in a separate process.

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
        # By incarnation. A dead worker stays in both, for the loader's process handles: some 200
        # bytes per death.
        self.pids: dict[int, int] = {}
        self.exit_codes: dict[int, int] = {}
        self._owner = os.getpid()
        self._start = start
        self._keep = keep
        is_pickled = isinstance(job, bytes)
        self._job = launch.pickled(job) if start == "auto" and not is_pickled else job
        self._zygote: ZygoteHandle | None = None
        self._owed: set[tuple[str, int]] = set()  # answers that the zygote owes, by worker
        self._workers: dict[int, Channel] = {}
        self._stopping: set[int] = set()  # asked to end; their deaths are not reported
        self._blocked: set[int] = set()  # workers whose pipe is full
        self._events: list[Event] = []
        # Held briefly; reentrant because the garbage collector may close a pool while it is held.
        self._waking = threading.RLock()
        with limits_in_words():
            launch.occupy_standard_descriptors()
            self._selector = selectors.DefaultSelector()
            self._woken, self._waker = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._waker, False)
        driver_ends.update((self._woken, self._waker, self._selector.fileno()))
        self._selector.register(self._woken, selectors.EVENT_READ, _WAKE)
        try:
            self._start_zygote()
        except BaseException:  # the job cannot be pickled
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
        self._workers[incarnation] = channel = Channel(get, put)
        self._selector.register(channel, selectors.EVENT_READ, incarnation)

    def send(self, incarnation: int, assignments: Sequence[Assignment]) -> None:
        """Queue the tasks in the worker's channel."""
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
        assert self._zygote is not None
        for message in self._zygote.receive_nowait():
            self._handle_message(*message)
        if self._zygote.ended:
            self._report_lost_zygote("the process that forks the workers died")

    def _report_lost_zygote(self, why: str) -> None:
        """Report the deaths of all workers: they die with their zygote, which is dead or killed."""
        self._end_zygote(patience_s=0.0)
        failure = Failure("crash", "WorkerDiedError", why)
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
        self._owed.clear()

    def _handle_message(self, what: str, incarnation: int, *facts: Any) -> None:
        if what == "forked":
            (self.pids[incarnation],) = facts
            self._owed.discard((what, incarnation))
        elif what == "exited":
            code, peak_bytes, stacks = facts
            self.exit_codes[incarnation] = code
            message, pid = describe_exit(code, peak_bytes), self.pids.get(incarnation)
            failure = Failure("crash", "WorkerDiedError", message, stacks, pid=pid)
            self._report_death(incarnation, WorkerDied(incarnation, failure))
        else:  # refused
            (failure,) = facts
            self._report_death(incarnation, WorkerDied(incarnation, failure))


def describe_exit(code: int, peak_bytes: int) -> str:
    """Describe how a worker ended, and what that usually means."""
    peak = f"peak memory {peak_bytes / 2**20:,.0f} MiB"
    if code >= 0:
        return f"the worker exited with code {code} ({peak}): the function ended its process"
    try:
        name, words = signal.Signals(-code).name, signal.strsignal(-code)
    except ValueError:
        name, words = f"signal {-code}", "unknown"
    usual = {
        "SIGKILL": "usually the machine ran out of memory, or someone killed it",
        "SIGSEGV": "native code crashed",
        "SIGBUS": "native code crashed, or a mapped file shrank",
        "SIGABRT": "native code aborted",
    }.get(name, "another process sent it that signal")
    return f"the worker was killed by signal: {words} ({name}; {peak}): {usual}"
