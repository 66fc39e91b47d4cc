"""Getting the samples of a batch from a dataset, and saying which of them raised."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset, TensorDataset
from torch.utils.data._utils.collate import default_collate

from forebay.collating.rules import collated
from forebay.loading.recipe import Order, Recipe, SkippedSample
from forebay.loading.seeding import seed_generators
from forebay.plan.seeds import COLLATE, SAMPLE, seed_of


class EndOfDataset(Exception):  # noqa: N818 - not an error: an iterable dataset has no more
    """The dataset's iterator is at its end."""


class SampleError(Exception):
    """A sample raised; the user's exception is the `__cause__`.

    Attributes:
        index: What the sampler gave for it.
    """

    def __init__(self, index: Any) -> None:
        """Name the sample."""
        super().__init__(index)
        self.index = index


class MapFetcher:
    """Samples of a map-style dataset, by index.

    Args:
        recipe: What to fetch from, and how.
        guard: Put around each sample, for threads that share the random generators.
    """

    def __init__(
        self, recipe: Recipe, guard: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        """See the class."""
        self._recipe = recipe
        self._guard = guard
        self._whole = slicing(recipe)

    def fetch(self, order: Order, skipped: list[SkippedSample]) -> Any:
        """Return the list of samples of a batch, or one sample; what is left out is listed.

        Raises:
            SampleError: A sample raised.
        """
        recipe, dataset = self._recipe, self._recipe.dataset
        if not recipe.auto_collation:
            samples = self._samples(order, [order.index], skipped)
            return samples[0] if samples else samples
        if getattr(dataset, "__getitems__", None):
            try:
                return self._guarded(order, 0, lambda: dataset.__getitems__(order.index))
            except Exception as error:
                if not recipe.skip_errors:
                    raise SampleError(order.index) from error
        return self._samples(order, order.index, skipped)

    def _samples(
        self, order: Order, indices: Iterable[Any], skipped: list[SkippedSample]
    ) -> list[Any]:
        samples = []
        for position, index in enumerate(indices):
            try:
                samples.append(self._one(order, index, position))
            except SampleError as error:
                if not self._recipe.skip_errors:
                    raise
                skipped.append(_skipped(order, error))
        return samples

    def whole_batch(self, order: Order) -> Any:
        """Return the whole batch by slicing, where the dataset is nothing but arrays; or None."""
        if self._whole is None:
            return None
        try:
            return self._whole(order.index)
        except Exception:
            if not self._recipe.skip_errors:
                raise
            return None  # one by one it shows which sample is to be left out

    def again(self, order: Order) -> Any:
        """Return the batch of an order, in this very thread.

        Raises:
            IndexError: Every sample of it is left out.
            Exception: What making it raised.
        """
        batch = self.whole_batch(order)
        if batch is not None:
            return batch
        skipped: list[SkippedSample] = []
        try:
            samples = self.fetch(order, skipped)
        except SampleError as error:
            raise error.__cause__ or error from None
        if skipped and not samples:
            raise IndexError(f"every sample of epoch {order.epoch}, batch {order.batch} is bad")
        return self.collate(order, samples)

    def _one(self, order: Order, index: Any, position: int) -> Any:
        dataset = self._recipe.dataset
        try:
            return self._guarded(order, position, lambda: dataset[index])
        except Exception as error:
            raise SampleError(index) from error

    def _guarded(self, order: Order, position: int, get: Callable[[], Any]) -> Any:
        seed = self._recipe.seed
        if seed is None:
            return get()
        with self._guard():
            seed_generators(seed_of(seed, SAMPLE, order.epoch, order.batch, position))
            return get()

    def collate(self, order: Order, samples: Any) -> Any:
        """Make a batch of the samples."""
        recipe = self._recipe
        if recipe.seed is None:
            return collated(recipe.collate_fn, samples)
        with self._guard():
            seed_generators(seed_of(recipe.seed, COLLATE, order.epoch, order.batch))
            return collated(recipe.collate_fn, samples)


class IterableFetcher:
    """Samples of an iterable dataset, in this worker's own order."""

    def __init__(self, recipe: Recipe) -> None:
        """Begin to iterate."""
        self._recipe = recipe
        self._samples: Iterator[Any] = iter(recipe.dataset)
        self._ended = False

    @property
    def ended(self) -> bool:
        """Whether it is known that there are no more."""
        return self._ended

    def fetch(self, order: Order) -> Any:
        """Return the next samples as a list, or the next sample.

        Raises:
            EndOfDataset: There are no more, or too few for a batch that is not to be dropped.
        """
        if self._ended:
            raise EndOfDataset
        if not self._recipe.auto_collation:
            try:
                return next(self._samples)
            except StopIteration:
                self._ended = True
                raise EndOfDataset from None
        samples = []
        for _ in order.index:
            try:
                samples.append(next(self._samples))
            except StopIteration:
                self._ended = True
                break
        if not samples or (self._recipe.drop_last and len(samples) < len(order.index)):
            self._ended = True
            raise EndOfDataset
        return samples


def slicing(recipe: Recipe) -> Callable[[Any], Any] | None:
    """Return what makes a whole batch by indexing, if the dataset is tensors or arrays alone.

    The result is what torch's default_collate gives for the single samples, bit for bit.
    """
    if not recipe.auto_collation or recipe.collate_fn is not default_collate:
        return None
    return _slicing(recipe.dataset)


def _slicing(dataset: Any) -> Callable[[Any], Any] | None:
    if type(dataset) is Subset:
        inner, chosen = _slicing(dataset.dataset), dataset.indices
        if inner is None:
            return None
        return lambda index: inner([chosen[one] for one in index])
    if type(dataset) is TensorDataset and dataset.tensors:
        tensors = dataset.tensors
        if all(map(_is_plain, tensors)):
            # A list, since default_collate makes one of tuples.
            return lambda index: _pick(tensors, index)
    if _is_plain(dataset) and dataset.dim() > 0:
        return lambda index: _pick((dataset,), index)[0]
    if type(dataset) is np.ndarray and dataset.ndim > 1 and dataset.dtype.kind in "biufc":
        return _slicing(torch.from_numpy(dataset)) if dataset.flags.writeable else None
    return None


def _pick(tensors: tuple[torch.Tensor, ...], index: Any) -> list[torch.Tensor]:
    rows = torch.as_tensor(index, dtype=torch.int64)
    try:
        return [torch.index_select(tensor, 0, rows) for tensor in tensors]
    except IndexError:  # it knows no negative indices, and is five times as fast without
        return [tensor[rows] for tensor in tensors]


def _is_plain(value: Any) -> bool:
    return (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and not value.requires_grad
        and not value.is_nested
        and not value.is_quantized
    )


def _skipped(order: Order, error: SampleError) -> SkippedSample:
    cause = error.__cause__
    assert cause is not None
    text = "".join(traceback.format_exception(type(cause), cause, cause.__traceback__))
    kind = type(cause).__name__
    return SkippedSample(error.index, order.epoch, order.batch, kind, str(cause), text)
