"""What a loader is asked, at any time: where it is, its statistics, and a batch once more."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar
from weakref import WeakMethod, ref

import torch
from torch.utils.data import DataLoader as TorchDataLoader

from forebay.base.torch_internals import library_call
from forebay.errors import OptionError
from forebay.failures import Failure
from forebay.loading.kind import LoaderKind
from forebay.loading.messages import BatchRequest
from forebay.loading.planner import Planner
from forebay.loading.progress import LoaderProgress
from forebay.loading.samplers import planned_within
from forebay.observe.figures import Statistics, statistics_of

if TYPE_CHECKING:  # few loaders are asked
    from forebay.loading.sample_check import SampleCheck
    from forebay.observe.diagnosis import Diagnosis

_T_co = TypeVar("_T_co", covariant=True)


def page_of_loader(kind: WeakMethod[Any], progress: ref[LoaderProgress]) -> Any:
    """Return what `forebay top` shows of a loader; see `LiveLoader`."""
    from forebay.loading.facts import LiveLoader

    return LiveLoader(kind, progress)


def _numbers_of(requests: list[BatchRequest], planner: Planner) -> list[tuple[int, int]]:
    """Return epoch and number of each batch that was requested, in order."""
    found, (epoch, batch) = [], (planner.epoch, planner.batch - 1)
    for request in requests:
        batch = batch + 1 if request.epoch == epoch else 0
        epoch = request.epoch
        found.append((epoch, request.batch if planner.turns is None else batch))
    return found


class InspectedLoader(TorchDataLoader[_T_co]):
    """What can be asked of a `DataLoader`."""

    _loader_progress: LoaderProgress
    _class: ClassVar[Any]  # without what a subclass adds
    _prepared: Any = None  # the `accelerated.Prepared` of a loader that Accelerate uses

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Whether Accelerate takes the loader as it is; asked by an Accelerator, it gets ready.

        A loader with torch's arguments alone is left to Accelerate, as one of torch's class.
        """
        asked = library_call("accelerate.", "prepare_data_loader", 1)
        if asked is not None and self._prepared is None and getattr(self, "_is_named", False):
            from forebay.loading.accelerated import prepare

            prepare(self, asked["self"], asked["device_placement"])
        return self._prepared is not None

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, value: bool) -> None:
        """Accept what Accelerate sets on all that it has prepared."""

    def _kind(self) -> LoaderKind:
        raise NotImplementedError

    @property
    def _is_initialized(self) -> bool:
        raise NotImplementedError

    def __repr__(self) -> str:
        """Return the dataset, its size and the main arguments in one line."""
        if not self._is_initialized:
            return super().__repr__()
        return self._kind().described()

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes of a fresh copy, without workers, batches and counts."""
        # There is no `__setstate__`: wrappers that forward what they lack would call it.
        if not self._is_initialized:
            return self.__dict__
        progress = copy.copy(self._loader_progress)
        return {**self.__dict__, "_iterator": None, "_loader_progress": progress}

    @property
    def epoch(self) -> int:
        """The current epoch; after its last batch, or before the first iteration, the next one."""
        planned = planned_within(self.sampler)
        return self._loader_progress.epoch(None if planned is None else planned.asked)

    @property
    def mask(self) -> torch.Tensor:
        """Which samples of the last returned batch count: a bool tensor, one value per sample.

        False for a sample that is only repeated to give all ranks equal steps (`tail="repeat"`).

        Raises:
            OptionError: No batch was returned yet.
        """
        last = self._loader_progress.last
        if last is None:
            raise OptionError("mask describes the last batch, and no batch was returned yet")
        request, failures = last
        if request.is_of_stream:
            raise OptionError(
                "mask is not available for an iterable dataset, whose samples are not planned"
            )
        index = list(request.index) if hasattr(request.index, "__len__") else [request.index]
        counts = [True] * (len(index) - request.repeated) + [False] * request.repeated
        for failure in failures:  # left out of the batch, so also here
            at = index.index(failure.source)
            del index[at], counts[at]
        return torch.tensor(counts, dtype=torch.bool)

    @property
    def failures(self) -> list[Failure]:
        """The samples that were left out so far (`on_error="skip"`), in order: the first 1,000."""
        return list(self._loader_progress.failures)

    def statistics(self) -> Statistics:
        """Return counts and times of the loader so far; cheap, and possible at any time."""
        progress, kind = self._loader_progress, self._kind()
        progress.audit.poll()
        pipeline, feeds = progress.pipeline, progress.feeds
        waiting = [each for feed in feeds for each in feed.waiting()]
        epoch, batch = progress.next_epoch - 1, 0
        ready: list[tuple[int, int]] = []
        sources, tokens = {}, {}
        if pipeline is not None and pipeline.planner is not None:
            planner, position = pipeline.planner, pipeline.samples_before
            epoch, batch = planner.epoch, planner.batch
            names = getattr(kind.dataset, "datasets", ())
            sources = pipeline.kind.samples_by_source(names, position)
            tokens = pipeline.kind.tokens_by_source(position)
            if pipeline.feed is not None and kind.returns_in_order:
                tasks = [task for task, _ in pipeline.feed.waiting()]
                ready = _numbers_of(planner.requested(tasks), planner)
        if progress.resumed is not None and progress.resumed.batch:
            epoch, batch = progress.resumed.epoch, progress.resumed.batch
        return statistics_of(
            progress.trace,
            epoch=epoch,
            batch=batch,
            ready_batches=len(waiting),
            ready_bytes=sum(nbytes for _, nbytes in waiting),
            ready_from=ready[0] if ready else None,
            ready_to=ready[-1] if ready else None,
            in_flight=sum(feed.in_flight for feed in feeds),
            failures=progress.failures.total,
            audited=progress.audit.samples,
            differences=progress.audit.described(),
            sources=sources,
            tokens=tokens,
        )

    def diagnose(self) -> Diagnosis:
        """Return why training waits, and what to change: `print(loader.diagnose())`.

        It looks at the last 2,048 steps at most, and takes about 0.1 s, at any time.
        """
        from forebay.loading.facts import diagnosis_of, setup_now

        progress = self._loader_progress
        setup = setup_now(progress.setup or self._kind().setup, progress.trace)
        return diagnosis_of(progress.trace, setup, self.dataset, progress.audit.note())

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write what happened so far to a self-contained HTML file: waits, workers, slow samples.

        The file opens without a network, stays below 300 KB, and holds its data as JSON.

        Args:
            path: Where. An earlier report is replaced.

        Returns:
            The path of the file.

        Raises:
            OptionError: There is a file that is not a report; it was left as it is.
            OSError: The file cannot be written.
        """
        from forebay.loading.facts import report_of

        return report_of(self._kind(), self._loader_progress, path)

    def save_trace(self, path: str | os.PathLike[str]) -> Path:
        """Write the last steps and batches one by one, for Perfetto or chrome://tracing.

        A row for training has its waits, its steps and how many batches were ready, and a row for
        each worker the batches that it made: at most 2,048 of each; of those that take less than
        2 ms, some. Times are those of the day, in microseconds.

        Args:
            path: Where, such as "loader.trace.json". A file of that name is replaced.

        Returns:
            The path of the file.

        Raises:
            OSError: The file cannot be written.
        """
        from forebay.loading.facts import trace_of

        return trace_of(self._kind(), self._loader_progress.trace, path)

    def check(self, samples: int = 4) -> SampleCheck:
        """Make some samples in two workers, and again in another process, and compare them.

        With a seed, samples that differ draw from a generator that forebay cannot reach, or depend
        on more than the seed; without one, what differs is random. So do batches, if `collate_fn`
        is not torch's. Files that were opened before the workers began, and that these read from
        one shared position, are named, too. Nothing is made in this process, and the iteration is
        not affected. While a loader with a seed runs, it does the same for a few samples by
        itself.

        Args:
            samples: How many, at least 1: spread over the dataset, or the first ones of a sampler
                of yours.

        Returns:
            What differs: samples and their fields, in bits and in the states of objects. It is true
            if nothing does and all could be compared; its `str` is the answer in sentences.

        Raises:
            OptionError: The dataset is iterable or empty.
            Exception: What a sample raised.
        """
        from forebay.loading.sample_check import check_samples

        return check_samples(self._kind(), samples, self._class)

    def replay(self, *, epoch: int, batch: int) -> Any:
        """Rebuild one batch in this process, for debugging, without affecting the iteration.

        Dataset and sampler are used as they are: if one has `set_epoch`, call that for the epoch
        first. A sampler with a state, or with a generator of its own, is set back to where the
        epoch that is being read began; other epochs of it cannot be made again.

        Args:
            epoch: The batch's epoch, from 0.
            batch: The batch's number in the epoch, from 0.

        Returns:
            The same batch, bit for bit.

        Raises:
            OptionError: The loader has no seed.
            IndexError: The epoch has no such batch.
            Exception: What the dataset or collate_fn raised, with the traceback of this call.
        """
        from forebay.loading.replay import replayed

        return replayed(self._kind(), self._loader_progress, epoch, batch)
