"""Run the engine of a feed: in the caller's thread, while it waits, or in a background thread.

    CallerDriver       the engine runs only within `wait`: no thread in the trainer's process
    BackgroundDriver   a thread runs it, so that workers get work while the trainer is busy

If each request is for one worker, the caller's thread is enough: every worker has its requests in
advance. If any worker may make the next batch, a thread sends it as soon as a worker is free.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from forebay.base.process import LONGEST_WAIT_S, join_threads, start_thread
from forebay.engine.commands import Outcome
from forebay.engine.engine import COLLECT_S, Engine
from forebay.pools.base import Pool

# Answers are collected only while so many results are ready: the trainer may need several
# meanwhile, and collecting does not end early.
READY_TO_COLLECT = 8

Outcomes = Callable[[Sequence[Outcome]], None]


class CallerDriver:
    """Runs the engine in the caller's thread, within `wait`.

    Attributes:
        error: The exception that ended the driver; None while it runs.
    """

    releases_lazily = True

    def __init__(self, engine: Engine, pool: Pool, outcomes: Outcomes) -> None:
        self.error: BaseException | None = None
        self._engine, self._pool, self._outcomes = engine, pool, outcomes
        self._is_over = False

    def call(self, function: Callable[[], None]) -> None:
        """Call a function that uses the engine, now."""
        function()

    call_and_wait = call

    def wait(self, is_ready: Callable[[], bool], until: float | None) -> None:
        """Wait until something is ready or the time `until` has come, in monotonic seconds."""
        while not is_ready() and not self._is_over:
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                return
            self.poll(left)

    def poll(self, seconds: float | None) -> None:
        """Let the engine process events for at most `seconds`; None for no limit."""
        if not self._is_over:
            self._outcomes(self._engine.step(seconds))

    def was_at_rest(self) -> bool:
        """Return whether the last signal interrupted a wait, which leaves the state consistent."""
        was, self._pool.at_rest = self._pool.at_rest, False
        return was

    def stop(self) -> None:
        """Make whoever waits return, and a thread close the engine; any thread may call it."""
        self._is_over = True
        self._engine.wake()

    def close(self) -> None:
        """Close the engine and its workers, after `stop`."""
        self._engine.close()


class BackgroundDriver(CallerDriver):
    """Runs the engine in a thread, the only one that uses it; otherwise like `CallerDriver`."""

    releases_lazily = False

    def __init__(
        self,
        engine: Engine,
        pool: Pool,
        outcomes: Outcomes,
        ready: Callable[[], int],
        idle: Callable[[], None],
    ) -> None:
        """Start the thread; it calls `idle` each time that it has waited and nothing has come."""
        super().__init__(engine, pool, outcomes)
        self._ready, self._idle, self._waits = ready, idle, False
        self._arrived = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._thread = threading.Thread(target=self._run, name="forebay-driver", daemon=True)
        try:
            start_thread(self._thread)
        except BaseException:  # the system may refuse another thread
            self._is_over = True
            engine.close()
            raise

    def call(self, function: Callable[[], None]) -> None:
        """Make the thread call a function when it wakes up."""
        self._inbox.append(function)
        self._engine.wake()

    def call_and_wait(self, function: Callable[[], None]) -> None:
        """Make the thread call a function, and return afterwards."""
        done = threading.Event()

        def call() -> None:
            function()
            done.set()

        self.call(call)
        while not done.wait(LONGEST_WAIT_S) and not self._is_over:
            pass

    def wait(self, is_ready: Callable[[], bool], until: float | None) -> None:
        """Wait until something is ready, the thread has ended, or the time `until` has come."""
        with self._arrived:
            super().wait(is_ready, until)

    def poll(self, seconds: float | None) -> None:
        """Wait for at most `seconds`: the thread processes all events."""
        with self._arrived:
            self._waits = True
            self._arrived.wait(LONGEST_WAIT_S if seconds is None else min(seconds, LONGEST_WAIT_S))
            self._waits = False

    def was_at_rest(self) -> bool:
        """See `CallerDriver`."""
        was, self._waits = self._waits, False
        return was

    def close(self) -> None:
        """Wait until the thread has closed the engine, after `stop`."""
        join_threads([self._thread], 5.0)
        self._inbox.clear()  # its functions hold references to the feed

    def _run(self) -> None:
        engine, inbox = self._engine, self._inbox
        try:
            while not self._is_over:
                while inbox:
                    inbox.popleft()()
                is_ahead = self._ready() >= READY_TO_COLLECT
                outcomes = engine.step(None, COLLECT_S if is_ahead else 0.0)
                if outcomes:
                    self._outcomes(outcomes)
                    with self._arrived:
                        self._arrived.notify_all()
                else:
                    self._idle()
                del outcomes  # while it waits for the next ones, nothing holds these
        except BaseException as error:  # noqa: BLE001 - the trainer raises it
            self.error = error
        finally:
            with self._arrived:
                self._is_over = True
                self._arrived.notify_all()
            with suppress(Exception):
                engine.close()
