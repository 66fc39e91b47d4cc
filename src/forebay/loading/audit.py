"""Make a few samples of a running loader a second time, and compare them.

    iter(loader) ── fork ──────────────────────────> child: the dataset as the trainer has it now
    worker ── batch, digests of marked samples ──> next(loader) ── digests ──> child ── differences

With `seed=` each sample is a function of seed, epoch and index, if what it draws from and depends
on is known. The child checks that, of this very run: it makes samples that workers have made, in
another order, as another worker, and compares them bit for bit. No batch depends on it: it has a
copy of everything.
"""

from __future__ import annotations

import gc
import os
import pickle
import select
import signal
import sys
import time
import warnings
import weakref
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple, NoReturn

from forebay.base import torch_internals
from forebay.base.batch_digests import differing, digested, leaves
from forebay.base.formatting import counted
from forebay.base.libraries import one_thread
from forebay.base.process import become_worker, die_with, is_worker
from forebay.errors import shortened
from forebay.loading.audit_plan import Difference, is_due, words_of
from forebay.loading.fetch import BatchFetcher, MapFetcher
from forebay.loading.kind import LoaderKind
from forebay.loading.messages import AuditedSample, BatchRequest, BatchSpec
from forebay.pools.worker import flush_streams
from forebay.pools.zygote_handle import driver_ends, handlers_deferred, whole_recursion_limit

# What a message may have: more would make who sends it wait.
MOST_BYTES = 60_000
# How long the end of the first epoch waits for the answer; tiny samples take a few milliseconds.
WAIT_S = 2.0
_MOST_SHOWN = 32


class _Task(NamedTuple):
    """Samples that a child makes again: the request for them, and what they were."""

    request: BatchRequest
    audited: tuple[AuditedSample, ...]


class LoaderAudit:
    """The audit of one loader, over all its epochs.

    Attributes:
        samples: How many were compared.
        differences: What was not the same.
    """

    def __init__(self) -> None:
        self.samples = 0
        self.differences: list[Difference] = []
        self._child: _Child | None = None
        self._has_begun = self._has_warned = False
        self._made_s, self._cost_s = 0.0, 0.0
        self._seed: int | None = None
        self._left = 0  # answers that the child owes

    def begin(self, kind: LoaderKind, made_s: float) -> None:
        """Begin an epoch, before any of its samples is made: fork what makes some again.

        Args:
            made_s: What workers have taken for batches so far.
        """
        self.end()
        since_s, is_first = made_s - self._made_s, not self._has_begun
        if not kind.is_audited or is_worker() or not (is_first or is_due(since_s, self._cost_s)):
            return
        began = time.perf_counter()
        self._has_begun, self._made_s, self._seed = True, made_s, kind.seed
        spec = replace(kind.spec(), fetcher=MapFetcher, concurrency=1, worker_init_fn=None)
        with suppress(OSError):  # the system refuses another process
            self._child = _Child(kind, spec)
        self._cost_s = time.perf_counter() - began

    def add(self, request: BatchRequest, audited: tuple[AuditedSample, ...]) -> None:
        """Have samples of a batch made again."""
        if self._child is not None and self._child.send(
            _Task(request._replace(slot=None), audited)
        ):
            self._left += 1

    @property
    def is_pending(self) -> bool:
        """Whether answers are owed."""
        return self._left > 0

    def poll(self, seconds: float = 0.0) -> None:
        """Take the answers that come within some time; warn once of the first difference."""
        child, until = self._child, time.monotonic() + seconds
        while child is not None and self._left:
            answers = child.received(max(until - time.monotonic(), 0.0))
            if answers is None:  # it has ended
                self._left = 0
                break
            if not answers:
                break
            for samples, found, took_s in answers:
                self._left -= 1
                self.samples += samples
                self._cost_s += took_s
                self.differences.extend(found)
        if self.differences and not self._has_warned:
            self._has_warned = True
            warnings.warn(words_of(self.differences, self._seed), stacklevel=_depth())

    def end(self, wait_s: float = 0.0) -> None:
        """End the child, after the answers that come within some time."""
        if self._child is not None:
            self.poll(wait_s)
            self._child.close()
            self._child, self._left = None, 0

    def described(self) -> str:
        """Return what was found, in one sentence; "" if nothing was compared."""
        if not self.samples:
            return ""
        made = f"{counted(self.samples, 'sample')} made a second time"
        if not self.differences:
            return f"{made}, all the same."
        return f"{made}; not the same: {self.differences[0]}."


def _depth() -> int:
    """Return the stacklevel of the caller's own code."""
    frame, depth = sys._getframe(1), 1
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("forebay."):
        frame, depth = frame.f_back, depth + 1  # type: ignore[assignment]
    return depth


# ---- the child -----------------------------------------------------------------------------------


class _Child:
    """A fork of this process that makes samples again."""

    def __init__(self, kind: LoaderKind, spec: BatchSpec) -> None:
        flush_streams()  # or the child would print the buffered output again
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
                    _serve(spec, driver, tasks, answers)
        finally:
            if os.getpid() != driver:
                os._exit(1)
            os.close(tasks)
            os.close(answers)
        os.set_blocking(self._put, False)
        self._received = b""
        self.close = weakref.finalize(self, _end, driver, pid, self._put, self._get)

    def send(self, task: _Task) -> bool:
        """Send a task; return whether it was small enough, and the child takes it."""
        try:
            data = pickle.dumps(task)
            return len(data) < MOST_BYTES and os.write(self._put, _framed(data)) > 0
        except Exception:  # noqa: BLE001 - an index of the user's own class; or the pipe is full
            return False

    def received(self, seconds: float) -> list[Any] | None:
        """Return the answers that are there, or come within some time; None if it has ended."""
        ready, _, _ = select.select([self._get], [], [], seconds)
        if not ready:
            return []
        data = os.read(self._get, 1 << 16)
        if not data:
            return None
        self._received += data
        found = []
        while len(self._received) >= 4:
            end = 4 + int.from_bytes(self._received[:4], "little")
            if len(self._received) < end:
                break
            found.append(pickle.loads(self._received[4:end]))  # noqa: S301 - of this program
            self._received = self._received[end:]
        return found or []


def _framed(data: bytes) -> bytes:
    return len(data).to_bytes(4, "little") + data


def _end(driver: int, pid: int, *descriptors: int) -> None:
    """Kill a child, and close what leads to it; a fork of the trainer only closes that."""
    for each in descriptors:
        driver_ends.discard(each)
        with suppress(OSError):
            os.close(each)
    if os.getpid() == driver:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _serve(spec: BatchSpec, driver: int, tasks: int, answers: int) -> NoReturn:
    """Make the samples of one task after the other; never returns."""
    try:
        gc.disable()  # a finalizer of the trainer's must not run here
        die_with(driver)
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL if each == signal.SIGTERM else signal.SIG_IGN)
        for descriptor in tuple(driver_ends):
            with suppress(OSError):
                os.close(descriptor)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        os.dup2(null, 2)
        os.nice(5)
        warnings.simplefilter("ignore")
        second = SecondMaker(spec)
        with os.fdopen(tasks, "rb") as file:
            while header := file.read(4):
                task = pickle.loads(file.read(int.from_bytes(header, "little")))  # noqa: S301 - as above
                began = time.process_time()
                found = second.differences(task)
                answer = pickle.dumps((len(task.audited), found, time.process_time() - began))
                os.write(answers, _framed(answer))
    finally:
        os._exit(0)


class SecondMaker:
    """Makes samples again, in a process that has not made any.

    Its place among the workers is another one than that of the one that made them first.
    """

    def __init__(self, spec: BatchSpec) -> None:
        self._spec = spec
        count = max(int(spec.num_workers), 2)
        known = count - 1, count, spec.base_seed + count - 1, spec.dataset
        torch_internals.seed_as_worker(spec.base_seed, count - 1, with_devices=False)
        torch_internals.set_worker_info(*known, seed_is_current=True)
        self._worker_id = count - 1
        self._made: BatchFetcher | None = None

    def differences(self, task: _Task) -> list[Difference]:
        """Return what is not the same; nothing if a sample cannot be made here."""
        try:
            return [
                each for audited in reversed(task.audited) for each in self._found(task, audited)
            ]
        except Exception:  # noqa: BLE001 - whatever the user's code raises
            return []

    def _found(self, task: _Task, audited: AuditedSample) -> list[Difference]:
        made = self.made(task.request, audited)
        digest, shown = digested(made), leaves(made)
        found, fields = [], [*islice(differing(audited.digest, digest), _MOST_SHOWN)]
        changing = (
            set(differing(digest, digested(self.made(task.request, audited)))) if fields else ()
        )
        for field in fields:
            is_stable = field not in changing
            values = audited.shown.get(field, ""), shown.get(field, "")
            index = task.request.index if audited.offset < 0 else _index_at(task.request, audited)
            index = shortened(list(index) if audited.offset < 0 else index)
            known = task.request.epoch, _Shown(index), field, *values, is_stable
            found.append(Difference(*known, audited.offset < 0))
        return found

    def made(self, request: BatchRequest, audited: AuditedSample) -> Any:
        """Make a sample, or a whole batch, again."""
        if self._made is None:
            if audited.others is not None:
                become_worker()
            self._made = self._spec.fetcher(
                self._spec,
                self._worker_id,
                turns=None,
                seeds=None,
                later=(),
                is_process=True,
                names=audited.others,
            )
        fetcher = self._made
        if isinstance(request.index, array):  # as the planner keeps it
            request = request._replace(index=request.index.tolist())
        if audited.offset >= 0 and not audited.is_whole:
            position = request.positions(len(request.index))[audited.offset]
            index = _index_at(request, audited)
            single = [index] if self._spec.auto_collation else index
            request = request._replace(index=single, position=position)
        fetcher.begin(request)
        samples = fetcher.fetch(request)
        if fetcher.finds_more():
            samples = fetcher.fetch(request)
        if audited.offset < 0:
            return fetcher.collate(request, samples)
        if not self._spec.auto_collation:
            return samples
        return samples[audited.offset if audited.is_whole else 0]


class _Shown(str):
    """An index as it is shown."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _index_at(request: BatchRequest, audited: AuditedSample) -> Any:
    index = request.index
    is_list = isinstance(index, Sequence) and not isinstance(index, str)
    return index[audited.offset] if is_list else index
