"""Where the engine of a feed runs: in the caller, while it waits, or in a background thread.

    CallerDriver       the engine runs only within `wait`: no thread in the trainer's process
    BackgroundDriver   a thread runs it, so that workers get work while the trainer is busy

Where each worker has requests of its own the caller suffices: workers have them in advance. Where
any worker may make the next batch, it has to be requested the moment a worker is free.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from forebay.engine.engine import COLLECT_S, LONGEST_WAIT_S, Engine, Outcome
from forebay.engine.pools.base import Pool

Outcomes = Callable[[Sequence[Outcome]], None]


class CallerDriver:
    """Runs the engine in the caller's thread, within `wait`.

    Args:
        engine: The engine.
        pool: Its pool.
        outcomes: Called with the outcomes of a step.

    Attributes:
        error: The exception that ended the driver; None while it runs.
        releases_lazily: Whether there is no use in releasing batches before the next `wait`.
    """

    releases_lazily = True

    def __init__(self, engine: Engine, pool: Pool, outcomes: Outcomes) -> None:
        self.error: BaseException | None = None
        self._engine, self._pool, self._outcomes = engine, pool, outcomes

    def call(self, function: Callable[[], None]) -> None:
        """Call a function that uses the engine, now."""
        function()

    call_and_wait = call

    def wait(self, is_ready: Callable[[], bool], until: float | None) -> None:
        """Return when something is ready, or the time has come."""
        while not is_ready():
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                return
            self.look(left)

    def look(self, seconds: float | None) -> None:
        """Let the engine process events, for at most so long."""
        self._outcomes(self._engine.step(seconds))

    def was_at_rest(self) -> bool:
        """Return whether a signal interrupted a wait, so that no state is inconsistent."""
        was, self._pool.at_rest = self._pool.at_rest, False
        return was

    def close(self) -> None:
        """Close the engine and its workers."""
        self._engine.close()


class BackgroundDriver:
    """Runs the engine in a thread, which alone touches it; otherwise like `CallerDriver`.

    Args:
        engine: The engine.
        outcomes: Called in the thread with the outcomes of a step.
        has_ready: Tells whether results wait to be taken, so that nobody waits for the next.
    """

    releases_lazily = False

    def __init__(self, engine: Engine, outcomes: Outcomes, has_ready: Callable[[], bool]) -> None:
        self.error: BaseException | None = None
        self._engine, self._outcomes, self._has_ready = engine, outcomes, has_ready
        self._arrived = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._is_over = False
        self._waits = False
        self._thread = threading.Thread(target=self._run, name="forebay-driver", daemon=True)
        try:
            self._thread.start()
        except BaseException:  # there may be no more threads
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
        while not done.wait(1.0) and not self._is_over:
            pass

    def wait(self, is_ready: Callable[[], bool], until: float | None) -> None:
        """Return when something is ready, nothing more can come, or the time has come."""
        with self._arrived:
            while not is_ready() and not self._is_over:
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    return
                self._waits = True
                self._arrived.wait(None if left is None else min(left, LONGEST_WAIT_S))
                self._waits = False

    def look(self, seconds: float) -> None:
        """Wait briefly: the thread processes all events."""
        with self._arrived:
            self._arrived.wait(seconds)

    def was_at_rest(self) -> bool:
        """See `CallerDriver`."""
        was, self._waits = self._waits, False
        return was

    def close(self) -> None:
        """Make the thread close the engine."""
        self._is_over = True
        self._engine.wake()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(5.0)
        self._inbox.clear()  # its functions hold references to the feed

    def _run(self) -> None:
        engine, inbox = self._engine, self._inbox
        try:
            while not self._is_over:
                while inbox:
                    inbox.popleft()()
                outcomes = engine.step(None, COLLECT_S if self._has_ready() else 0.0)
                if outcomes:
                    self._outcomes(outcomes)
                    with self._arrived:
                        self._arrived.notify_all()
        except BaseException as error:  # noqa: BLE001 - the trainer raises it
            self.error = error
        finally:
            with self._arrived:
                self._is_over = True
                self._arrived.notify_all()
            with suppress(Exception):
                engine.close()
