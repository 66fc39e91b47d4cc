"""Iterators that need no worker: batches are made in the trainer's own thread.

ArrayIterator   tensors in memory: slicing, which takes less than being sent a batch
PlainIterator   torch's own iterator for num_workers=0
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import torch
from torch._C._autograd import _profiler_enabled
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler
from torch.utils.data._utils import pin_memory
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _DatasetKind,
    _SingleProcessDataLoaderIter,
)

from forebay.collating.rules import collated
from forebay.errors import shortened
from forebay.loading.fetch import slicing
from forebay.loading.handles import WorkerHandle
from forebay.loading.recipe import Lane
from forebay.loading.state import Place, begun


class QuickNext(_BaseDataLoaderIter):
    """Torch's iterator without what only a profiler and an iterable dataset's length need."""

    def __next__(self) -> Any:
        if self._dataset_kind == _DatasetKind.Iterable or _profiler_enabled():
            return super().__next__()
        following: Callable[[], Any] = self._next_data  # torch declares that it never returns
        batch = following()
        self._num_yielded += 1
        return batch


class PlainIterator(_SingleProcessDataLoaderIter):
    """Torch's own iterator for no workers; exceptions gain a note."""

    _workers: ClassVar[list[WorkerHandle]] = []

    def __init__(self, loader: Any) -> None:
        """Make torch's checks and draws."""
        super().__init__(loader)
        self._dataset_fetcher.collate_fn = partial(collated, self._collate_fn)
        self._place: Place = loader._place
        if self._place.lanes and self._place.lanes[0].ended:
            self._dataset_fetcher.ended = True

    def draw_order(self) -> None:
        """Draw what the sampler draws for its order, now."""
        self._sampler_iter = begun(self._sampler_iter)

    def _next_data(self) -> Any:
        place, is_map = self._place, self._dataset_kind == _DatasetKind.Map
        try:
            index = self._next_index()
        except StopIteration:
            place.is_over = True
            raise
        if is_map:
            place.went()
        try:
            data = self._dataset_fetcher.fetch(index)
        except StopIteration:
            place.is_over |= not is_map
            raise
        except Exception as error:
            error.add_note(f"forebay: batch {self._num_yielded}, the samples {shortened(index)}")
            raise
        if not is_map:
            place.went()
        if place.lanes:
            dataset: Any = self._dataset
            place.lane_went(0, Lane(dataset.state_dict(), self._dataset_fetcher.ended))
        return pin_memory.pin_memory(data, self._pin_memory_device) if self._pin_memory else data


class ArrayIterator(QuickNext):
    """Slices tensors that are in memory already; sending them from a worker would take longer."""

    def __init__(self, loader: Any) -> None:
        """Make torch's checks and draws."""
        super().__init__(loader)
        self._workers: list[WorkerHandle] = []
        self._cut = slicing(loader._recipe(self._base_seed, None))
        self._place: Place = loader._place
        self._rows = rows_of(loader._index_sampler)
        # torch's iterators with workers read the sampler so far as they are made.
        ahead = loader.prefetch_factor * self._num_workers if self._num_workers else 0
        self._next_rows = deque(itertools.islice(self._rows, ahead))

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        super()._reset(loader, first_iter)
        self._place = loader._place
        self._rows = rows_of(loader._index_sampler)
        self._next_rows.clear()

    def draw_order(self) -> None:
        """Draw what the sampler draws for its order, now."""
        self._rows = begun(self._rows)

    def _next_data(self) -> Any:
        assert self._cut is not None
        self._next_rows.extend(itertools.islice(self._rows, 1))
        if not self._next_rows:
            self._place.is_over = True
            raise StopIteration
        index = self._next_rows.popleft()
        self._place.went()
        try:
            batch = self._cut(index)
        except (TypeError, ValueError, RuntimeError):  # not plain numbers: as torch does it
            batch = self._collate_fn([self._dataset[one] for one in index])
        if self._pin_memory:
            return pin_memory.pin_memory(batch, self._pin_memory_device)
        return batch

    def _shutdown_workers(self) -> None:
        """There are none."""


def rows_of(sampler: Any) -> Iterator[Any]:
    """Yield the indices of each batch: as tensors where torch's own samplers allow it.

    The numbers, and the random draws, are those of the samplers.
    """
    inner: Any = getattr(sampler, "sampler", None)
    if type(sampler) is not BatchSampler or type(inner) not in (RandomSampler, SequentialSampler):
        yield from sampler
        return
    length = len(inner.data_source)
    if type(inner) is SequentialSampler:
        order = torch.arange(length)
    elif inner.replacement or inner.num_samples != length:
        yield from sampler
        return
    else:
        generator = inner.generator
        if generator is None:
            generator = torch.Generator()
            generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
        order = torch.randperm(length, generator=generator)
    size = sampler.batch_size
    end = length - length % size if sampler.drop_last else length
    for start in range(0, end, size):
        yield order[start : min(start + size, end)]
    if type(inner) is RandomSampler:
        torch.randperm(length, generator=generator)  # torch draws once more when it has come here
