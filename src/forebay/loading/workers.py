"""Where workers run, how many, and which thread runs the engine that gives them work."""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from multiprocessing.reduction import ForkingPickler
from typing import Literal

import numpy as np
import torch

from forebay.base.process import LONGEST_WAIT_S
from forebay.engine.commands import Outcome
from forebay.engine.engine import COLLECT_S, Engine
from forebay.loading.batch_job import BatchJob, ProcessJob, turns_of
from forebay.loading.messages import BatchSpec
from forebay.loading.slots import BatchSlots
from forebay.observe.progress import log
from forebay.observe.record import Trace
from forebay.options import Ray, whole_cores
from forebay.pools.base import Pool, ThreadPool
from forebay.pools.processes import ProcessPool
from forebay.ranks import ranks_sharing_cores


def _generator(device: str, state: bytes) -> torch.Generator:
    generator = torch.Generator(device)
    generator.set_state(torch.from_numpy(np.frombuffer(state, np.uint8).copy()))
    return generator


# Its own state is a tensor in shared memory, which is gone before a spawned worker can map it.
ForkingPickler.register(
    torch.Generator,
    lambda each: (_generator, (str(each.device), each.get_state().numpy().tobytes())),
)


@dataclass(frozen=True, slots=True)
class Workers:
    """Where workers run, and how many.

    Attributes:
        directory: The folder for the batches of worker processes; None for memory.
    """

    backend: Literal["process", "thread", "ray"]
    count: int
    start: Literal["fork"] | BaseContext = "fork"
    directory: str | os.PathLike[str] | None = None
    cluster: Ray | None = None

    @property
    def start_s(self) -> float:
        """Seconds that a worker may take to start; on a cluster it may wait for free resources."""
        return 10.0 if self.cluster is None else 120.0


def pool_for(
    spec: BatchSpec, workers: Workers, turns: bool, slots: BatchSlots | None, *, to_device: bool
) -> Pool:
    """Return a pool whose workers make batches, in the slab if there is one.

    Args:
        slots: The slab that is shared with the workers, and the slot of each batch; None for
            threads.
    """
    # A worker that fetches samples of several batches at once has begun all that it holds.
    keeps_tasks = turns or spec.concurrency > 1
    if workers.backend == "thread":
        thread_turns = turns_of(spec)
        job = BatchJob(spec, keeps_tasks=keeps_tasks, turns=thread_turns)
        return ThreadPool(job, thread_turns.abandon)
    assert slots is not None
    if workers.cluster is not None:
        from forebay.loading.remote import pool_on_cluster

        borrows = not (to_device or slots.is_on_disk)
        return pool_on_cluster(spec, workers.cluster, workers.count, slots, borrows=borrows)
    return ProcessPool(
        ProcessJob(spec, slots.slab, keeps_tasks=keeps_tasks), workers.count, workers.start
    )


# ---- drivers -------------------------------------------------------------------------------------
# Run the engine of a feed: in the caller's thread, while it waits, or in a background thread.
#
#     CallerDriver       the engine runs only within `wait`: no thread in the trainer's process
#     BackgroundDriver   a thread runs it, so that workers get work while the trainer is busy
#
# If each request is for one worker, the caller's thread is enough: every worker has its requests in
# advance. If any worker may make the next batch, a thread sends it as soon as a worker is free.

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
        """Make whoever waits return; another thread may call it."""
        self._is_over = True
        self._engine.wake()

    def close(self) -> None:
        """Close the engine and its workers, after `stop`."""
        self._engine.close()


class BackgroundDriver:
    """Runs the engine in a thread, the only one that uses it; otherwise like `CallerDriver`."""

    releases_lazily = False

    def __init__(self, engine: Engine, outcomes: Outcomes, ready: Callable[[], int]) -> None:
        self.error: BaseException | None = None
        self._engine, self._outcomes, self._ready = engine, outcomes, ready
        self._arrived = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._is_over = False
        self._waits = False
        self._thread = threading.Thread(target=self._run, name="forebay-driver", daemon=True)
        try:
            self._thread.start()
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
            while not is_ready() and not self._is_over:
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    return
                self._waits = True
                self._arrived.wait(LONGEST_WAIT_S if left is None else min(left, LONGEST_WAIT_S))
                self._waits = False

    def poll(self, seconds: float) -> None:
        """Wait briefly: the thread processes all events."""
        with self._arrived:
            self._arrived.wait(seconds)

    def was_at_rest(self) -> bool:
        """See `CallerDriver`."""
        was, self._waits = self._waits, False
        return was

    def stop(self) -> None:
        """Make the thread close the engine, and whoever waits return."""
        self._is_over = True
        self._engine.wake()

    def close(self) -> None:
        """Wait until the thread has closed the engine, after `stop`."""
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(5.0)
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
                del outcomes  # while it waits for the next ones, nothing holds these
        except BaseException as error:  # noqa: BLE001 - the trainer raises it
            self.error = error
        finally:
            with self._arrived:
                self._is_over = True
                self._arrived.notify_all()
            with suppress(Exception):
                engine.close()


# ---- auto workers --------------------------------------------------------------------------------
# `num_workers="auto"`: adjusts the number of workers to the training while it runs.
#
#     Feed.take ──> WorkerTuning.update ── totals of the trace ──> Tuner ── number ──> Feed.resize
#
# A batch does not depend on the worker that makes it, so changing their number changes no batch.

# The shortest time between two decisions.
EVERY_S = 0.25


class WorkerTuning:
    """Reads a trace at intervals, and changes the number of workers.

    Attributes:
        due: When to decide next, in seconds of `time.perf_counter()`.
    """

    def __init__(self, most: int, is_remote: bool, trace: Trace) -> None:
        self.due = 0.0
        self._trace = trace
        cores = max(1, whole_cores() // ranks_sharing_cores())
        from forebay.observe.simulation import Tuner

        self._tuner = Tuner(min(cores, most), most, math.inf if is_remote else cores)

    @property
    def num_workers(self) -> int:
        """The number of workers that there should be."""
        return self._tuner.num_workers

    def update(self, now: float, resize: Callable[[int], None]) -> None:
        """Decide on the number of workers; call `resize` if it is to change."""
        trace, self.due = self._trace, now + EVERY_S
        from forebay.observe.simulation import Totals

        totals = Totals(
            at=now,
            waited_s=trace.waited_s,
            steps=trace.step_count,
            steps_s=trace.steps_s,
            made=trace.made_count,
            made_s=trace.made_s,
            cpu_s=trace.cpu_s,
            queued_s=trace.queued_s,
            trainer_cpu_s=time.process_time(),
        )
        decision = self._tuner.decide(totals)
        trace.tried = self._tuner.rates
        if decision is None:
            return
        resize(decision.num_workers)
        trace.num_workers = decision.num_workers
        trace.decisions.append((now, decision.reason))
        log.info("num_workers=%d: %s", decision.num_workers, decision.reason)
