"""Batches of sample ranges, in order, each with the samples that could not be loaded.

    parts 2 3 5 ──> ranges of samples ──> DataLoader ──> Loaded, Loaded, …

A batch never crosses the end of a part. A sample's random numbers depend on its index only, so
they are the same for any batch size and number of workers, and after a kill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from forebay.devices.device import Device, copying_device
from forebay.failures import Failure
from forebay.loader import DataLoader
from forebay.loading.iterators import BatchIterator
from forebay.loading.messages import BatchError, BatchResult, Result
from forebay.loading.progress import LoaderProgress, setup_of
from forebay.loading.selections import RangeSampler
from forebay.observe.record import Trace
from forebay.options import Ray

if TYPE_CHECKING:
    from forebay.observe.diagnosis import Diagnosis

# The seed of samples that draw random numbers.
SEED = 0
# Samples that fail are the limit if batches with them take so large a share of the model's time.
FAILING_SHARE = 0.2


class Loaded(NamedTuple):
    """One batch, ready for the model.

    Attributes:
        batch: The collated samples; None if there are none.
    """

    indices: list[int]
    batch: Any
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeReader:
    """Reads a dataset range by range. Picklable if the dataset is.

    Attributes:
        collate_fn: Makes a batch of a list of samples; None for torch's default.
        num_workers: Number of workers; 0 for this process; None for as many as a cluster has room
            for, with a factory; an `AutoWorkers` for as many as the model needs.
        device: Where batches of worker processes are copied before they are taken, if there is
            memory; None for host memory.
    """

    dataset: Any
    part_size: int
    batch_size: int
    collate_fn: Callable[[Any], Any] | None
    num_workers: int | None
    backend: str | Ray
    timeout: float
    settings: dict[str, Any]
    device: torch.device | Device | None = None

    def read(self, parts: Sequence[Sequence[int]], trace: Trace | None = None) -> Iterator[Loaded]:
        """Yield the batches of these samples of parts, one part after the other.

        Every sample comes exactly once, in `indices` or in `failures`.
        """
        return self._read(self._loader(parts, self.num_workers or 0, self.backend), trace)

    def load(self, indices: Sequence[int]) -> Iterator[Loaded]:
        """Load samples again in this process; yield one batch, or several if collating fails."""
        return self._read(self._loader([indices], 0, "process"))

    def diagnosis(self, trace: Trace, failing_share: float = 0.0) -> Diagnosis:
        """Return why the model waited, while a trace was recorded.

        Args:
            failing_share: The part of the model's time for batches with samples that fail.
        """
        from forebay.loading.facts import diagnosis_of, setup_now

        loader = self._loader([], self.num_workers or 0, self.backend)
        setup = setup_now(setup_of(loader._kind()), trace)
        setup = replace(setup, consumer="the model", step="the model", concurrency=None)
        found = diagnosis_of(trace, setup, loader.dataset)
        of_all = failing_share * (1.0 - found.wait_share)
        if of_all < max(FAILING_SHARE, found.wait_share):
            return found
        verdict = (
            f"Samples that fail are the limit: {failing_share:.0%} of the model's time went into "
            "batches with such samples, which are halved until each is found. Fix the samples that "
            "`failures` lists, or leave them out."
        )
        return replace(found, cause="consumer", advice={}, expected_rate=None, verdict=verdict)

    def _loader(
        self, ranges: Sequence[Sequence[int]], num_workers: int, backend: str | Ray
    ) -> DataLoader[Any]:
        in_workers: dict[str, Any] = {"backend": backend, "timeout": self.timeout}
        if copying_device(self.device) is not None:  # the model moves batches to any other
            in_workers["device"] = self.device
        return DataLoader(
            self.dataset,
            batch_sampler=RangeSampler(ranges, self.batch_size),
            collate_fn=self.collate_fn,
            num_workers=num_workers,
            seed=SEED,
            on_error="skip",
            **(in_workers | self.settings if num_workers else {}),
        )

    def _read(self, loader: DataLoader[Any], trace: Trace | None = None) -> Iterator[Loaded]:
        # Not `iter(loader)`: the page of `forebay top` is that of the run.
        progress = LoaderProgress(trace=trace)
        try:
            for request, result in BatchIterator(loader, loader._kind(), progress).results():
                yield from self._loaded(list(request.index), result)
        finally:
            progress.close()

    def _loaded(self, indices: list[int], result: Result) -> Iterator[Loaded]:
        if isinstance(result, BatchResult):
            failed = {failure.index for failure in result.failures}
            kept = [index for index in indices if index not in failed] if failed else indices
            yield Loaded(kept, result.batch, tuple(map(_of_sample, result.failures)))
        elif len(indices) == 1:
            yield Loaded([], None, (_of_sample(_failure(result), indices[0]),))
        else:
            middle = len(indices) // 2
            in_worker = int(isinstance(result, Failure))  # a sample may kill its process
            # Not on a cluster, where it could wait for ever for room that the others have.
            backend = self.backend if self.backend in ("process", "thread") else "process"
            halves = [indices[:middle], indices[middle:]]
            yield from self._read(self._loader(halves, in_worker, backend))


def _failure(result: Result) -> Failure:
    """Return the failure of a batch that could not be made."""
    if isinstance(result, Failure):
        return result
    assert isinstance(result, BatchError)
    try:
        result.reraise()
    except Exception as error:  # noqa: BLE001 - whatever the collate function raises
        return Failure.of(error)


def _of_sample(failure: Failure, index: int | None = None) -> Failure:
    source = failure.source if index is None else index
    return failure._replace(source=source, epoch=None, batch=None, exception=None)


# The columns for a sample's number and its name.
INDEX, SOURCE = "index", "source"
