"""A feed with a thread that drives its engine, so that refilling does not wait for the trainer."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from forebay.engine.engine import COLLECT_S, NewTask
from forebay.engine.events import DeliverResult, ReportFailure
from forebay.engine.limits import Limits
from forebay.loading.crew import Workers
from forebay.loading.feed import Feed
from forebay.loading.recipe import Recipe
from forebay.loading.statistics import Tally


class PumpedFeed(Feed):
    """A feed whose engine runs in a thread, so that refilling does not wait for the trainer.

    What the trainer says travels as calls in an inbox, and only the thread touches the engine.
    """

    def __init__(
        self, recipe: Recipe, workers: Workers, limits: Limits, keeps_tasks: bool, tally: Tally
    ) -> None:
        """Start the workers and the thread."""
        super().__init__(recipe, workers, limits, keeps_tasks, tally)
        self._arrived = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._unheard = 0  # releases that the thread has not been woken for
        self._over = False
        self._waits = False
        self._thread = threading.Thread(target=self._pump, name="forebay-buffer", daemon=True)
        try:
            self._thread.start()
        except BaseException:  # there may be no more threads
            self.close()
            self._engine.close()
            raise

    def put(self, tasks: Sequence[NewTask]) -> None:
        """Queue tasks; their numbers must grow."""
        self._check()
        self._tell(lambda: self._engine.put(tasks))

    def forget(self, before: int) -> None:
        """Drop every task with a lower number that was not taken; wait until it is done."""
        self._check()
        done = threading.Event()

        def forget() -> None:
            with self._arrived:
                super(PumpedFeed, self).forget(before)
            done.set()

        self._tell(forget)
        while not done.wait(1.0) and not self._over:
            pass

    def ready_batches(self) -> list[int]:
        """Return the tasks of the results that wait, in order, without those that say the end."""
        with self._arrived:
            return super().ready_batches()

    def look(self, seconds: float) -> None:
        """Wait a little: the thread sees to everything."""
        with self._arrived:
            self._arrived.wait(seconds)

    def _tell(self, call: Callable[[], None]) -> None:
        self._inbox.append(call)
        self._unheard = 0
        self._engine.wake()

    def _release(self, task: int) -> None:
        self._inbox.append(lambda: self._engine.release((task,)))
        self._unheard += 1
        # Being woken costs the thread, and so the trainer, more than a late refill does.
        if self._unheard * 8 > len(self._ready):
            self._unheard = 0
            self._engine.wake()

    def _next(self, until: float | None) -> DeliverResult | ReportFailure | None:
        with self._arrived:
            while not self._ready:
                self._check()
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self._waits = True
                self._arrived.wait(left)
                self._waits = False
            return self._pop()

    def _was_at_rest(self) -> bool:
        was, self._waits = self._waits, False
        return was

    def _pump(self) -> None:
        try:
            while not self._over:
                while self._inbox:
                    self._inbox.popleft()()
                outcomes = self._engine.step(None, COLLECT_S if self._ready else 0.0)
                if outcomes:
                    with self._arrived:
                        self._line_up(outcomes)
                        self._arrived.notify_all()
        except BaseException as error:  # noqa: BLE001 - the trainer raises it
            self._error = error
        finally:
            with self._arrived:
                self._over = True
                self._arrived.notify_all()
            with suppress(Exception):
                self._engine.close()

    def _stop(self) -> None:
        self._over = True
        self._engine.wake()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(5.0)
        self._inbox.clear()  # what is in there refers back to this feed
