"""Fetch several samples at once, in threads, for `concurrency`.

Samples of the next batches are fetched in the same threads, in their order, so that threads have
something to do while a batch has only its last samples left.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

from forebay.base.libraries import one_thread
from forebay.base.process import join_threads
from forebay.base.randomness import SetSeed
from forebay.loading.fetch import MapFetcher
from forebay.loading.messages import AHEAD, BatchRequest, BatchSpec
from forebay.observe.measurements import SlowSample
from forebay.seeds import SAMPLE, child_seed, seed_of

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


class _Fetched(NamedTuple):
    """What a thread fetched, the seconds that this took, and those of processor time."""

    sample: Any
    seconds: float
    cpu_s: float


class _Begun(NamedTuple):
    """A batch that threads fetch.

    Attributes:
        calls: One for each sample.
        process: Where the threads are.
    """

    request: BatchRequest
    calls: list[Future[_Fetched]]
    process: int


def _fetched(call: Callable[[], Any]) -> _Fetched:
    began, cpu_s = time.perf_counter(), time.thread_time()
    sample = call()
    return _Fetched(sample, time.perf_counter() - began, time.thread_time() - cpu_s)


class ThreadedFetcher(MapFetcher):
    """Fetches several samples of a map-style dataset at once."""

    def __init__(self, spec: BatchSpec, worker_id: int, **surroundings: Any) -> None:
        """See `MapFetcher`; the threads are started with the first samples."""
        super().__init__(spec, worker_id, **surroundings)
        around = one_thread if self._is_process else nullcontext
        self._threads = SampleThreads(spec.concurrency, around)
        if self._turns is not None:
            self._turns.helpers[threading.current_thread()] = self._threads
        self._beginning = threading.RLock()
        self._current: int | None = None  # the epoch
        self._begun: dict[int, _Begun] = {}  # by the ID of the request

    def close(self) -> None:
        """End the threads."""
        self._threads.close()
        if self._turns is not None:  # or one that hangs would keep all others waiting
            self._turns.leave(self._threads.threads)

    def fetch(self, request: BatchRequest) -> Any:
        """See `BatchFetcher`."""
        self.failures = []
        return self._fetched_at_once(request)

    def begin(self, request: BatchRequest) -> None:
        """Begin to fetch the samples of a batch, and the next ones."""
        super().begin(request)
        with self._beginning:
            if any(each is request for each in self._later):
                while self._later.popleft() is not request:
                    pass
            self._begin(request)
            self._current = request.epoch
            self.begin_more()

    def finds_more(self) -> bool:
        """See `BatchFetcher`."""
        if not super().finds_more():
            return False
        with self._beginning:  # samples of later batches drew without a seed
            for begun in self._begun.values():
                for call in begun.calls:
                    call.cancel()
            self._begun.clear()
        return True

    def begin_more(self) -> None:
        """Begin batches of the same epoch, until threads have enough to do."""
        later = self._later
        with self._beginning:
            while later and later[0].epoch == self._current:
                begun = sum(len(self._indices(each.request)) for each in self._begun.values())
                if begun >= AHEAD * self._spec.concurrency:
                    break
                self._begin(later.popleft())

    def _begin(self, request: BatchRequest) -> None:
        if id(request) not in self._begun:
            self._begun[id(request)] = self._submitted(request)

    def drop(self, request: BatchRequest) -> None:
        """See `BatchFetcher`."""
        begun = self._begun.pop(id(request), None)
        for each in () if begun is None else begun.calls:
            each.cancel()

    def _indices(self, request: BatchRequest) -> Sequence[Any]:
        return request.index if self._spec.auto_collation else [request.index]

    def _submitted(self, request: BatchRequest) -> _Begun:
        """Have threads fetch the samples of a batch."""
        indices, submit = self._indices(request), self._threads.submit
        calls = [
            submit(partial(_fetched, partial(self._sample, request.epoch, position, index)))
            for position, index in zip(request.positions(len(indices)), indices, strict=True)
        ]
        return _Begun(request, calls, os.getpid())

    def _sample(self, epoch: int, position: int, index: Any) -> Any:
        spec = self._spec
        if spec.seed is None:
            return spec.dataset[index]
        seed = child_seed(seed_of(spec.seed, SAMPLE, epoch), position)

        def seeded(set_seed: SetSeed) -> Any:
            set_seed(seed)
            return spec.dataset[index]

        return self._run_seeded(seeded)

    def _fetched_at_once(self, request: BatchRequest) -> Any:
        """Return the samples of a batch when all are there."""
        with self._beginning:
            self._begin(request)
            begun = self._begun.pop(id(request))
            if begun.process != os.getpid():
                begun = self._submitted(request)
            self.begin_more()
        try:
            samples = self._gathered(request, begun.calls)
        except BaseException as error:
            self._begun[id(request)] = begun
            if not isinstance(error, KeyboardInterrupt):  # after that it may be asked for again
                self.drop(request)
            raise
        return samples if self._spec.auto_collation or not samples else samples[0]

    def _gathered(self, request: BatchRequest, calls: Sequence[Future[_Fetched]]) -> list[Any]:
        samples, slowest, slowest_s = [], None, 0.0
        for index, call in zip(self._indices(request), calls, strict=True):
            try:
                fetched = call.result()
            except Exception as error:  # noqa: BLE001 - the user's code may raise anything
                self._leave_out(request, index, error)
                continue
            samples.append(fetched.sample)
            self.cpu_s += fetched.cpu_s
            if fetched.seconds > slowest_s:
                slowest_s, slowest = fetched.seconds, index
        self.slowest = SlowSample(slowest_s, slowest, request.epoch, request.batch)
        return samples
