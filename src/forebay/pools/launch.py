"""Three ways to start the zygote; each passes it a job and two descriptors.

fork      a copy of this process: immediate, and nothing is pickled; torch's default on Linux
execute   a new interpreter, with a command line; the job is pickled by cloudpickle
spawn     by a multiprocessing context, with its rules for `__main__` and for pickling

A new interpreter gets the flags of this one, and `-P`: Python would otherwise look for modules in
the working folder first, and run a `json.py` that is among the inputs. The job is unpickled with
this process's `sys.path`, so the user's modules are found as they are here.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from types import FrameType
from typing import Any

from forebay.base.libraries import one_thread
from forebay.base.process import standard_library_first
from forebay.errors import OptionError
from forebay.pools import zygote
from forebay.pools.events import Job
from forebay.pools.zygote import scratch_file

# The folders are for importing forebay; `main` sets the path that the job is unpickled with.
_BOOT = (
    "import sys; sys.path[:] = sys.argv[4:]; "
    "from forebay.pools.zygote import main; main(*map(int, sys.argv[1:4]))"
)
_SAFE_PATH = "PYTHONSAFEPATH"


def is_single_threaded() -> bool:
    """Return whether a fork is safe because no other thread can hold a lock.

    The kernel's threads count, not only Python's.
    """
    try:
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:
        return False  # no way to know


def occupy_standard_descriptors() -> None:
    """Open /dev/null where 0, 1 or 2 is closed, as in some daemons.

    Otherwise the next file opened would get that number, and code that prints would write to it.
    """
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
    """Fork the zygote from this process.

    Args:
        closing: Descriptors that the zygote must not keep; None for all but its own two.
    """
    zygote.flush_streams()  # or the child would print the buffered output again
    driver, pid = os.getpid(), 0
    try:
        with one_thread(), handlers_deferred():
            pid = os.fork()
        if pid == 0:
            gc.freeze()  # no object of the driver may be finalized here
            os.setsid()
            if closing is None:
                low, high = sorted((control.fileno(), answers))
                last = os.sysconf("SC_OPEN_MAX")
                for first, end in ((3, low), (low + 1, high), (high + 1, last)):
                    os.closerange(first, end)
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
    with os.fdopen(scratch_file(), "w+b") as file:
        pickle.dump((sys.path, sys.argv), file)
        file.write(payload)
        file.seek(0)  # which writes what is buffered
        descriptors = control.fileno(), answers, file.fileno()
        process = subprocess.Popen(
            [
                *(sys.executable, *_interpreter_flags(), "-P", "-c", _BOOT),
                *map(str, descriptors),
                *standard_library_first(),
            ],
            pass_fds=(*descriptors, *keep),
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
            f"{kind.__name__}, which is no process\n"
            "  Nothing was started. Use backend='thread' for workers that are threads, or "
            "'fork', 'spawn' or 'forkserver'."
        )
    ends = _Descriptor(control.fileno()), _Descriptor(answers)
    is_fork = context.get_start_method() == "fork"
    with _safe_path() as earlier, one_thread() if is_fork else nullcontext():
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


class _Descriptor:
    """A descriptor that is passed to a process started by `multiprocessing`."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __getstate__(self) -> Any:
        return DupFd(self._number)

    def __setstate__(self, duplicate: Any) -> None:
        self._number = duplicate.detach()

    def detach(self) -> int:
        return self._number


def _spawned(
    control: _Descriptor, answers: _Descriptor, job: Job, safe_path: str | None, is_fork: bool
) -> None:
    _restore_safe_path(safe_path)  # what the user's function starts must not inherit it
    os.setsid()  # Ctrl-C is for the driver
    channel = socket.socket(fileno=control.detach())
    zygote.run(channel, answers.detach(), job, is_limited=is_fork)
