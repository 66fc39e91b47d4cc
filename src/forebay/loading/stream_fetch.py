"""Fetch the samples of a worker's part of an iterable dataset, in its order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from forebay.base.datasets import OwnedGenerators
from forebay.collating.rules import collated
from forebay.errors import OptionError
from forebay.loading.messages import BatchRequest, BatchSpec, WorkerState
from forebay.loading.samplers import NO_STATE, has_state
from forebay.loading.snapshots import unpickled


class EndOfDataset(Exception):  # noqa: N818 - not an error: the end of the data
    """The dataset's iterator is exhausted."""


class IterableFetcher:
    """Fetches samples of this worker's part of an iterable dataset, in its order.

    Args:
        seed: 64 bits for the generators that the dataset owns; None to leave them as they are.
        state: The state to continue from; None to start at the beginning.
    """

    failures = ()  # no sample is ever skipped

    def __init__(
        self, spec: BatchSpec, seed: int | None = None, state: WorkerState | None = None
    ) -> None:
        self._spec, self.ended, dataset = spec, False, spec.dataset
        if seed is not None:
            OwnedGenerators(dataset=dataset, collate_fn=spec.collate_fn).seed(seed)
        if state is not None and state.dataset is not None:
            dataset.load_state_dict(unpickled(state.dataset))
        self._samples: Iterator[Any] = iter(dataset)
        # Not before: a dataset that is its own iterator may start over in `__iter__`.
        if state is not None and state.iterator is not None:
            if not has_state(self._samples):
                kind = type(self._samples).__name__
                raise OptionError(NO_STATE.format("dataset's iterator", kind))
            restored = unpickled(state.iterator)
            self._samples.load_state_dict(restored)  # type: ignore[attr-defined]
            if state.phase != "within":  # the state is from before this epoch
                self._samples = iter(dataset)

    def state(self) -> WorkerState:
        """Return the states of the dataset and its iterator."""
        dataset, samples = self._spec.dataset, self._samples
        iterator = samples.state_dict() if has_state(samples) else None  # type: ignore[attr-defined]
        is_own = samples is dataset
        state = None if is_own or not has_state(dataset) else dataset.state_dict()
        return WorkerState(state, iterator, "ended" if self.ended else "within")

    @property
    def has_state(self) -> bool:
        """Return whether the dataset or its iterator has a state."""
        return has_state(self._spec.dataset) or has_state(self._samples)

    def fetch(self, request: BatchRequest) -> Any:
        """Return the next samples as a list, or the next sample."""
        if self.ended:
            raise EndOfDataset
        if not self._spec.auto_collation:
            try:
                return next(self._samples)
            except StopIteration:
                self.ended = True
                raise EndOfDataset from None
        samples = []
        for _ in request.index:
            try:
                samples.append(next(self._samples))
            except StopIteration:
                self.ended = True
                break
        if not samples or (self._spec.drop_last and len(samples) < len(request.index)):
            self.ended = True
            raise EndOfDataset
        return samples

    def collate(self, _: BatchRequest, samples: Any) -> Any:
        """Make a batch from samples; random numbers continue the worker's sequence."""
        return collated(self._spec.collate_fn, samples)
