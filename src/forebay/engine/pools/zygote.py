"""The zygote: a small, single-threaded process that forks the workers and watches over them.

    driver ──── start, kill, close ────> zygote ── fork ──> worker, worker, …
       ^  <──────── exited, broken ─────────┘                  │
       └───────────── one channel a worker ────────────────────┘

The driver may hold threads, locks and libraries that do not survive a fork; the zygote holds the
job and nothing else, so a replacement for a dead worker is there in milliseconds and safe (as
long as importing the user's code starts no thread of its own). The
zygote is forked from the driver where that is safe (`processes.py` says when), and is otherwise
a fresh interpreter.

Guarantees: a worker's exit is reported once, with its status, its peak memory and the Python
stacks of a crash or hang; whatever it had started dies with it. When the driver dies, the zygote
kills every worker with all that it started; when the zygote dies, the kernel kills the workers (on
Linux).
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import pickle
import select
import signal
import socket
import struct
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from forebay.engine.events import Event, TaskFailed, TaskFinished
from forebay.engine.job import Assignment, Job
from forebay.engine.pools.channel import Channel
from forebay.engine.pools.worker import failure_of, portable, serve

# Orders from the driver, all of one size: what, which worker, its lane, seconds. "start" carries
# the worker's ends of its channel.
ORDER = struct.Struct("!BxxxIId")
START, KILL, CLOSE = range(3)

# How long a condemned worker has to write down its stacks.
STACKS_S = 0.25
# The end of the stacks that is kept: deep recursion makes long ones.
STACKS_BYTES = 16_384
_PR_SET_PDEATHSIG = 1
_CREDENTIALS = struct.Struct("3i")  # of a socket's maker: process, user, group


@dataclass(slots=True)
class _Child:
    incarnation: int
    stacks: int  # descriptor of the file that faulthandler writes to
    kill_at: float | None = None


def run(control: socket.socket, news: int, job: Job | bytes) -> NoReturn:
    """Serve the driver until it closes or dies; never returns.

    Args:
        control: Brings the driver's orders.
        news: Descriptor of the pipe that takes what there is to tell.
        job: The job, or the pickled job.
    """
    code = 1
    try:
        zygote = _Zygote(control, news, job)
        try:
            zygote.serve()
            code = 0
        finally:  # also where the driver died while it was told something
            zygote.kill_all()
    finally:
        os._exit(code)


def main(control: int, news: int, payload: int) -> NoReturn:
    """Serve in a fresh interpreter; as `run`, with descriptors, the payload's that of a file."""
    with os.fdopen(payload, "rb") as file:
        body = file.read()
    run(socket.socket(fileno=control), news, body)


class _Zygote:
    def __init__(self, control: socket.socket, news: int, job: Job | bytes) -> None:
        self._control = control
        self._news = news
        self._driver = Channel(control.fileno(), news)
        self._driver_ended = _watch_maker_of(control)
        self._children: dict[int, _Child] = {}
        self._closing_at: float | None = None
        self._woken, wake = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._job: Job | None = None
        try:
            # From the driver, never from a disk.
            self._job = pickle.loads(job) if isinstance(job, bytes) else job  # noqa: S301
        except BaseException as error:  # noqa: BLE001 - whatever importing user code raises
            self._driver.send(("broken", failure_of(error)))
        gc.freeze()  # keep the collector from touching, and so copying, what the workers share

    def serve(self) -> None:
        control = self._control.fileno()
        arrivals = select.poll()  # unlike select() it takes numbers beyond 1,023
        for descriptor in (control, self._woken, *self._driver_ended):
            arrivals.register(descriptor, select.POLLIN)
        while True:
            now = time.monotonic()
            due = [child.kill_at for child in self._children.values() if child.kill_at is not None]
            if self._closing_at is not None:
                due.append(self._closing_at)
            timeout = max(min(due) - now, 0.0) * 1000 if due else None
            ready = {descriptor for descriptor, _ in arrivals.poll(timeout)}
            if self._woken in ready:
                os.read(self._woken, 4096)
            if not ready.isdisjoint(self._driver_ended):
                break
            if control in ready and not self._obey():
                break
            self._reap()
            now = time.monotonic()
            for pid, child in self._children.items():
                if child.kill_at is not None and child.kill_at <= now:
                    child.kill_at = None
                    _kill_group(pid)
            if self._closing_at is not None and (not self._children or self._closing_at <= now):
                break

    def kill_all(self) -> None:
        for pid in self._children:
            _kill_group(pid)

    def _obey(self) -> bool:
        """Do what the driver says next; return False when it is gone."""
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
                    child.kill_at = time.monotonic() + STACKS_S
                    os.kill(pid, signal.SIGUSR1)  # faulthandler writes the stacks
        else:
            self._closing_at = time.monotonic() + seconds
        return True

    def _fork(self, incarnation: int, worker_id: int, descriptors: list[int]) -> None:
        if self._job is None:
            for descriptor in descriptors:
                os.close(descriptor)
            return
        stacks = _scratch_file()
        zygote, (told, telling) = os.getpid(), os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                _die_with(zygote)
                os.close(telling)
                os.read(told, 1)  # until the driver has its number, to kill it by should we die
                os.close(told)
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                self._control.close()
                for descriptor in (self._news, *self._driver_ended):
                    os.close(descriptor)
                for child in self._children.values():
                    os.close(child.stacks)
                _be_a_worker(incarnation, worker_id, self._job, Channel(*descriptors), stacks)
            finally:
                os._exit(1)
        for descriptor in descriptors:
            os.close(descriptor)
        self._children[pid] = _Child(incarnation, stacks)
        self._driver.send(("forked", incarnation, pid))
        os.close(told)
        os.close(telling)

    def _reap(self) -> None:
        while self._children:
            dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if dead is None:
                return
            _kill_group(dead.si_pid)  # what it had started; its number is not free yet
            pid, status, usage = os.wait4(dead.si_pid, 0)
            child = self._children.pop(pid, None)
            if child is None:
                continue
            stacks = _read_end(child.stacks)
            peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
            code = os.waitstatus_to_exitcode(status)
            self._driver.send(("exited", child.incarnation, code, peak, stacks))


def _be_a_worker(
    incarnation: int, worker_id: int, job: Job, channel: Channel, stacks: int
) -> NoReturn:
    """Run a worker in this freshly forked process; never returns."""
    os.setpgid(0, 0)  # so that a kill takes along what the user's function has started
    _die_first_when_memory_runs_out()
    faulthandler.enable(stacks, all_threads=True)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)

    def receive(wait: bool) -> list[Assignment] | None:
        try:
            if wait:
                return [Assignment(*each) for each in channel.receive()]
            return [Assignment(*each) for batch in channel.receive_nowait() for each in batch]
        except (EOFError, ConnectionError):
            return None

    def report(event: Event) -> None:
        if isinstance(event, TaskFailed):
            event = portable(event)
        try:
            channel.send(event)
        except ConnectionError:
            os._exit(0)  # the driver is gone, and with it whoever would want the answer
        except Exception as error:  # the result cannot be pickled
            if not isinstance(event, TaskFinished):
                raise
            bad = TaskFailed(
                incarnation, event.task, event.attempt, failure_of(error), event.seconds, final=True
            )
            channel.send(portable(bad))

    serve(incarnation, worker_id, job, receive, report)
    flush_streams()
    os._exit(0)


def flush_streams() -> None:
    """Write out what was printed so far, if anybody can still read it."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # there is none, or it is closed
            stream.flush()


def _watch_maker_of(control: socket.socket) -> list[int]:
    """Return a descriptor that is ready to read when the process that made the socket has ended.

    The end of the socket itself does not come while a fork of that process lives: it has a copy.
    There is none where the system has no such descriptors, and where the process is gone already.
    """
    if not hasattr(os, "pidfd_open"):
        return []
    credentials = control.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    with suppress(OSError):
        return [os.pidfd_open(_CREDENTIALS.unpack(credentials)[0])]
    return []


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, where it can."""
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _prctl(option: int, value: int) -> Any:
    return ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _die_first_when_memory_runs_out() -> None:
    """Make the kernel's out-of-memory killer choose a worker, never the driver."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass  # not Linux, or not permitted: the kernel then chooses by size


def _scratch_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("forebay-stacks")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _read_end(descriptor: int) -> str:
    """Return the last part of a scratch file as text, and close it."""
    size = os.fstat(descriptor).st_size
    data = os.pread(descriptor, STACKS_BYTES, max(size - STACKS_BYTES, 0))
    os.close(descriptor)
    return _without_our_frames(data.decode(errors="replace"))


def _without_our_frames(stacks: str) -> str:
    """Drop the frames that led to the job: everything outward of the worker's loop."""
    kept, ours = [], False
    for line in stacks.splitlines(keepends=True):
        ours = line.startswith("  ") and (ours or "/engine/pools/worker.py" in line)
        if not ours:
            kept.append(line)
    return "".join(kept)


def _kill_group(pid: int) -> None:
    """Kill a worker that was not reaped yet, with every process that it started."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)  # it has not made its group yet
