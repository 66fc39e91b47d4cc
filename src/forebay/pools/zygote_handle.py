"""The driver's end of a zygote: start it, send orders, receive answers, monitor and end it.

There are three ways to start a zygote; each passes it a job and two descriptors:

    fork      a copy of this process: immediate, and nothing is pickled; torch's default on Linux
    execute   a new interpreter, with a command line; the job is pickled by cloudpickle
    spawn     by a multiprocessing context, with its rules for `__main__` and for pickling

A new interpreter gets the flags of this one, and `-P`: Python would otherwise look for modules in
the working folder first, and run a `json.py` that is among the inputs. The job is unpickled with
this process's `sys.path`, so the user's modules are found as they are here.

The zygote must answer each order and report each death. If an answer is due and the zygote sends
nothing, it is sent SIGCONT after CHECK_S, in case it was stopped, and given up after ZYGOTE_S.
"""

from __future__ import annotations

import gc
import os
import pickle
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from itertools import pairwise
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from operator import methodcaller
from types import FrameType
from typing import Any, Literal

from forebay.base.generator_search import noted
from forebay.base.libraries import one_thread
from forebay.base.process import (
    descriptors_for_workers,
    handled_signals,
    memory_file,
    signals_held,
    standard_library_first,
)
from forebay.errors import OptionError
from forebay.pools import zygote
from forebay.pools.descendants import kill_descendants
from forebay.pools.events import Job
from forebay.pools.worker import Channel, flush_streams

# The folders are for importing forebay; the zygote sets the path that the job is unpickled with.
_BOOT = (
    "import sys; sys.path[:] = sys.argv[4:]; "
    "from forebay.pools import zygote; "
    "zygote.serve_in_new_interpreter(*map(int, sys.argv[1:4]))"
)
_SAFE_PATH = "PYTHONSAFEPATH"


def is_single_threaded() -> bool:
    """Return whether a fork is safe: no other thread, of Python or not, can hold a lock."""
    try:
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:
        return False  # no way to know


def fork(
    control: socket.socket, answers: int, job: Job | bytes, closing: Iterable[int] | None
) -> int:
    """Fork the zygote, which closes these descriptors; None for all that it has no use for."""
    flush_streams()  # or the child would print the buffered output again
    driver, pid, handled = os.getpid(), 0, handled_signals()
    try:
        finds = isinstance(job, bytes) or getattr(job, "finds_generators", False)
        known = noted() if finds else nullcontext()
        with known, one_thread(), handlers_deferred(), whole_recursion_limit():
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
            zygote.run(control, answers, job, handled, is_limited=True)
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
    import subprocess

    with os.fdopen(memory_file("forebay"), "w+b") as file:
        script = vars(sys.modules["__main__"]).get("__file__")
        pickle.dump((sys.path, sys.argv, script, handled_signals()), file)
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


# If multiprocessing's forkserver is killed: how long to try to start a process with another one,
# how long to wait between two tries, and the exit code of a process that it had started.
SERVER_S, SERVER_WAIT_S, SERVER_KILLED = 10.0, 0.02, 255


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
        given = *ends, job, earlier, handled_signals(), is_fork
        until = time.monotonic() + SERVER_S
        try:
            while True:
                process = kind(target=_spawned, args=given, daemon=True)
                try:
                    process.start()
                    break
                except (EOFError, ConnectionError):  # it was killed, and may be about to end
                    if time.monotonic() > until:
                        raise
                    time.sleep(SERVER_WAIT_S)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            from forebay.pools.pickling import culprit

            error.add_note(
                f"forebay: the start method {context.get_start_method()!r} pickles what workers "
                f"run, and functions by their names: {culprit(job, error, pickle.Pickler)}; no "
                "worker was started.\n"
                "  Define lambdas and local functions at the top of a module instead; or pass "
                "multiprocessing_context='fork', whose workers get everything as it is."
            )
            raise
    return process


def _interpreter_flags() -> list[str]:
    """Return the flags of this interpreter, the same that multiprocessing passes on."""
    import subprocess

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


def _spawned(
    control: int,
    answers: int,
    job: Job,
    safe_path: str | None,
    handled: Iterable[int],
    is_fork: bool,
) -> None:
    _restore_safe_path(safe_path)  # what the user's function starts must not inherit it
    os.setsid()  # Ctrl-C is for the driver
    zygote.run(socket.socket(fileno=control), answers, job, handled, is_limited=is_fork)


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

    _channel: Channel

    def __init__(self, job: Job | bytes, start: Start, keep: Sequence[int]) -> None:
        self._spawned: Any = None  # the multiprocessing.Process, if it was spawned
        self._is_loaded = False  # whether it has loaded the job
        self.has_failed = False  # whether, if it was spawned, it could not: another cannot either
        self._silent_s = 0.0
        self._checked_at = time.monotonic()
        is_server = False
        if isinstance(start, BaseContext) and (method := start.get_start_method()) != "fork":
            from multiprocessing import resource_tracker

            is_server = method == "forkserver"
            # It stays; and if the next block began it, it would let some of these through there.
            with signals_held(), _safe_path():
                resource_tracker.ensure_running()
        try:
            # Not those of a server that outlives this block, and whose children inherit its mask.
            with nullcontext() if is_server else signals_held():
                self._begin(job, start, keep)
        except BaseException:  # raised by a handler, when signals that have waited are delivered
            if hasattr(self, "_channel"):
                self.end(0.0)
            raise

    def _begin(self, job: Job | bytes, start: Start, keep: Sequence[int]) -> None:
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
            is_failure = 0 < self._spawned.exitcode != SERVER_KILLED
            self.has_failed = is_failure and not self._is_loaded
            self._spawned.close()
        else:
            with suppress(ProcessLookupError, ChildProcessError):  # it was reaped by another `wait`
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
        return messages


def describe_exit(code: int, peak_bytes: int, memory: int | None = None) -> str:
    """Describe how a worker ended, and what that usually means.

    Args:
        memory: If the system killed it because memory ran out: the bytes that may be used.
    """
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
    if memory is not None:
        usual = (
            "the kernel killed it because this program ran out of memory, of which it may use "
            f"{memory / 2**20:,.0f} MiB"
        )
    return f"the worker was killed by signal: {words} ({name}; {peak}): {usual}"


@contextmanager
def whole_recursion_limit() -> Iterator[None]:
    """Give a process that is forked in the block the whole recursion limit of this one.

    It has this thread's calls below its own, and would end where these are nearly as deep.
    """
    process, limit, depth = os.getpid(), sys.getrecursionlimit(), 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        frame, depth = frame.f_back, depth + 1
    sys.setrecursionlimit(limit + depth)
    try:
        yield
    finally:
        if os.getpid() == process:
            sys.setrecursionlimit(limit)
