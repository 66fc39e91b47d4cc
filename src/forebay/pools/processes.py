"""Workers as processes on this machine: one per core, and a death affects no other worker.

The driver holds one channel per worker and one to the zygote (see `zygote.py`), and waits on all of
them at once: an answer, a death and the zygote's own death are each something to read. No lock
and no queue is shared, so a dying worker cannot leave one locked or corrupted.
"""

from __future__ import annotations

import gc
import os
import pickle
import resource
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from operator import methodcaller
from types import FrameType
from typing import Any, Literal, final

from forebay.base.libraries import one_thread
from forebay.base.memory_files import memory_file
from forebay.base.process import (
    descriptors_for_workers,
    memory_kills,
    standard_library_first,
    usable_memory,
    whole_recursion_limit,
)
from forebay.base.system_limits import limits_in_words
from forebay.errors import OptionError
from forebay.failures import Failure
from forebay.pools import zygote
from forebay.pools.base import Pool
from forebay.pools.events import Assignment, Event, Job, StacksTaken, WorkerDied, as_received
from forebay.pools.worker import Channel, roomy_pipe
from forebay.pools.zygote import kill_descendants

# ---- launch --------------------------------------------------------------------------------------
# Three ways to start the zygote; each passes it a job and two descriptors.
#
# fork      a copy of this process: immediate, and nothing is pickled; torch's default on Linux
# execute   a new interpreter, with a command line; the job is pickled by cloudpickle
# spawn     by a multiprocessing context, with its rules for `__main__` and for pickling
#
# A new interpreter gets the flags of this one, and `-P`: Python would otherwise look for modules in
# the working folder first, and run a `json.py` that is among the inputs. The job is unpickled with
# this process's `sys.path`, so the user's modules are found as they are here.

# The folders are for importing forebay; `main` sets the path that the job is unpickled with.
_BOOT = (
    "import sys; sys.path[:] = sys.argv[4:]; "
    "from forebay.pools.zygote import main; main(*map(int, sys.argv[1:4]))"
)
_SAFE_PATH = "PYTHONSAFEPATH"


def is_single_threaded() -> bool:
    """Return whether a fork is safe: no other thread, of Python or not, can hold a lock."""
    try:
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:
        return False  # no way to know


def occupy_standard_descriptors() -> None:
    """Open /dev/null where 0, 1 or 2 is closed: what is printed would go to the next file."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def pickled(job: Any) -> bytes:
    """Pickle a job, including functions of a script or a notebook."""
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps(job))
    except Exception as error:
        raise OptionError(
            f"the function cannot be sent to worker processes: {type(error).__name__}: {error}\n"
            "  Pickling it failed, so nothing was started. Open files, locks, connections and "
            "generators cannot travel:\n"
            "  open them inside the function, or use backend='thread' or num_workers=0."
        ) from error


def fork(
    control: socket.socket, answers: int, job: Job | bytes, closing: Iterable[int] | None
) -> int:
    """Fork the zygote, which closes these descriptors; None for all that it has no use for."""
    zygote.flush_streams()  # or the child would print the buffered output again
    driver, pid = os.getpid(), 0
    try:
        with one_thread(), handlers_deferred(), whole_recursion_limit():
            pid = os.fork()
        if pid == 0:
            gc.freeze()  # no object of the driver may be finalized here
            os.setsid()
            if closing is None:
                kept = {control.fileno(), answers, *descriptors_for_workers}
                ends = 2, *sorted(kept), os.sysconf("SC_OPEN_MAX")
                for before, after in pairwise(ends):
                    os.closerange(before + 1, after)
            else:
                for descriptor in closing:
                    with suppress(OSError):
                        os.close(descriptor)
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            os.close(null)
            zygote.run(control, answers, job, is_limited=True)
    except BaseException:  # raised by a deferred handler, if the fork succeeded
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        raise
    finally:
        if os.getpid() != driver:
            os._exit(1)
    return pid


@contextmanager
def handlers_deferred() -> Iterator[None]:
    """Defer Python's signal handlers to the end of the block; call them in this process only.

    A fork calls functions of other modules, such as the one that releases the lock of `logging`.
    Python prints and drops an exception that a handler raises in them: Ctrl-C would have no effect,
    and the lock would stay locked.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers are called in the main thread alone
        return
    process, received, is_over = os.getpid(), [], False
    handlers: dict[int, Any] = {}

    def defer(number: int, frame: FrameType | None) -> Any:
        return handlers[number](number, frame) if is_over else received.append(number)

    try:
        for each in signal.valid_signals():
            if callable(handler := signal.getsignal(each)):
                handlers[each] = handler
                signal.signal(each, defer)
        yield
    finally:
        is_over = True
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if os.getpid() == process:
        for number in received:
            signal.raise_signal(number)


def execute(control: socket.socket, answers: int, payload: bytes, keep: Iterable[int]) -> int:
    """Start the zygote as a fresh interpreter; return its process ID, to be waited for."""
    with os.fdopen(memory_file("forebay"), "w+b") as file:
        pickle.dump((sys.path, sys.argv, vars(sys.modules["__main__"]).get("__file__")), file)
        file.write(payload)
        file.seek(0)  # which writes what is buffered
        descriptors = control.fileno(), answers, file.fileno()
        process = subprocess.Popen(
            [
                *(sys.executable, *_interpreter_flags(), "-P", "-c", _BOOT),
                *map(str, descriptors),
                *standard_library_first(),
            ],
            pass_fds={*descriptors, *keep, *descriptors_for_workers},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    process.returncode = 0  # it is reaped by its process ID
    return process.pid


def spawn(context: BaseContext, control: socket.socket, answers: int, job: Job) -> Any:
    """Start the zygote by `multiprocessing`; return its process."""
    kind: Any = context.Process  # type: ignore[attr-defined] # of every concrete context
    if not issubclass(kind, BaseProcess):  # a thread would become the zygote, and end this process
        raise OptionError(
            f"multiprocessing_context={context!r} is not valid: its workers would be instances of "
            f"{kind.__name__}, which is not a process\n"
            "  Nothing was started. Use backend='thread' for workers that are threads, or "
            "'fork', 'spawn' or 'forkserver'."
        )
    ends = _Descriptor(control.fileno()), _Descriptor(answers)
    is_fork = context.get_start_method() == "fork"
    with _safe_path() as earlier, ExitStack() as forking:
        if is_fork:
            forking.enter_context(one_thread())
            forking.enter_context(whole_recursion_limit())
        process = kind(target=_spawned, args=(*ends, job, earlier, is_fork), daemon=True)
        try:
            process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            error.add_note(
                f"forebay: multiprocessing_context={context.get_start_method()!r} pickles "
                "functions by their names, and one of these has none; no worker was started.\n"
                "  Define lambdas and local functions at the top of a module instead; or leave "
                "multiprocessing_context out: forebay's own workers get them as they are."
            )
            raise
    return process


def _interpreter_flags() -> list[str]:
    """Return the flags of this interpreter, the same that multiprocessing passes on."""
    return list(subprocess._args_from_interpreter_flags())  # type: ignore[attr-defined]


@contextmanager
def _safe_path() -> Iterator[str | None]:
    """Make interpreters that start in the block behave as with `-P`; yield the earlier setting."""
    earlier = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        yield earlier
    finally:
        _restore_safe_path(earlier)


def _restore_safe_path(earlier: str | None) -> None:
    if earlier is None:
        os.environ.pop(_SAFE_PATH, None)
    else:
        os.environ[_SAFE_PATH] = earlier


class _Descriptor(int):
    """A descriptor that is passed to a process started by `multiprocessing`."""

    def __reduce__(self) -> tuple[Any, ...]:
        return methodcaller("detach"), (DupFd(int(self)),)


def _spawned(control: int, answers: int, job: Job, safe_path: str | None, is_fork: bool) -> None:
    _restore_safe_path(safe_path)  # what the user's function starts must not inherit it
    os.setsid()  # Ctrl-C is for the driver
    zygote.run(socket.socket(fileno=control), answers, job, is_limited=is_fork)


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

# How the zygote starts.
Start = Literal["auto", "fork"] | BaseContext


class ZygoteHandle:
    """One zygote, which is starting or running."""

    def __init__(self, job: Job | bytes, start: Start, keep: Sequence[int]) -> None:
        self._spawned: Any = None  # the multiprocessing.Process, if it was spawned
        self._is_loaded = False  # whether it has loaded the job
        self.has_failed = False  # whether, if it was spawned, it could not: another cannot either
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
            if isinstance(start, BaseContext):
                assert not isinstance(job, bytes)
                self._spawned = spawn(start, control, answers, job)
                self.pid = int(self._spawned.pid)
            elif start == "fork":
                self.pid = fork(control, answers, job, closing=driver_ends)
            elif is_single_threaded() and not keep:
                self.pid = fork(control, answers, job, closing=None)
            else:
                assert isinstance(job, bytes)
                self.pid = execute(control, answers, job, keep)
            undo.pop_all()
        self._channel = Channel(get, ours.detach())

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
            if self.ended:
                self._spawned.join(1.0)  # it may be about to exit, with a code that says why
            if self._spawned.is_alive():
                self._spawned.kill()
            self._spawned.join()
            self.has_failed = self._spawned.exitcode > 0 and not self._is_loaded
            self._spawned.close()
        else:
            with suppress(ProcessLookupError, ChildProcessError):  # it was reaped by another `wait`
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
        return messages


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
        # By incarnation; a dead worker stays in both, for the loader's process handles.
        self.pids: dict[int, int] = {}
        self.exit_codes: dict[int, int] = {}
        self._owner = os.getpid()
        self._memory_kills = memory_kills() or 0  # earlier ones, and those of workers
        self._start = start
        self._keep = keep
        is_pickled = isinstance(job, bytes)
        self._job = pickled(job) if start == "auto" and not is_pickled else job
        self._zygote: ZygoteHandle | None = None
        self._owed: set[tuple[str, int]] = set()  # answers that the zygote owes, by worker
        self._workers: dict[int, Channel] = {}
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
        assert self._zygote is not None
        for message in self._zygote.receive_nowait():
            self._handle_message(*message)
        if self._zygote.ended:
            self._report_lost_zygote("the process that forks the workers died")

    def _report_lost_zygote(self, why: str) -> None:
        """Report the deaths of all workers: they die with their zygote, which is dead or killed."""
        ended = self._zygote
        self._end_zygote(patience_s=0.0)
        failure = Failure("crash", "WorkerDiedError", why)
        if ended is not None and ended.has_failed:
            from forebay.pools.main_module import NOT_BEGUN

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
            words = zygote.describe_exit(code, peak_bytes, memory if is_counted else None)
            pid = self.pids.get(incarnation)
            failure = Failure("crash", "WorkerDiedError", words, stacks, pid=pid)
            self._report_death(incarnation, WorkerDied(incarnation, failure, memory=memory))
        elif what == "stacks":
            if incarnation in self._workers:
                self._events.append(StacksTaken(incarnation, *facts))
        else:  # refused
            (failure,) = facts
            self._report_death(incarnation, WorkerDied(incarnation, failure))
