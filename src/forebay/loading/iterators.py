"""The iterator of a loader: a subclass of torch's that takes its batches from a pipeline."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.utils.data import DataLoader as TorchLoader

from forebay.base.batches import pinned
from forebay.base.randomness import end_turns, generators_kept
from forebay.base.torch_internals import BaseIterator, lightning_is_imported, profiler_is_on
from forebay.errors import FailuresError, WorkerDiedError, cut_below_entry, shortened
from forebay.failures import Failure
from forebay.loading.audit import WAIT_S
from forebay.loading.kind import RETRIES, LoaderKind
from forebay.loading.messages import STREAM, BatchError, BatchRequest, BatchResult, Result
from forebay.loading.open_feeds import CLOSED
from forebay.loading.pipeline import Pipeline
from forebay.loading.progress import LoaderProgress
from forebay.loading.samplers import heed_same_epoch
from forebay.observe.progress import log_samples_failed
from forebay.pools.processes import ProcessPool

if TYPE_CHECKING:  # only with workers
    from forebay.loading.feed import Feed


class UnreadSampler:
    """Has the length of an epoch and no indices, because the planner reads the sampler.

    Libraries skip batches by what they take from its iterator, which counts that.
    """

    def __init__(self, steps: Callable[[], int]) -> None:
        self._steps = steps

    def __len__(self) -> int:
        return self._steps()

    def __iter__(self) -> CountedIterator:
        return CountedIterator(self._steps)


class CountedIterator:
    """The iterator of an `UnreadSampler`.

    Attributes:
        taken: How often it was read.
    """

    def __init__(self, steps: Callable[[], int]) -> None:
        self._steps, self._end, self.taken = steps, -1, 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> None:
        self._end = self._steps() if self._end < 0 else self._end
        if self.taken >= self._end:
            raise StopIteration
        self.taken += 1


class BatchIterator(BaseIterator):  # type: ignore[misc]
    """Returns the batches of one epoch, with torch's checks, warnings and exceptions.

    Attributes:
        is_kept: Whether the loader keeps it from epoch to epoch, as torch's with workers that
            persist.
        moved: How many batches another library skips of the epoch.
    """

    def __init__(
        self, loader: TorchLoader[Any], kind: LoaderKind, progress: LoaderProgress
    ) -> None:
        """Begin an epoch of a loader, which torch's iterators take their arguments from."""
        # Of the threads that share this iterator; a signal's handler may close it meanwhile.
        self.one_at_a_time = threading.RLock()
        self.pipeline: Pipeline | Any = None
        self._progress, self._ranks = progress, kind.ranks
        # A loader that nothing else refers to ends its workers with this iterator.
        self.is_kept = kind.keeps_iterator
        self._loader = None if self.is_kept else loader
        self.begin(loader, kind)

    def _begin_as_torch(
        self,
        loader: TorchLoader[Any],
        generator: torch.Generator,
        *,
        draws: bool,
        resets: bool,
    ) -> Any:
        """Do what torch's iterators do: draw seeds, and iterate the sampler.

        Args:
            generator: What they draw from.
            draws: Whether a new iterator draws a base seed; if not, the generator stays as it was.
            resets: Whether torch resets a new iterator, too; all others are reset in any case.

        Returns:
            The iterator over the sampler.
        """
        is_new, before = not hasattr(self, "_base_seed"), generator.get_state()
        if is_new:
            super().__init__(loader)
            if not draws:
                generator.set_state(before)
        first = self._shared_seed  # torch starts workers with the one drawn first
        if resets or not is_new:
            super()._reset(loader, is_new)
        # What another library has taken from the sampler's iterator, to skip it.
        self.moved = getattr(self._sampler_iter, "taken", self._num_yielded)
        self.base_seed = int(self._base_seed)
        self.first_shared_seed = first if is_new and draws else self._shared_seed
        return self._sampler_iter

    def begin(self, loader: TorchLoader[Any], kind: LoaderKind) -> None:
        """Begin an epoch, or the rest of one."""
        assert kind.num_workers or not kind.timeout, "num_workers=0 requires timeout == 0"
        progress, began = self._progress, time.perf_counter()
        progress.trace.begin(began)
        self._is_over, self._is_unread, self._is_early = False, True, False
        self._left_out: FailuresError | None = None  # as long as no batch had a sample
        self._workers: list[WorkerHandle] = []
        progress.audit.begin(kind, progress.trace.made_s)
        self.pipeline, start = progress.next_start(kind, self.pipeline)
        with self.one_at_a_time:
            draw = partial(self._begin_as_torch, loader)
            self._planner = self.pipeline.begin(kind, start, self, draw)
        progress.began(start, self)
        progress.trace.began_epoch(self._planner.epoch, began, time.perf_counter() - began)
        feed = self.pipeline.feed
        if feed is not None and feed.pool is not None:
            first = range(progress.trace.num_workers)
            self._workers = [WorkerHandle(feed, each) for each in first]

    def _heed_set_epoch(self) -> None:
        """Begin another epoch if `set_epoch` asked for it after `iter(loader)`."""
        position = self.pipeline.asked_position()
        if position is None:
            return
        self.moved = 0
        with generators_kept():  # its seeds are drawn
            self._planner = self.pipeline.begin(self.pipeline.kind, position, self, self._anew)
        self._progress.began(position, self)

    def _anew(self, generator: torch.Generator, *, draws: bool, resets: bool) -> Any:
        """Return a new iterator over the sampler; see `_begin_as_torch`."""
        self._sampler_iter = iter(self._index_sampler)
        return self._sampler_iter

    def __next__(self) -> Any:
        try:
            # torch's own `__next__` is needed only for an iterable dataset with a length, and for
            # a profiler.
            if self._IterableDataset_len_called is not None or profiler_is_on():
                return super().__next__()
            batch = self._next_data()
        except BaseException as error:
            __tracebackhide__ = True  # for IPython and pytest
            cut_below_entry(error)
            raise
        self._num_yielded += 1
        return batch

    def _next_data(self) -> Any:
        pipeline, audit = self.pipeline, self._progress.audit
        if audit.is_pending:
            audit.poll()
        result: Result | None = None
        try:
            with self.one_at_a_time:
                while True:
                    request, result = self._take()
                    if isinstance(result, BatchResult):
                        pipeline.last = request, result.failures
                        if result.audited:
                            audit.add(request, result.audited)
                        if result.failures:
                            self._progress.failures.extend(result.failures)
                            log_samples_failed(result.failures)
                            if result.is_empty:
                                self._check_alone(request, result.failures)
                                if not (self._num_yielded or self._planner.start.batch):
                                    self._left_out = _nothing_left(request, result.failures)
                                continue
                        self._left_out = None
                        return self._handed_out(request, result)
                    if isinstance(result, Failure):
                        raise _died(result, request, self._timeout)
                    assert isinstance(result, BatchError)
                    result.reraise()
        except StopIteration:
            raise
        except BaseException as error:
            feed = pipeline.feed
            # From a signal's handler: Ctrl-C, or any other exception that comes where forebay
            # raises none, nor code that it calls.
            if feed is not None and (feed.is_midway or isinstance(error, KeyboardInterrupt)):
                feed.interrupted()
            if result is None:
                end_turns()
            raise

    def results(self) -> Iterator[tuple[BatchRequest, Result]]:
        """Yield the request and the result of each batch, also of those that failed.

        Batches are as the feed returns them: not transformed, and on the device if there was
        memory.
        """
        while True:
            try:
                with self.one_at_a_time:
                    found = self._take()
            except StopIteration:
                return
            yield found

    def _take(self) -> tuple[BatchRequest, Result]:
        """Return the next request and its result; raise StopIteration at the end."""
        feed = self.pipeline.feed
        if self.pipeline.reader != id(self) or feed is None:
            self._refuse()
        elif feed.is_midway:  # since an exception came there
            feed.check()
        if self._is_unread:
            self._is_unread = False
            self._heed_set_epoch()
            if lightning_is_imported():
                from forebay.loading.lightning import takes_early

                self._is_early = takes_early()
        found = self._taken_early() if self._is_early else self._planner.take()
        if found is None:
            self._end()
            raise StopIteration
        return found

    def _taken_early(self) -> tuple[BatchRequest, Result] | None:
        """Take a batch while the one before is not used yet: after that one is the position."""
        progress, kind = self._progress, self.pipeline.kind
        heed_same_epoch(kind.index_sampler)
        earlier, progress.before = progress.before, None
        here = progress.position(kind), progress.last
        progress.before = earlier  # if there is an error: nobody will use the batch before, either
        found: tuple[BatchRequest, Result] | None = self._planner.take()
        if found is None or isinstance(found[1], BatchResult):
            progress.before = None if found is None else here
        return found

    def _handed_out(self, request: BatchRequest, result: BatchResult) -> Any:
        """Return a batch as the user gets it: on the device and transformed, or pinned."""
        if result.refused is not None:
            raise result.refused
        pipeline = self.pipeline
        hand_out = pipeline.hand_out
        if hand_out is not None and hand_out.is_needed:
            return hand_out(request, result, pipeline.kind.batch_seed)
        is_pinned = result.is_moved or not self._pin_memory
        return result.batch if is_pinned else pinned(result.batch)

    def _check_alone(self, request: BatchRequest, failures: tuple[Failure, ...]) -> None:
        """Raise FailuresError if other ranks have a batch where this one has no sample left."""
        if self._ranks is None or self._ranks.world_size == 1:
            return
        world_size, rank = self._ranks
        raise FailuresError(
            f"rank {rank} of {world_size} has no sample left in epoch {request.epoch}, batch "
            f"{request.batch}, and the other ranks may have some\n"
            f"  All of its samples raised: {shortened([each.source for each in failures])}. The "
            f"first: {failures[0].error}: {shortened(failures[0].message)}\n"
            "  No batch was returned: a step less on this rank would make the others wait. The "
            "loader continues with the next batch.\n"
            "  Remove the samples that raise, or use a larger batch_size; if it was the last "
            "batch of the epoch, use drop_last=True."
        )

    def _refuse(self) -> None:
        if self._is_over:
            raise StopIteration
        if self.pipeline.reader == id(self):
            raise RuntimeError(CLOSED)
        raise RuntimeError(
            "this iterator was ended by a later iter(loader), or by load_state_dict(): with "
            "`seed`, `buffer`, `backend`, `on_error` or `world_size` a loader is read by one "
            "iterator at a time\n"
            "  It had returned part of its epoch and returns no more. Make a second loader for a "
            "nested loop."
        )

    def _end(self) -> None:
        self._is_over = True
        left_out, self._left_out = self._left_out, None
        self.pipeline.reader = None
        if not self.pipeline.keeps_workers:
            self.pipeline.close(between_epochs=True)
        self._progress.audit.end(WAIT_S)
        if left_out is not None:
            raise left_out

    def _shutdown_workers(self) -> None:
        self.pipeline.close()

    def __del__(self) -> None:
        """Stop the workers with the last reference, unless the loader keeps them."""
        pipeline = getattr(self, "pipeline", None)
        if pipeline is None:
            return
        is_read = pipeline.reader == id(self) or pipeline.reader is None
        if self._loader is None or (is_read and not pipeline.keeps_workers):
            pipeline.close(between_epochs=self._loader is not None)


def _nothing_left(request: BatchRequest, failures: tuple[Failure, ...]) -> FailuresError:
    """Return the error for an epoch of which every sample was left out."""
    return FailuresError(
        f"every sample of epoch {request.epoch} raised, and on_error='skip' left them all out\n"
        f"  No batch was returned. The last to raise was sample {failures[-1].source!r}: "
        f"{failures[-1].error}: {shortened(failures[-1].message)}\n"
        "  The loader continues with the next epoch. See loader.failures, or use "
        "on_error='raise' to stop at the first."
    )


def _died(failure: Failure, request: BatchRequest, timeout: float) -> Exception:
    """Return the error for a batch whose retries failed."""
    epoch, batch = request.epoch, request.batch
    after = "with the next one"
    here = f"num_workers=0 or, with a seed, loader.replay(epoch={epoch}, batch={batch})"
    if request.is_of_stream:
        after, here = "without the rest of that worker's stream", "num_workers=0"
    attempts = "once" if failure.kind == STREAM else f"{RETRIES + 1} times"
    where = (
        f"  It was processing epoch {epoch}, batch {batch}: {request.samples_shown}.\n"
        f"  The batch was tried {attempts}; the loader continues {after}.\n"
        f"  To reproduce it in this process: {here}.\n"
    )
    if failure.kind == "timeout":
        hangs = f", or see where it hangs:\n{failure.traceback}" if failure.traceback else "."
        return WorkerDiedError(
            f"DataLoader timed out after {timeout:g} seconds: a worker did not finish a batch\n"
            f"{where}  Raise `timeout`{hangs}"
        )
    pid = "" if failure.pid is None else f" (pid(s) {failure.pid})"
    if failure.error == "SystemExit":
        return WorkerDiedError(
            f"DataLoader worker{pid} exited unexpectedly: sys.exit({failure.message}) was called\n"
            f"{where}{failure.traceback}"
        )
    if failure.kind in ("exception", STREAM):
        return WorkerDiedError(
            f"a worker could not answer: {failure.error}: {failure.message}\n{where}"
            f"{failure.traceback}"
        )
    # Programs look for "is killed by signal: ", as torch says it.
    how = failure.message.replace("the worker was killed by", "it is killed by", 1)
    return WorkerDiedError(
        f"DataLoader worker{pid} exited unexpectedly: {how}\n{where}{failure.traceback}"
    )


class WorkerHandle:
    """One worker process, with the methods of `multiprocessing.Process` that torch's users call."""

    def __init__(self, feed: Feed, incarnation: int) -> None:
        """Create a handle of one of the first workers of a feed."""
        self.name = f"forebay-worker-{incarnation}"
        self._feed = feed
        self._incarnation = incarnation

    @property
    def pid(self) -> int | None:
        """The process ID; None for a thread."""
        pool = self._feed.pool
        if not isinstance(pool, ProcessPool):
            return None
        until = time.monotonic() + 30.0
        while self._incarnation not in pool.pids and self._feed.is_open:
            if time.monotonic() > until or not pool.hosts(self._incarnation):
                break
            self._feed.poll(0.05)
        return pool.pids.get(self._incarnation)

    @property
    def exitcode(self) -> int | None:
        """The exit code of the process; None while it runs."""
        pool = self._feed.pool
        if not isinstance(pool, ProcessPool):
            return None
        pid = self.pid
        # It may be gone before the process that forked it has reported how it ended.
        while pid and not _exists(pid) and pool.hosts(self._incarnation) and self._feed.is_open:
            self._feed.poll(0.05)
        return pool.exit_codes.get(self._incarnation)

    def is_alive(self) -> bool:
        """Return whether the process exists."""
        pid = self.pid
        return pid is not None and self.exitcode is None and _exists(pid)

    def join(self, timeout: float | None = None) -> None:
        """Wait until the process has ended, at most `timeout` seconds."""
        until = None if timeout is None else time.monotonic() + timeout
        while self.is_alive() and (until is None or time.monotonic() < until):
            if self._feed.is_open:
                self._feed.poll(0.01)
            else:
                time.sleep(0.01)

    def terminate(self) -> None:
        """Send SIGTERM to the process if it still exists."""
        if self.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid or 0, signal.SIGTERM)

    kill = terminate


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
