"""Threads that fetch several samples at once, for `concurrency`."""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

from forebay.base.thread_ends import join_threads

# With `concurrency`, so many times as many samples are being fetched, or wait for a thread or for
# their batch, besides those of the batch that is being made.
AHEAD = 2

# How long `close` waits in total for threads that are in the middle of a sample.
CLOSE_S = 1.0

_Queue = queue.SimpleQueue[tuple["Future[Any]", Callable[[], Any]] | None]


class SampleThreads:
    """Threads that make calls in the order in which these are submitted.

    They are daemons, unlike those of `concurrent.futures`: nothing waits for a sample that hangs.

    Args:
        around: What each thread does its work in.
    """

    def __init__(
        self, count: int, around: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        self._count, self._around = count, around
        self._begin()

    def _begin(self) -> None:
        self.threads: list[threading.Thread] = []
        self.process = os.getpid()
        self._calls: _Queue = queue.SimpleQueue()
        # Drops the calls that are not begun, and ends the threads, which do not keep it alive.
        self.end = weakref.finalize(self, _end, self._calls, self._count)

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Have a thread make a call; the future has what it returns or raises."""
        if self.process != os.getpid():  # a fork lacks the threads
            self._begin()
        future: Future[Any] = Future()
        self._calls.put((future, call))
        if len(self.threads) < self._count:
            name = f"forebay-sample-{len(self.threads)}"
            args = self._calls, self._around
            thread = threading.Thread(target=_make_calls, args=args, name=name, daemon=True)
            thread.start()
            self.threads.append(thread)
        return future

    def close(self) -> None:
        """Drop the calls that are not begun, and wait for a moment for those that are."""
        self.end()
        join_threads(self.threads, CLOSE_S)


def _end(calls: _Queue, count: int) -> None:
    with suppress(queue.Empty):
        while submitted := calls.get_nowait():
            submitted[0].cancel()
    for _ in range(count):
        calls.put(None)


def _make_calls(calls: _Queue, around: Callable[[], AbstractContextManager[Any]]) -> None:
    with around():
        while (submitted := calls.get()) is not None:
            future, call = submitted
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:  # noqa: BLE001 - whoever takes the result raises it
                    future.set_exception(error)
            del submitted, future, call  # while it waits for the next one, nothing holds these
