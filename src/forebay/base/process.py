"""This process: what identifies it, its threads, descriptors, `sys.path`; ties to other ones."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import os
import resource
import signal
import socket
import stat
import struct
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from forebay.base.machine import PROC, process_limits, read_proc
from forebay.errors import OptionError, WorkerDiedError

# ---- identity ------------------------------------------------------------------------------------
# Tell a process from a later one with the same ID, and from one of another machine.


def kernel() -> str:
    """Return the running kernel and its namespace of process IDs; "" where that is not known."""
    try:
        boot = read_proc("sys/kernel/random/boot_id").decode().strip()
        return f"{boot} {os.readlink(f'{PROC}/self/ns/pid')}"
    except OSError:
        return ""


def state_and_start(pid: int) -> tuple[str, str]:
    """Return a process's state and when it started; both "" where that cannot be seen."""
    try:
        # The name in brackets may itself hold brackets and spaces.
        fields = read_proc(f"{pid}/stat").rpartition(b")")[2].decode().split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


def is_alive(pid: int, process_start: str) -> bool:
    """Return whether a process of this machine is there, and not another with the same ID."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        pass  # another user's process
    state, start = state_and_start(pid)
    return state not in ("Z", "X") and start in ("", process_start)


# ---- descriptors ---------------------------------------------------------------------------------

# Without /proc, higher ones are not looked for: the system gives the lowest that is free.
_MOST_DESCRIPTORS = 1 << 16
# Descriptors that workers need beside their own: what is sent to them names these by number.
descriptors_for_workers: set[int] = set()


def descriptor_path(descriptor: int) -> str | None:
    """Return a path of what a descriptor of this process has open; None without /proc."""
    path = f"{PROC}/self/fd/{descriptor}"
    return path if os.path.exists(path) else None


def descriptors() -> Iterable[int]:
    """Return the descriptors that this process may have open: all of those, and perhaps others."""
    try:
        return map(int, os.listdir(f"{PROC}/self/fd"))
    except OSError:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return range(min(limit, _MOST_DESCRIPTORS))


def read_positions() -> dict[int, tuple[str, int]]:
    """Return, by descriptor, the path and the position of each file open for reading alone."""
    found = {}
    with suppress(OSError):  # no /proc
        for name in os.listdir("/proc/self/fd"):
            fd = int(name)
            with suppress(OSError):  # that of the listing itself is closed by now
                is_read = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
                if is_read and stat.S_ISREG(os.fstat(fd).st_mode):
                    path = os.readlink(f"/proc/self/fd/{name}")
                    found[fd] = path, os.lseek(fd, 0, os.SEEK_CUR)
    return found


def moved_since(before: dict[int, tuple[str, int]]) -> set[str]:
    """Return the files whose positions have changed since `read_positions` returned `before`."""
    now = read_positions()
    return {found[0] for fd, found in before.items() if now.get(fd, found) != found}


# ---- files in memory -----------------------------------------------------------------------------
# Files without a name, for what processes share.

# As in <linux/memfd.h>.
_CLOEXEC = 1
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - the file has no name there

_was_warned = False


def memory_file(name: str) -> int:
    """Return the descriptor of a new file in memory, closed on exec.

    Where the system refuses such files, it is an unlinked file: in /dev/shm if that is a folder,
    otherwise in the folder for temporary files, with a warning, since that may be on a disk.

    Args:
        name: Shown in /proc, behind "memfd:".

    Raises:
        OSError: No file can be made anywhere.
    """
    for create in (_by_python, _by_libc):
        with suppress(AttributeError, OSError):
            return create(name)
    if os.path.isdir(_SHARED_MEMORY):
        with suppress(OSError):
            return _unlinked(_SHARED_MEMORY)
    import tempfile  # not above: it imports `random`, and a user's module may have that name

    folder = tempfile.gettempdir()
    found = _unlinked(folder)
    _warn_once(folder)
    return found


def memory_file_of(name: str, data: bytes) -> int:
    """Return the descriptor of a new file in memory with a content."""
    file = memory_file(f"forebay-{name}")
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
    return file


def _by_python(name: str) -> int:
    return os.memfd_create(name, os.MFD_CLOEXEC)


def _by_libc(name: str) -> int:
    """Make the system call where Python was built without it, as conda's was."""
    descriptor = int(ctypes.CDLL(None, use_errno=True).memfd_create(name.encode(), _CLOEXEC))
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "memfd_create")
    return descriptor


def _unlinked(folder: str) -> int:
    import tempfile

    # O_TMPFILE never gives the file a name; without it, the file has one for a moment.
    with tempfile.TemporaryFile(dir=folder, prefix="forebay-", buffering=0) as file:
        return os.dup(file.fileno())


def _warn_once(folder: str) -> None:
    global _was_warned  # noqa: PLW0603 - once for the whole process
    if not _was_warned:
        _was_warned = True
        warnings.warn(
            f"this system refuses files in memory, so unlinked files in {folder} serve\n"
            "  If that folder is on a disk, batches are written there. Set TMPDIR to a folder in "
            "memory (tmpfs), or allow memfd_create.",
            RuntimeWarning,
            stacklevel=2,
        )


# ---- waiting -------------------------------------------------------------------------------------
# Waits that may last: Ctrl-C ends each within a second, whenever it comes.
#
# Python looks for signals before a wait. One that arrives between that look and the wait does not
# interrupt a wait without a limit, and the program would ignore Ctrl-C until the wait ends by
# itself.

LONGEST_WAIT_S = 1.0
# How long the end of the interpreter waits at least for threads in the middle of their work.
EXIT_S = 5.0


def wait_until(wait: Callable[[float], object]) -> None:
    """Call `wait(seconds)` until what it returns is true."""
    while not wait(LONGEST_WAIT_S):
        pass


def join_thread(thread: threading.Thread) -> None:
    """Wait until a thread has ended."""
    while thread.is_alive():
        thread.join(LONGEST_WAIT_S)


def join_threads(threads: Iterable[threading.Thread], seconds: float) -> None:
    """Wait until threads have ended, for at most `seconds` in all.

    At the interpreter's end it waits for up to `EXIT_S`: a daemon thread that comes out of an
    operation of torch when the interpreter is gone aborts the process (`std::terminate`).
    """
    if not threading.main_thread().is_alive():  # what runs at exit runs after it
        seconds = max(seconds, EXIT_S)
    until = time.monotonic() + seconds
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(until - time.monotonic(), 0.0))


# ---- refusals ------------------------------------------------------------------------------------
# What to say when the system refuses processes or threads.


@contextmanager
def limits_in_words() -> Iterator[None]:
    """Raise WorkerDiedError, with what to do, if the system refuses to start processes."""
    try:
        yield
    except OSError as error:
        raise refused("worker processes", error) from error


def start_thread(thread: threading.Thread) -> None:
    """Start a thread; raise WorkerDiedError, with what to do, if the system refuses it."""
    try:
        thread.start()
    except RuntimeError as error:
        raise refused("threads", error) from error


def refused(what: str, error: BaseException) -> WorkerDiedError:
    """Return the error for processes or threads that the system refuses, with what to do."""
    return WorkerDiedError(
        f"{what} cannot be started: {error}\n"
        "  Nothing counts as failed because of it.\n"
        f"  A limit may be reached: {'; '.join(process_limits())}; of memory; or of space for "
        "temporary files (TMPDIR). Raise it, or lower num_workers."
    )


# ---- gc threshold --------------------------------------------------------------------------------
# How often Python's garbage collector looks for reference cycles during a run.

# New objects after which it looks for them during a run; Python's default is 700.
_COLLECT_EVERY = 50_000


@contextmanager
def fewer_collections() -> Iterator[None]:
    """Let Python look for reference cycles less often, while no user code runs in this thread."""
    before = gc.get_threshold()
    is_ours = 0 < before[0] < _COLLECT_EVERY  # not if it is off, or another run has done this
    if is_ours:
        gc.set_threshold(_COLLECT_EVERY, *before[1:])
    try:
        yield
    finally:
        if is_ours:
            gc.set_threshold(*before)


# ---- import path ---------------------------------------------------------------------------------
# `sys.path`: the standard library comes before every folder that forebay adds.
#
# The working folder often holds data. A file `json.py` in it must not replace Python's own module.

_STANDARD_LIBRARY = os.path.dirname(os.__file__)


def add_folder(folder: str) -> None:
    """Have modules of a folder found: before installed packages, after the standard library."""
    if folder not in sys.path:
        last = max((at for at, each in enumerate(sys.path) if _is_standard(each)), default=-1)
        sys.path.insert(last + 1, folder)


def standard_library_first() -> list[str]:
    """Return `sys.path` with the standard library's own folders moved to its front."""
    return sorted(sys.path, key=lambda folder: not _is_standard(folder))


def _is_standard(folder: str) -> bool:
    return folder == _STANDARD_LIBRARY or os.path.basename(folder) == "lib-dynload"


# ---- signals -------------------------------------------------------------------------------------

# What schedulers and users send to all processes of a program, whose own process handles it. The
# first ones say something to it; the others end it, and its workers with it.
FOR_THE_PROGRAM = signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2
SENT_TO_ALL = (*FOR_THE_PROGRAM, signal.SIGINT, signal.SIGTERM)


@contextmanager
def signals_held() -> Iterator[None]:
    """Let these signals wait; also in a process that the block starts.

    It begins like this, so no handler that it has inherited, or imports, is called in it before
    `leave_signals_to_program`.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SENT_TO_ALL)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def handler_kept(number: int) -> Iterator[None]:
    """Install the program's handler for a signal again, if it has one, after the block."""
    before = signal.getsignal(number)
    try:
        yield
    finally:
        if callable(before) and threading.current_thread() is threading.main_thread():
            signal.signal(number, before)


def handled_signals() -> tuple[int, ...]:
    """Return those of `FOR_THE_PROGRAM` for which this process has a handler."""
    return tuple(each for each in FOR_THE_PROGRAM if callable(signal.getsignal(each)))


def leave_signals_to_program(handled: Iterable[int]) -> None:
    """Ignore those that the program handles, or this process; SIGINT and SIGTERM end it."""
    for each in {*handled, *handled_signals()}:
        signal.signal(each, signal.SIG_IGN)
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_DFL)


# ---- ties ----------------------------------------------------------------------------------------
# Calls of Linux: a process ends or continues when another has ended, or is the first to be killed.

# Values for /proc/PID/oom_score_adj: which process of this program the kernel kills first.
OOM_FIRST, OOM_AFTER_WORKERS = 1000, 999


def die_when_memory_runs_out(score: int = OOM_FIRST) -> None:
    """Make the kernel's out-of-memory killer choose this process before the program that began it.

    Args:
        score: OOM_FIRST for a worker, OOM_AFTER_WORKERS for a process that workers need.
    """
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(score))


# From <linux/prctl.h>.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_CREDENTIALS = struct.Struct("3i")  # of a socket's maker: process, user, group


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def continue_when_driver_ends(control: int) -> None:
    """Have the kernel continue this process, should it be stopped, when the driver is gone.

    A stopped process does not notice that its socket was closed. The kernel also sends SIGCONT with
    each order, and when the thread that started this process ends; a running process ignores it.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)  # also if a fork of the driver lives on
    fcntl.fcntl(control, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(control, fcntl.F_SETSIG, signal.SIGCONT)
    fcntl.fcntl(control, fcntl.F_SETFL, fcntl.fcntl(control, fcntl.F_GETFL) | os.O_ASYNC)


def watch_maker_of(control: socket.socket) -> list[int]:
    """Return a descriptor that is ready to read when the process that made the socket has ended.

    The socket itself stays open while a fork of that process lives, which has a copy. The list is
    empty if the kernel or this Python has no such descriptors, or the process has already ended.
    """
    credentials = control.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    with suppress(AttributeError, OSError):
        return [os.pidfd_open(_CREDENTIALS.unpack(credentials)[0])]
    return []


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent has ended."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


# ---- workers -------------------------------------------------------------------------------------
# Whether this process is a worker, or imports the user's code for workers.

_is_loading, _is_worker = False, False


def check_not_loading(call: str) -> None:
    """Raise OptionError if a module that a worker imports makes this call when it is imported."""
    if not _is_loading:
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    where = "a module" if frame is None else f"{frame.f_code.co_filename}, line {frame.f_lineno},"
    raise OptionError(
        f"{where} calls forebay.{call} when it is imported, and workers import it for a function "
        "in it: each would make the call again\n"
        "  No input was processed. Put the call into a function, or under "
        "`if __name__ == '__main__':`."
    )


def is_worker() -> bool:
    """Return whether this process is one of forebay's workers, or forks them."""
    return _is_worker


def become_worker() -> None:
    """Note that this process is a worker, or forks them."""
    global _is_worker  # noqa: PLW0603 - of this process
    _is_worker = True


@contextmanager
def importing_work() -> Iterator[None]:
    """Note, in the block, that modules are imported for what workers run."""
    global _is_loading  # noqa: PLW0603 - of this process
    _is_loading = True
    try:
        yield
    finally:
        _is_loading = False
