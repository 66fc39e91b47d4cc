"""Workers as processes of this machine: every core, and a death that harms nobody else.

The driver holds one channel a worker and one to the zygote (see `zygote.py`), and waits on all of
them at once: an answer, a death and the zygote's own death are each something to read. No lock
and no queue is shared, so there is nothing that a dying worker could take along.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, final

from forebay.engine.events import Cause, Event, WorkerDied
from forebay.engine.job import Assignment, Job
from forebay.engine.pools import zygote
from forebay.engine.pools.base import Pool
from forebay.engine.pools.channel import Channel, roomy_pipe
from forebay.errors import OptionError

# How long `close` leaves a worker to finish what it is doing before it is killed.
CLOSE_S = 0.5
# What the driver needs besides two descriptors a worker: files, the ledger, the terminal.
SPARE_DESCRIPTORS = 48

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[4]); "
    "from forebay.engine.pools.zygote import main; main(*map(int, sys.argv[1:4]))"
)


@final
class ProcessPool(Pool):
    """Runs each worker in a process of its own.

    Args:
        job: What the workers do. It is pickled once (by cloudpickle, so that functions of a
            script or a notebook travel too), however many workers there are.
        num_workers: How many will live at once, to see early whether descriptors suffice.

    Raises:
        OptionError: The job cannot be pickled, or there are too few descriptors.
    """

    def __init__(self, job: Job, num_workers: int) -> None:
        """Pickle the job and begin to bring up the zygote, which takes a moment."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        needed = 2 * num_workers + SPARE_DESCRIPTORS
        if soft != resource.RLIM_INFINITY and needed > soft:
            raise OptionError(
                f"num_workers={num_workers} needs about {needed} open files, {soft} are allowed\n"
                "  Nothing was started. Lower num_workers, or raise the limit: ulimit -n 4096"
            )
        self._payload = _pickled(job)
        self._selector = selectors.DefaultSelector()
        self._zygote: tuple[int, Channel] | None = None
        self._workers: dict[int, Channel] = {}
        self._blocked: set[int] = set()  # workers with messages that there was no room for
        self._events: list[Event] = []
        self._start_zygote()

    def start(self, worker: int) -> None:
        """Have the zygote fork a worker."""
        if self._zygote is None:
            self._start_zygote()
        (tasks, put), (get, answers) = roomy_pipe(), roomy_pipe()
        self._order(zygote.START, worker, descriptors=[tasks, answers])
        os.close(tasks)
        os.close(answers)
        os.set_blocking(put, False)
        self._workers[worker] = channel = Channel(get, put)
        self._selector.register(channel, selectors.EVENT_READ, worker)

    def send(self, worker: int, assignments: Sequence[Assignment]) -> None:
        """Queue the tasks in the worker's channel."""
        channel = self._workers.get(worker)
        if channel is None or channel.ended:
            return
        channel.queue([tuple(each) for each in assignments])
        if worker not in self._blocked and channel.flush():
            self._blocked.add(worker)
            self._selector.register(channel.outgoing, selectors.EVENT_WRITE, worker)

    def kill(self, worker: int) -> None:
        """Have the zygote take the worker's stacks and kill it."""
        self._order(zygote.KILL, worker)

    def wait(self, timeout: float | None) -> list[Event]:
        """Return what the workers said and who died."""
        if not self._events:
            for key, mask in self._selector.select(timeout):
                worker = key.data
                if worker is None:
                    self._hear_zygote()
                elif worker in self._workers:
                    if mask & selectors.EVENT_WRITE:
                        self._unblock(worker)
                    else:
                        self._hear(worker)
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Let idle workers go, kill the others, and see the zygote out."""
        for worker in list(self._workers):
            self._forget(worker)
        if self._zygote is not None:
            self._order(zygote.CLOSE, seconds=CLOSE_S)
            self._bury_zygote(patience_s=CLOSE_S + 1.0)
        self._selector.close()
        self._events.clear()

    # ---- the workers ---------------------------------------------------------------------------

    def _hear(self, worker: int) -> None:
        channel = self._workers[worker]
        self._events.extend(channel.receive_nowait())
        if channel.ended:  # it is dead or dying; the zygote tells how
            self._selector.unregister(channel)

    def _unblock(self, worker: int) -> None:
        channel = self._workers[worker]
        if not channel.flush():
            self._blocked.discard(worker)
            self._selector.unregister(channel.outgoing)

    def _forget(self, worker: int) -> None:
        channel = self._workers.pop(worker)
        if worker in self._blocked:
            self._blocked.discard(worker)
            self._selector.unregister(channel.outgoing)
        if not channel.ended:
            self._selector.unregister(channel)
        channel.close()

    def _lay_to_rest(self, worker: int, death: WorkerDied) -> None:
        """Hear a dead worker's last words, then report its death."""
        if worker in self._workers:
            channel = self._workers[worker]
            if not channel.ended:
                self._hear(worker)
            self._forget(worker)
            self._events.append(death)

    # ---- the zygote ----------------------------------------------------------------------------

    def _start_zygote(self) -> None:
        ours, theirs = socket.socketpair()
        get, news = os.pipe()
        with theirs:
            pid = _fork_zygote(theirs, news, self._payload)
            if pid is None:
                pid = _exec_zygote(theirs, news, self._payload)
        os.close(news)
        channel = Channel(get, ours.detach())
        self._selector.register(channel, selectors.EVENT_READ, None)
        self._zygote = pid, channel

    def _order(
        self, what: int, worker: int = 0, *, descriptors: Sequence[int] = (), seconds: float = 0.0
    ) -> None:
        if self._zygote is None:
            return
        order = zygote.ORDER.pack(what, worker, seconds)
        control = socket.socket(fileno=self._zygote[1].outgoing)
        # If the zygote is dead, `wait` reads its channel's end and says so.
        with suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(control, [order], list(descriptors))
        control.detach()  # the channel owns the descriptor

    def _hear_zygote(self) -> None:
        assert self._zygote is not None
        channel = self._zygote[1]
        for message in channel.receive_nowait():
            self._heed(*message)
        if channel.ended:
            self._bury_zygote(patience_s=0.0)
            cause = Cause("crash", "WorkerDiedError", "the process that forks the workers died")
            for worker in list(self._workers):
                self._lay_to_rest(worker, WorkerDied(worker, cause, blameless=True))

    def _heed(self, what: str, *facts: Any) -> None:
        if what == "exited":
            worker, code, peak_bytes, stacks = facts
            cause = Cause("crash", "WorkerDiedError", describe_exit(code, peak_bytes), stacks)
            self._lay_to_rest(worker, WorkerDied(worker, cause))
        else:
            (cause,) = facts
            for worker in list(self._workers):
                self._lay_to_rest(worker, WorkerDied(worker, cause))

    def _bury_zygote(self, patience_s: float) -> None:
        assert self._zygote is not None
        pid, channel = self._zygote
        self._zygote = None
        self._selector.unregister(channel)
        until = time.monotonic() + patience_s
        with selectors.DefaultSelector() as selector:
            selector.register(channel, selectors.EVENT_READ)
            while not channel.ended and (left := until - time.monotonic()) > 0:
                if selector.select(left):
                    channel.receive_nowait()
        channel.close()
        with suppress(ProcessLookupError, ChildProcessError):  # somebody's `wait` was quicker
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def describe_exit(code: int, peak_bytes: int) -> str:
    """Say how a worker ended, and what that usually means."""
    peak = f"peak memory {peak_bytes / 2**20:,.0f} MiB"
    if code >= 0:
        return f"the worker exited with code {code} ({peak}): the function ended its process"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    usual = {
        "SIGKILL": "usually the machine ran out of memory, or somebody killed it",
        "SIGSEGV": "native code crashed",
        "SIGBUS": "native code crashed, or a mapped file shrank",
        "SIGABRT": "native code gave up",
    }.get(name, "something sent it that signal")
    return f"the worker was killed by {name} ({peak}): {usual}"


def _pickled(job: Job) -> bytes:
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps(job))
    except Exception as error:
        raise OptionError(
            f"the work cannot be sent to worker processes: {type(error).__name__}: {error}\n"
            "  Pickling it failed, so nothing was started. Open files, locks, connections and "
            "generators cannot travel:\n"
            "  open them inside the function, or use backend='thread' or num_workers=0."
        ) from error


def _fork_zygote(theirs: socket.socket, news: int, payload: bytes) -> int | None:
    """Fork the zygote from this process; None where that is not safe.

    It is safe with a single thread, the kernel's count and not only Python's: a lock held by any
    other thread would stay locked in the child for ever.
    """
    try:
        if len(os.listdir("/proc/self/task")) != 1:
            return None
    except OSError:
        return None  # no way to know
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()  # or the child would print it once more
    pid = os.fork()
    if pid == 0:
        try:
            gc.freeze()  # nothing of the driver may be finalised here
            os.setsid()
            low, high = sorted((theirs.fileno(), news))
            for first, end in ((3, low), (low + 1, high), (high + 1, os.sysconf("SC_OPEN_MAX"))):
                os.closerange(first, end)
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            os.close(null)
            zygote.run(theirs, news, payload)
        finally:
            os._exit(1)
    return pid


def _exec_zygote(theirs: socket.socket, news: int, payload: bytes) -> int:
    """Start the zygote as a fresh interpreter."""
    with tempfile.TemporaryFile() as file:
        file.write(payload)
        file.seek(0)
        descriptors = theirs.fileno(), news, file.fileno()
        process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, *map(str, descriptors), json.dumps(sys.path)],
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    process.returncode = 0  # it is reaped by its number, see _bury_zygote
    return process.pid
