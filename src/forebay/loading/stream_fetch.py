"""Fetch the samples of a worker's part of an iterable dataset, in its order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

from torch.utils.data import IterDataPipe
from torch.utils.data.graph_settings import apply_random_seed

from forebay.base import torch_internals
from forebay.base.randomness import seed_generators, seeded_generator
from forebay.collating.rules import collated
from forebay.errors import OptionError
from forebay.loading.fetch import BatchFetcher, EndOfDataset
from forebay.loading.messages import STREAM, BatchRequest, BatchSpec, WorkerState
from forebay.loading.samplers import NO_STATE, has_state
from forebay.loading.snapshots import unpickled
from forebay.pools.events import Refusal
from forebay.seeds import SAMPLE, child_seed, seed_of


class StreamFetcher(BatchFetcher):
    """Fetches samples of this worker's part of an iterable dataset, in its order."""

    def __init__(self, spec: BatchSpec, worker_id: int, **surroundings: Any) -> None:
        """See `BatchFetcher`; reading begins with `open`."""
        super().__init__(spec, worker_id, **surroundings)
        self._epoch: int | None = None
        self._samples: Iterator[Any] | None = None
        self._has_ended = False
        self._seed: int | None = None  # of this worker in this epoch
        self._read = 0  # samples of this epoch

    # ---- an epoch ------------------------------------------------------------------------------

    def is_open_for(self, request: BatchRequest) -> bool:
        """See `BatchFetcher`."""
        return request.epoch == self._epoch

    def open(self, request: BatchRequest) -> None:
        """Begin to iterate the dataset; on a resume, read on from the worker's state."""
        spec, is_first = self._spec, self._samples is None
        if request.worker_seed is not None:
            # Whatever worker_init_fn has seeded: in a worker that lives on it is not called again.
            known = request.worker_seed, self._worker_id
            seed = torch_internals.seed_as_worker(*known, with_devices=self._is_process)
            if self._is_process:
                torch_internals.set_worker_seed(seed)
            self._seed = seed_of(seed, SAMPLE)
        if isinstance(spec.dataset, IterDataPipe) and request.shared_seed is not None:
            apply_random_seed(spec.dataset, seeded_generator(request.shared_seed, "cpu"))
        state = WorkerState()
        if is_first and spec.worker_states:
            state = spec.worker_states[self._worker_id]
            if request.epoch != spec.first_epoch:
                state = state._replace(phase="before", since=0)
        self._read = state.samples if state.phase == "within" else 0
        self._samples, self._has_ended = self._begun(state), False
        self._epoch = request.epoch
        # What was read after the state was taken, and what a dead worker returned before.
        left = state.since if isinstance(state.since, int) else 0
        size = len(request.index) if spec.auto_collation else 1
        while left > 0:
            index = [None] * min(size, left) if spec.auto_collation else request.index
            self._read_again(request._replace(index=index))
            left -= size
        for _ in range(request.preceding):
            self._read_again(request)

    def _begun(self, state: WorkerState) -> Iterator[Any]:
        """Return an iterator over the dataset, which continues from a state."""
        dataset = self._spec.dataset
        if state.dataset is not None:
            dataset.load_state_dict(unpickled(state.dataset))
        samples: Iterator[Any] = iter(dataset)
        # Not before: a dataset that is its own iterator may start over in `__iter__`.
        if state.iterator is not None:
            if not has_state(samples):
                kind = type(samples).__name__
                raise OptionError(NO_STATE.format("dataset's iterator", kind))
            samples.load_state_dict(unpickled(state.iterator))  # type: ignore[attr-defined]
            if state.phase != "within":  # the state is from before this epoch
                samples = iter(dataset)
        return samples

    # ---- batches -------------------------------------------------------------------------------

    def fetch(self, request: BatchRequest) -> Any:
        """Return the next samples as a list, or the next sample."""
        assert self._samples is not None, "open comes first"
        if self._has_ended:
            raise EndOfDataset
        if not self._spec.auto_collation:
            try:
                return self._next()
            except StopIteration:
                self._has_ended = True
                raise EndOfDataset from None
        samples = []
        for _ in request.index:
            try:
                samples.append(self._next())
            except StopIteration:
                self._has_ended = True
                break
        if not samples or (self._spec.drop_last and len(samples) < len(request.index)):
            self._has_ended = True
            raise EndOfDataset
        return samples

    def _next(self) -> Any:
        """Return the next sample; with a seed, what it draws depends on its number alone."""
        assert self._samples is not None
        if self._seed is not None and self._read:  # the first draws on from the seed of the epoch
            seed_generators(child_seed(self._seed, self._read))
        sample = next(self._samples)
        self._read += 1
        return sample

    def collate(self, request: BatchRequest, samples: Any) -> Any:
        """See `BatchFetcher`; random numbers continue the worker's sequence."""
        return collated(self._spec.collate_fn, samples)

    def reads_everything(self) -> bool:
        """See `BatchFetcher`: nothing has asked which worker it is in."""
        is_divided = self._spec.worker_init_fn is not None or torch_internals.asked_for_worker()
        return int(self._spec.num_workers) > 1 and not is_divided

    @staticmethod
    def ended_by(error: BaseException) -> NoReturn:
        """See `BatchFetcher`. A generator has ended then, and could not be read on."""
        raise Refusal(STREAM) from error

    # ---- state ---------------------------------------------------------------------------------

    @property
    def has_state(self) -> bool:
        """See `BatchFetcher`: that of the dataset or of its iterator."""
        return has_state(self._spec.dataset) or has_state(self._samples)

    def state(self) -> WorkerState:
        """Return the states of the dataset and its iterator."""
        dataset, samples = self._spec.dataset, self._samples
        iterator = samples.state_dict() if has_state(samples) else None  # type: ignore[union-attr]
        is_own = samples is dataset
        state = None if is_own or not has_state(dataset) else dataset.state_dict()
        phase = "ended" if self._has_ended else "within"
        return WorkerState(state, iterator, phase, samples=self._read)

    def state_read_here(self) -> WorkerState | None:
        """See `BatchFetcher`."""
        return None if self._samples is None else self.state()
