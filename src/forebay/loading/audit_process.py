"""A fork of the trainer that makes samples again, and can disturb nothing that the trainer has."""

from __future__ import annotations

import gc
import os
import select
import signal
import stat
import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from forebay.base.libraries import one_thread
from forebay.base.process import descriptors, descriptors_for_workers, die_with
from forebay.pools.worker import Channel, flush_streams
from forebay.pools.worker_files import own_position
from forebay.pools.zygote_handle import driver_ends, handlers_deferred, whole_recursion_limit

# How long a child that is told to end may take, and how long to wait between two looks.
END_S, LOOK_S = 1.0, 0.002


class AuditProcess:
    """A fork of this process that answers messages.

    Args:
        prepare: Called in the fork; returns what answers a message.
    """

    def __init__(self, prepare: Callable[[], Callable[[Any], Any]]) -> None:
        flush_streams()  # or the fork would print the buffered output again
        tasks, self._put = os.pipe()
        self._get, answers = os.pipe()
        driver_ends.update((self._put, self._get))
        driver, pid = os.getpid(), 0
        try:
            with one_thread(), handlers_deferred(), whole_recursion_limit():
                with warnings.catch_warnings():  # Python warns of other threads
                    warnings.simplefilter("ignore")
                    pid = os.fork()
                if pid == 0:
                    _serve(prepare, driver, tasks, answers)
        finally:
            if os.getpid() != driver:
                os._exit(1)
            os.close(tasks)
            os.close(answers)
        os.set_blocking(self._put, False)
        self._channel = Channel(self._get, self._put)
        self._end = weakref.finalize(self, _end, driver, pid, self._put, self._get)

    def close(self) -> float:
        """End the fork; return the processor time that it took, in seconds."""
        return self._end() or 0.0  # None if it has ended already

    def send(self, message: Any) -> bool:
        """Send a message, now or later; return whether it can be sent."""
        try:
            self._channel.queue(message)
            self._channel.flush()
        except Exception:  # noqa: BLE001 - of an index of the user's own class; closed at exit
            return False
        return True

    def received(self, seconds: float) -> list[Any] | None:
        """Return the answers that are there, or come within some time; None if it has ended."""
        channel, until = self._channel, time.monotonic() + seconds
        try:
            while not (found := channel.receive_nowait()) and not channel.ended:
                full = [channel.outgoing] if channel.flush() else []
                left = max(until - time.monotonic(), 0.0)
                if not any(select.select([channel], full, [], left)):
                    break
        except OSError:  # closed meanwhile, as the interpreter exits
            return None
        return found or (None if channel.ended else [])


def _end(driver: int, pid: int, put: int, get: int) -> float:
    """Have a child end, after the sample that it is making; kill one that does not.

    Returns:
        The processor time that it took, in seconds.
    """
    for each in (put, get):
        driver_ends.discard(each)
        with suppress(OSError):
            os.close(each)
    if os.getpid() != driver:  # a fork of the trainer
        return 0.0
    until = time.monotonic() + END_S
    with suppress(OSError):  # the program has reaped it
        while not (ended := os.wait4(pid, os.WNOHANG))[0]:
            if time.monotonic() > until:
                os.kill(pid, signal.SIGKILL)
                ended = os.wait4(pid, 0)
                break
            time.sleep(LOOK_S)
        return ended[2].ru_utime + ended[2].ru_stime
    return 0.0


# ---- the fork ------------------------------------------------------------------------------------


def _serve(
    prepare: Callable[[], Callable[[Any], Any]], driver: int, tasks: int, answers: int
) -> NoReturn:
    """Answer one message after the other; never returns."""
    try:
        gc.disable()  # no finalizer of the trainer's may run here
        die_with(driver)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        _isolate(tasks, answers)
        os.nice(5)
        warnings.simplefilter("ignore")
        answer, channel = prepare(), Channel(tasks, answers)
        while True:  # until the trainer closes its end
            channel.send(answer(channel.receive()))
    finally:
        os._exit(0)


def _isolate(*kept: int) -> None:
    """Share no position in a file with the trainer, and no connection.

    To read from a shared file would move where the trainer reads; to write to its connection to a
    database would be worse. Whoever uses a connection here gets an error.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for each in (0, 1, 2):
        os.dup2(null, each)
    kept_open = {0, 1, 2, null, *kept, *descriptors_for_workers}  # a fetcher tells forks apart
    for number in set(descriptors()) - kept_open:
        try:
            mode = os.fstat(number).st_mode
        except OSError:  # that of the listing itself
            continue
        if stat.S_ISDIR(mode):
            continue
        if not stat.S_ISREG(mode):
            os.dup2(null, number)
            continue
        try:
            own_position(number)
        except OSError:  # it may not be opened any more
            os.dup2(null, number)
